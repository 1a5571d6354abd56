"""What fits, and what a plan that does not fit needs, for the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

import rich.console
from rich.console import Group, RenderableType
from rich.text import Text

from toast.fitting import Fit, Remedy
from toast.fitting.fit_table import nearest_text
from toast.plan import odds_text
from toast.report.titled_tables import titled_table
from toast.units import size_text, time_text

#: The columns of ``str()``.
_WIDTH = 80

#: Policies that have no name of their own.
_OWN = "by name"


def fit_as_text(fit: Fit) -> str:
    """The implementation of :meth:`toast.Fit.__str__`."""
    file = io.StringIO()
    console = rich.console.Console(
        file=file, width=_WIDTH, markup=False, emoji=False, highlight=False, color_system=None
    )
    console.print(fit_tables(fit, timed=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def fit_tables(fit: Fit, *, timed: bool = True) -> RenderableType:
    """The output of ``toast plan --fit``: the answer, the table, and how to make its plans.

    ``timed`` adds how long the search took.
    """
    parts: list[RenderableType] = [
        Text(line, style="bold" if fit.rows else "bold red") for line in answer_lines(fit)
    ]
    if fit.rows:
        parts += [Text(), _table(fit)]
        parts += [Text(line) for line in _commands(fit)]
    parts += [Text(f"Note: {note}") for note in fit.note.splitlines()]
    minutes, seconds = divmod(round(fit.seconds), 60)
    duration = f" in {minutes}:{seconds:02}" if timed else ""
    parts.append(Text(f"Search: {fit.plans} plans{duration}"))
    return Group(*parts)


def answer_lines(fit: Fit) -> list[str]:
    """The answer in words, and why it may not be the last word."""
    where = f"{fit.hardware} ({size_text(fit.memory_bytes)} per device)"
    if fit.safety is not None:
        where += f" with odds of {100 * fit.safety:g} %"
    meshes = {row.mesh for row in fit.rows}
    if len(meshes) == 1:
        where = f"mesh {next(iter(meshes))} of {where}"
    lines = []
    if fit.largest is None:
        what = f"no {fit.find}" if fit.find != "devices" else "no number of devices"
        nearest = f": {nearest_text(fit.nearest, fit.memory_bytes)}" if fit.nearest else ""
        lines.append(f"Nothing fits: {what} of {fit.program} fits on {where}{nearest}")
    elif fit.find == "devices":
        lines.append(f"Fewest devices that {fit.program} fits on: {fit.value} of {where}")
    else:
        lines.append(f"Largest {fit.find} of {fit.program} that fits on {where}: {fit.value}")
        if fit.find == "batch" and any(r.microbatches > fit.largest.microbatches for r in fit.rows):
            lines[-1] += " (more in microbatches)"
    if fit.largest is not None and (line := _resolution(fit, fit.largest.value(fit.find))):
        lines.append(line)
    if fit.stopped:
        reason = {"budget": "its budget ran out", "interrupt": "it was interrupted"}[fit.stopped]
        lines.append(f"The search is not complete, as {reason}: more may fit")
    return lines


def _resolution(fit: Fit, value: int) -> str:
    """How close to the answer another size is known not to fit."""
    if fit.find == "devices":
        if fit.next_size is None:
            return ""
        devices = "1 device" if fit.next_size == 1 else f"{fit.next_size} devices"
        return f"No plan was found that fits on {devices}"
    if fit.next_size is not None:
        # A search that was stopped may know sizes between that need little enough.
        between = "" if fit.next_size == value + 1 or fit.stopped else "; none between was tried"
        return f"No plan was found that fits for {fit.find} {fit.next_size}{between}"
    return "" if fit.stopped else f"No larger {fit.find} was tried: more may fit"


def rate_text(rate: float) -> str:
    """Tokens, rows or steps per second: ``12,345`` or ``3.21``."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _table(fit: Fit) -> RenderableType:
    """The rows, without columns in which all are the same."""
    sizes = [
        name for name in dict(fit.rows[0].sizes)
        if name == fit.find or len({dict(row.sizes)[name] for row in fit.rows}) > 1
    ]  # fmt: skip
    columns: dict[str, list[str]] = {}
    if fit.find == "devices":
        columns["devices"] = [str(row.devices) for row in fit.rows]
    for name in sizes:
        columns[name] = [str(dict(row.sizes)[name]) for row in fit.rows]
    if any(row.microbatches > 1 for row in fit.rows):
        columns["parts"] = [str(row.microbatches) for row in fit.rows]
    if any(row.remat for row in fit.rows):
        columns["remat"] = [
            _OWN if row.remat == "own" else row.remat or "-" for row in fit.rows
        ]  # fmt: skip
    if len({row.mesh for row in fit.rows}) > 1:
        columns["mesh"] = [str(row.mesh) for row in fit.rows]
    columns["step"] = [time_text(row.step_seconds) for row in fit.rows]
    columns["peak"] = [size_text(row.peak_bytes) for row in fit.rows]
    if all(row.fit_probability is not None for row in fit.rows):
        columns["odds"] = [odds_text(row.fit_probability or 0.0) for row in fit.rows]
    columns[f"{fit.unit}/s"] = [rate_text(row.rate) for row in fit.rows]
    table = titled_table("", *columns, right=[*columns.keys() - {"remat", "mesh"}])
    table.title = None
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _commands(fit: Fit) -> list[str]:
    """What the columns mean, and the commands of the first and the largest plan."""
    assert fit.best is not None
    assert fit.largest is not None
    lines = []
    if any(row.microbatches > 1 for row in fit.rows):
        lines.append("parts: microbatches, whose gradients are added up")
    if any(row.remat == "own" for row in fit.rows):
        lines.append(f"{_OWN}: kept, recomputed or offloaded by name; the plan prints it")
    if fit.best.command:
        lines.append(f"The first: {fit.best.command}")
    if fit.largest.command and fit.largest is not fit.best:
        lines.append(f"The largest {fit.find}: {fit.largest.command}")
    return lines


def _figures(remedy: Remedy) -> tuple[str, str, str]:
    """The peak, the step and the rate of a remedy; ``~`` marks those of another policy."""
    peak, step, rate = remedy.peak_bytes, remedy.step_seconds, remedy.rate
    if peak is None or step is None or rate is None:
        return "", "", ""
    about = "~" if remedy.recomputes else ""
    return f"{about}{size_text(peak)}", f"{about}{time_text(step)}", f"{about}{rate_text(rate)}"


def remedy_tables(remedies: Sequence[Remedy]) -> RenderableType:
    """What it takes for a plan to fit; empty without remedies."""
    if not remedies:
        return Group()
    planned = [remedy for remedy in remedies if remedy.source == "planned"]
    figures = ["peak", "step", f"{planned[0].unit}/s"] if planned else []
    table = titled_table("What it takes to fit", "change", *figures, "what", right=figures)
    for remedy in remedies:
        table.add_row(remedy.change, *(_figures(remedy) if planned else ()), remedy.text)
    parts: list[RenderableType] = [table]
    if planned:
        parts.append(Text(
            "With a peak: planned, in one round of the search. Others: from prices. Changes for "
            "these devices come first, and of them those with the most work per second."
        ))  # fmt: skip
    if any(remedy.recomputes for remedy in planned):
        parts.append(Text(
            "~: everything is recomputed; the plan of the command chooses what is, and how often "
            "the batch is cut, and is about as fast or faster."
        ))  # fmt: skip
    first = next((remedy.command for remedy in remedies if remedy.command), "")
    if first:
        parts.append(Text(f"The first: {first}"))
    for remedy in remedies:
        if remedy.change == "--fit devices" and remedy.command not in ("", first):
            parts.append(Text(f"The fewest devices: {remedy.command}"))
    return Group(*parts)
