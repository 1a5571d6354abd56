"""Small static charts as inline SVG.

This module draws them without a plotting library: each is a few rectangles and lines, takes its
colours from the page in light and dark, and has a text for screen readers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from toast.units import size_text, time_text

#: Maximum number of cuts that are drawn along one dimension.
_CUTS = 16

#: Maximum number of points of a timeline: one per pixel and a half.
_POINTS = 640


def tensor(row: Mapping[str, Any]) -> Markup:
    """An argument and its shards, as SVG.

    ``row`` is a row of ``arguments`` (:mod:`toast.report.html.data`).  The last dimension is
    horizontal, the one before it vertical, and earlier dimensions are depth.  The shard of one
    device is filled.
    """
    shape, axes, shards, majors = row["shape"], row["axes"], row["shards"], row["majors"]
    whole = " by ".join(map(str, shape)) or "a scalar"
    parts = [
        f"dimension {d} in {k} parts over {' and '.join(on)}"
        for d, (k, on) in enumerate(zip(shards, axes, strict=True)) if k > 1
    ]  # fmt: skip
    title = f"{whole}, " + (
        f"sharded: {'; '.join(parts)}" if parts else "replicated on every device"
    )
    rank = len(shape)
    width, height = _extents(shape)
    deep = math.prod(shards[:-2]) if rank > 2 else 1
    depth = min(max(3, deep), 5) if rank > 2 else 1
    step = 4
    total_w, total_h = width + step * (depth - 1) + 2, height + step * (depth - 1) + 2
    across, down = (shards[-1] if rank else 1), (shards[-2] if rank > 1 else 1)
    shapes = []
    for layer in reversed(range(depth)):
        x, y = 1 + step * layer, 1 + step * (depth - 1 - layer)
        shapes.append(f'<rect class="whole" x="{x}" y="{y}" width="{width}" height="{height}"/>')
        if layer and deep > 1:
            continue
        if layer == 0 or deep == 1:
            w, h = max(width / across, 2), max(height / down, 2)
            kind = "mine" if layer == 0 else "mine behind"
            shapes.append(
                f'<rect class="{kind}" x="{x}" y="{y}" width="{w:.1f}" height="{h:.1f}"/>'
            )
        if layer == 0:
            shapes += [
                f'<path class="{kind}" d="M{x + at:.1f} {y}v{height}"/>'
                for at, kind in (_cuts(across, majors[-1], width) if rank else ())
            ]
            shapes += [
                f'<path class="{kind}" d="M{x} {y + at:.1f}h{width}"/>'
                for at, kind in (_cuts(down, majors[-2], height) if rank > 1 else ())
            ]
    return Markup(
        f'<svg class="tensor" role="img" width="{total_w}" height="{total_h}" '
        f'viewBox="0 0 {total_w} {total_h}"><title>{escape(title)}</title>{"".join(shapes)}</svg>'
    )


def _extents(shape: Sequence[int]) -> tuple[int, int]:
    """Width and height in pixels, from the logarithms of the last two sizes."""
    if not shape:
        return 8, 8
    if len(shape) == 1:
        return _extent(shape[0], 64), 8
    return _extent(shape[-1], 64), _extent(shape[-2], 44)


def _extent(size: int, most: int) -> int:
    return round(min(most, 8 + (most - 8) * math.log2(max(size, 1)) / 14))


def _cuts(shards: int, major: int, length: float) -> list[tuple[float, str]]:
    """Positions and classes of the cuts; those of the first axis are strong.

    If there are many cuts, only some are drawn.
    """
    minor = [(length * i / shards, "cut minor") for i in range(1, shards)]
    if length < 3 * shards:
        minor = []
    shown = min(major, _CUTS, max(1, int(length / 3)))
    return [*minor, *((length * i / shown, "cut") for i in range(1, shown))]


def mesh(axes: Sequence[tuple[str, int]]) -> Markup:
    """The devices of a mesh, as SVG: the last axis is horizontal, the others are vertical.

    Axes of one device are not drawn.
    """
    *others, columns = [size for _, size in axes if size > 1] or [1]
    rows = math.prod(others)
    if columns > 32 or rows > 16:
        return Markup("")
    cell = 9 if columns <= 16 else 5
    width, height = columns * cell + 1, rows * cell + 1
    text = " by ".join(f"{name} {size}" for name, size in axes)
    cells = "".join(
        f'<rect x="{x * cell + 0.5}" y="{y * cell + 0.5}" width="{cell - 2}" height="{cell - 2}"/>'
        for y, x in itertools.product(range(rows), range(columns))
    )
    return Markup(
        f'<svg class="mesh" role="img" width="{width}" height="{height}" viewBox="0 0 {width} '
        f'{height}"><title>{escape(f"Mesh of devices: {text}")}</title>{cells}</svg>'
    )


#: The largest number of devices that a map of the mesh draws along an axis.
_DRAWN = 16


def mesh_map(axes: Sequence[tuple[str, int]]) -> Markup:
    """The devices of a mesh with their numbers and axes, as SVG; long axes are cut.

    The last axis is horizontal, the one before it vertical; a panel shows each place on the others.
    Each device has its place on all axes in ``data-at``.
    """
    real = [(name, size) for name, size in axes if size > 1] or list(axes[-1:])
    *outer, rows, columns = [("", 1)] * max(0, 2 - len(real)) + real
    panels = list(itertools.product(*(range(min(size, 2)) for _, size in outer)))[:4]
    across, down = min(columns[1], _DRAWN), min(rows[1], _DRAWN)
    cell, left, top, gap = 30, 58, 34, 26
    wide = across * cell + gap
    parts = []
    for number, panel in enumerate(panels):
        x0 = left + number * wide
        if outer:
            at = ", ".join(f"{name} {k}" for (name, _), k in zip(outer, panel, strict=True))
            parts.append(f'<text class="panel" x="{x0}" y="11">{escape(at)}</text>')
        parts.append(f'<text class="axis-name" x="{x0}" y="27">{escape(columns[0])} &#8594;</text>')
        for y, x in itertools.product(range(down), range(across)):
            place = (*panel, y, x) if rows[0] else (*panel, x)
            device = _number(place, [size for _, size in real])
            parts.append(
                f'<g class="device" data-at="{",".join(map(str, place))}">'
                f'<rect x="{x0 + x * cell}" y="{top + y * cell}" width="{cell - 2}" '
                f'height="{cell - 2}" rx="3"/><text x="{x0 + x * cell + cell / 2 - 1:g}" '
                f'y="{top + y * cell + 18}" text-anchor="middle">{device}</text></g>'
            )
    if rows[0]:
        parts.append(f'<text class="axis-name" x="0" y="{top + 18}">{escape(rows[0])}</text>')
        parts.append(f'<text class="axis-name" x="0" y="{top + 32}">&#8595;</text>')
    width, height = left + len(panels) * wide, top + down * cell + 4
    text = " by ".join(f"{name} {size}" for name, size in axes)
    return Markup(
        f'<svg class="mesh-map" role="img" width="{width}" height="{height}" viewBox="0 0 {width} '
        f'{height}" aria-labelledby="mesh-map-title"><title id="mesh-map-title">'
        f"{escape(f'Devices of the mesh: {text}')}</title>{''.join(parts)}</svg>"
    )


def cut_mesh(axes: Sequence[tuple[str, int]]) -> bool:
    """Whether :func:`mesh_map` leaves out devices."""
    sizes = [size for _, size in axes if size > 1]
    return any(size > _DRAWN for size in sizes[-2:]) or any(size > 2 for size in sizes[:-2])


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of a device in row-major order."""
    number = 0
    for at, size in zip(place, sizes, strict=True):
        number = number * size + at
    return number


def stack(parts: Iterable[tuple[str, float]], whole: float) -> Markup:
    """A stacked bar, as SVG: ``parts`` are (class, amount), and ``whole`` is the full width."""
    x, rects = 0.0, []
    for kind, amount in parts:
        width = 100 * amount / whole if whole > 0 else 0.0
        if width > 0.05:
            rects.append(
                f'<rect class="{kind}" x="{x:.2f}" y="0" width="{width:.2f}" height="10"/>'
            )
        x += width
    return Markup(
        '<svg class="stack" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" '
        f'focusable="false">{"".join(rects)}</svg>'
    )


def phases(sections: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The first op and the name of each phase of a program; empty if it has only one."""
    begins: list[tuple[int, str]] = []
    for section in sections:
        name = section["phase"]
        if not name and begins and section["title"] != "results":
            name = section["detail"].split(", ")[0] if begins[-1][1] in _PHASES else begins[-1][1]
        if name and (not begins or begins[-1][1] != name):
            begins.append((section["start"], name))
    return begins if len(begins) > 1 else []


_PHASES = ("forward", "backward")


def timeline(
    data: Mapping[str, Any],
    name: str,
    ops: int,
    limit: float,
    label: str,
    phases: Sequence[tuple[int, str]],
) -> Markup:
    """Live bytes before each op, with the limit, the peak and the phases, as SVG.

    ``data`` is ``before`` or ``after`` of ``memory`` (:mod:`toast.report.html.data`), ``name`` its
    class, ``ops`` the number of ops, ``limit`` in bytes, ``label`` the title.  Lines scale with the
    width of the page; texts do not.
    """
    bottom = 20 if phases else 4
    height, wide = 166 + bottom, 1000
    top: float = (
        max(data["peak_bytes"], limit if limit < 8 * data["peak_bytes"] else 0.0, 1.0) * 1.08
    )

    def share(op: float) -> str:
        return f"{100 * op / max(ops, 1):.2f}%"

    def at_x(op: float) -> float:
        return wide * op / max(ops, 1)

    def at_y(size: float) -> float:
        return height - bottom - (height - bottom - 8) * size / top

    def across(kind: str, size: float) -> str:
        at = f"{at_y(size):.1f}"
        return f'<line class="{kind}" x2="100%" y1="{at}" y2="{at}"/>'

    def down(kind: str, op: float, end: float) -> str:
        return f'<line class="{kind}" x1="{share(op)}" x2="{share(op)}" y1="4" y2="{end}"/>'

    points = _thinned(data["op"], data["live_bytes"], ops, data["argument_bytes"])
    path = f"M{at_x(0):.1f} {at_y(data['argument_bytes']):.1f}"
    path += (
        "".join(f"H{at_x(op):.1f}V{at_y(size):.1f}" for op, size in points) + f"H{at_x(ops):.1f}"
    )
    area = f"{path}V{at_y(0):.1f}H{at_x(0):.1f}Z"
    grid = "".join(
        across("grid", t)
        + f'<text class="tick" x="-6" y="{at_y(t) + 4:.1f}">{size_text(t) if t else "0"}</text>'
        for t in _ticks(top)
    )
    line = ""
    if limit <= top:
        # The dashed line must not cross the text.
        gap = at_y(limit) - at_y(data["argument_bytes"])
        under = 0 < gap < 18 and at_y(limit) + 12 < height - bottom
        shift = 12 if under else -4
        line = across("limit", limit) + (
            f'<text class="limit-text" x="100%" dx="-4" y="{at_y(limit) + shift:.1f}">'
            f"limit {size_text(limit)}</text>"
        )
    ends = [*(op for op, _ in phases), ops][1:]
    marks = "".join(
        down("phase-line", op, height)
        + f'<svg x="{share(op)}" width="{share(end - op)}" height="{height}">'
        f'<text class="phase-text" x="5" y="{height - 5}">{escape(phase)}</text></svg>'
        for (op, phase), end in zip(phases, ends, strict=True)
    )
    peak, at = data["peak_bytes"], data["peak_op"]
    anchor, shift = ("end", -8) if at > 0.6 * ops else ("start", 8)
    description = (
        f"{label}: peak {size_text(peak)} before op {at} of {ops}; "
        f"arguments take {size_text(data['argument_bytes'])}; the limit is {size_text(limit)}."
    )
    return Markup(
        f'<svg class="timeline {name}" role="img" height="{height}" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">Memory in program order, {escape(label)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>{grid}'
        f'<svg width="100%" height="{height}" viewBox="0 0 {wide} {height}" '
        f'preserveAspectRatio="none"><path class="area" d="{area}"/>'
        f'<path class="line" d="{path}"/></svg>'
        f"{across('base', data['argument_bytes'])}{marks}{line}"
        f'<circle class="peak" cx="{share(at)}" cy="{at_y(peak):.1f}" r="4"/>'
        f'<text class="peak-text" text-anchor="{anchor}" x="{share(at)}" dx="{shift}" '
        f'y="{at_y(peak) + 13:.1f}">peak {size_text(peak)}</text>'
        f"{down('cursor', 0, height - bottom)}</svg>"
    )


def policies(rows: Sequence[Mapping[str, Any]], limit: float) -> Markup:
    """The memory of plans with several policies over the time of a step, as SVG, with the limit.

    ``rows`` are those of :func:`toast.report.html.policy_timelines.policy_rows`: the last
    one is the plan.
    """
    height, bottom, wide = 220, 20, 1000
    longest = max(row["step_seconds"] for row in rows) or 1.0
    most = max(row["peak_bytes"] for row in rows)
    top: float = max(most, limit if limit < 8 * most else 0.0, 1.0) * 1.08

    def at_y(size: float) -> float:
        return height - bottom - (height - bottom - 8) * size / top

    def across(kind: str, size: float) -> str:
        at = f"{at_y(size):.1f}"
        return f'<line class="{kind}" x2="100%" y1="{at}" y2="{at}"/>'

    grid = "".join(
        across("grid", t)
        + f'<text class="tick" x="-6" y="{at_y(t) + 4:.1f}">{size_text(t) if t else "0"}</text>'
        for t in _ticks(top)
    )
    marks = "".join(
        f'<text class="phase-text" text-anchor="{anchor}" x="{100 * share:.0f}%" '
        f'y="{height - 5}">{time_text(share * longest) if share else "0"}</text>'
        for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))
    )
    paths = []
    for number, row in enumerate(rows):
        kind = "plan" if number == len(rows) - 1 else f"other{number % 3}"
        path = f"M0 {at_y(row['argument_bytes']):.1f}" + "".join(
            f"H{wide * at / longest:.1f}V{at_y(size):.1f}"
            for at, size in zip(row["seconds"], row["live_bytes"], strict=True)
        ) + f"H{wide * row['step_seconds'] / longest:.1f}V{at_y(0):.1f}"  # fmt: skip
        if kind == "plan":
            paths.append(f'<path class="area" d="{path}H0Z"/>')
        paths.append(f'<path class="{kind}" d="{path}"/>')
    line = ""
    if limit <= top:
        line = across("limit", limit) + (
            f'<text class="limit-text" x="100%" dx="-4" y="{at_y(limit) - 4:.1f}">'
            f"limit {size_text(limit)}</text>"
        )
    described = "; ".join(
        f"{row['label']}: step {time_text(row['step_seconds'])}, peak "
        f"{size_text(row['peak_bytes'])}, {row['fit']}"
        for row in rows
    )
    return Markup(
        f'<svg class="policies" role="img" height="{height}" '
        'aria-labelledby="policies-title policies-desc">'
        '<title id="policies-title">Memory over the time of a step, by memory policy</title>'
        f'<desc id="policies-desc">{escape(described)}; the limit is {size_text(limit)}.</desc>'
        f'{grid}<svg width="100%" height="{height}" viewBox="0 0 {wide} {height}" '
        f'preserveAspectRatio="none">{"".join(paths)}</svg>{marks}{line}</svg>'
    )


def _thinned(
    ops: Sequence[int], sizes: Sequence[int], last: int, first: float
) -> list[tuple[float, float]]:
    """At most ``_POINTS`` points, each the maximum of its interval."""
    if len(ops) <= _POINTS:
        return list(zip(ops, sizes, strict=True))
    largest: dict[int, tuple[float, float]] = {}
    for op, size in zip(ops, sizes, strict=True):
        place = op * _POINTS // max(last, 1)
        if place not in largest or size > largest[place][1]:
            largest[place] = (place * last / _POINTS, size)
    return [largest[place] for place in sorted(largest)]


def _ticks(top: float) -> list[float]:
    """Three or four round numbers of bytes up to ``top``."""
    unit = math.pow(2, 10 * (math.log2(max(top, 1)) // 10))
    for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if top / (step * unit) <= 4:
            break
    return [step * unit * i for i in range(int(top / (step * unit)) + 1)]


def progress(rounds: Sequence[Mapping[str, Any]], cost_before: float) -> Markup:
    """The best cost (logarithmic) over the number of priced states, one point per round, as SVG."""
    width, height, left, bottom = 460, 170, 84, 30
    points = [(0, cost_before), *((r["states"], r["cost"]) for r in rounds)]
    logs = [math.log(max(cost, 1e-12)) for _, cost in points]
    span = max(logs) - min(logs) or 1.0
    last = max(states for states, _ in points)
    at = [
        (left + (width - left - 20) * states / max(last, 1),
         14 + (height - bottom - 28) * (max(logs) - log) / span)
        for (states, _), log in zip(points, logs, strict=True)
    ]  # fmt: skip
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    dots = "".join(f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in at)
    marks = "".join(
        f'<path class="grid" d="M{left} {y:.1f}H{width - 10}"/>'
        f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}">{cost:.4g}</text>'
        for cost, y in ((points[0][1], at[0][1]), (points[-1][1], at[-1][1]))
    )
    text = "; ".join(
        f"round {r['number'] + 1}: {r['states']} states, cost {r['cost']:.4g}, "
        f"{time_text(r['seconds'])}"
        for r in rounds
    )
    return Markup(
        f'<svg class="progress" role="img" viewBox="0 0 {width} {height}">'
        f"<title>Best cost by number of priced states</title><desc>{escape(text)}</desc>"
        f'<path class="axis" d="M{left} 4V{height - bottom}H{width - 10}"/>{marks}'
        f'<path class="line" d="{path}"/>{dots}'
        f'<text class="tick" x="{width - 12}" y="{height - 8}">{last:,} states</text></svg>'
    )
