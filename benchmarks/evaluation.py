"""The paper's evaluation cell by cell: a model, a device, a mesh and a method.

Results are kept in a file, one line each, so that a run that was broken off goes on where it was.
The scripts figure8.py, figure9.py and figure10.py choose cells and write docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # what runs is what sources() reads, whatever is installed

import toast
from toast.cost import CostModel
from toast.errors import PlanError, ToastError
from toast.evaluation.compare import METHODS, compare
from toast.files import check_writable, write_all
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.search.pairwise import proposing
from toast.space import Space

PAGE = ROOT / "docs" / "evaluation.md"
STORE = ROOT / "benchmarks" / ".evaluation.jsonl"

MODELS = ("t2b", "t7b", "gns", "unet", "itx")
HARDWARE = ("tpu-v3", "a100", "p100")
#: 16 and 32 devices.
MESHES = ("data=4,model=4", "data=8,model=4")
#: Seconds that a baseline's search may take, in the full grid and in the quick one.
LIMIT, QUICK_LIMIT = 120.0, 20.0
#: Layers of a model in the quick grid.
QUICK_LAYERS = 2

#: Step times that differ by less are the same.
SAME = 0.005

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is run once."""

    model: str
    #: Options that change the model's size.
    options: tuple[tuple[str, int], ...]
    hardware: str
    mesh: str
    method: str
    #: Seconds; 0 for methods that end by themselves.
    limit: float

    @property
    def place(self) -> tuple[str, ...]:
        """All but the method, for people: what a row of a table is about."""
        size = ", ".join(f"{name} {value}" for name, value in self.options)
        return (f"{self.model}, {size}" if size else self.model, self.hardware, self.mesh)


def cells(
    models: Iterable[tuple[str, tuple[tuple[str, int], ...], str]],
    hardware: Iterable[str],
    limit: float,
) -> list[Cell]:
    """A cell per method for each (model, options, mesh) and device."""
    devices = tuple(hardware)
    return [
        Cell(model, options, device, mesh, method, limit if method in ("automap", "alpa") else 0.0)
        for model, options, mesh in models
        for device in devices
        for method in METHODS
    ]


def grid(quick: bool, limit: float) -> list[Cell]:
    """The cells of Figures 8 and 9."""
    # The U-Net has no layers to leave out, and takes the baselines minutes.
    models = [m for m in MODELS if "layers" in ZOO[m].options or not quick]
    options = (("layers", QUICK_LAYERS),) if quick else ()
    meshes = MESHES[:1] if quick else MESHES
    return cells([(m, options, mesh) for m in models for mesh in meshes], HARDWARE, limit)


# -- results ---------------------------------------------------------------------------------------


#: What a result does not depend on: what shows plans, runs them or asks a compiler.
ASIDE = ("cli", "report", "oracle", "apply", "prove.py", "validate.py", "interchange.py", "lint.py")


@functools.cache
def sources() -> str:
    """A digest of all that results depend on: the code, the rules, the devices, the libraries."""
    digest = hashlib.sha256()
    for folder, kind in (("toast", "*.py"), ("rules", "*.lp"), ("hardware", "*.toml")):
        for path in sorted((ROOT / folder).rglob(kind)):
            name = path.relative_to(ROOT)
            if name.parts[1] not in ASIDE:
                digest.update(f"{name}\n".encode() + path.read_bytes())
    digest.update(versions().encode())
    return digest.hexdigest()[:12]


def versions() -> str:
    """The libraries that decide what is found."""
    names = ("jax", "jaxlib", "numpy", "scipy", "clingo")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


class Store:
    """Results by cell, in a file of JSON lines; those of other sources are left alone."""

    def __init__(self, path: pathlib.Path, version: str) -> None:
        self._path, self._version = path, version
        self._rows: dict[Cell, Row] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            # What was being written when a run was broken off does not parse.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["version"] == version:
                    fields = entry["cell"]
                    fields["options"] = tuple((name, value) for name, value in fields["options"])
                    self._rows[Cell(**fields)] = entry["row"]

    def get(self, cell: Cell) -> Row | None:
        """The result of a cell, if it was run before."""
        return self._rows.get(cell)

    def put(self, cell: Cell, row: Row) -> None:
        """Keep a result; it is on disk when this returns."""
        entry = {"version": self._version, "cell": dataclasses.asdict(cell), "row": row}
        text = json.dumps(entry, allow_nan=False) + "\n"
        with self._path.open("a+b") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
            if stream.read(1) not in (b"", b"\n"):
                text = "\n" + text  # behind a line that was broken off
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._rows[cell] = row


@functools.lru_cache(maxsize=1)
def analyzed(model: str, options: tuple[tuple[str, int], ...]) -> toast.Analysis:
    """The analysis of a model: one at a time is kept.

    With what is imported, and kept, when any program is searched for the first time: else the first
    of the methods would pay for the others.
    """
    analysis = toast.analyze(build(model, **dict(options)))
    proposing(CostModel(Space(analysis, Mesh.parse("a=2")), load("tpu-v3")))(1.0)
    return analysis


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt end the block at once, also where a search would stop with its best."""
    interrupts: list[int] = []

    def note(number: int, _frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
        if interrupts:
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def run(cell: Cell) -> Row:
    """The result of one cell, as plain data."""
    with uninterrupted():
        analysis = analyzed(cell.model, cell.options)
        (found,) = compare(
            analysis, Mesh.parse(cell.mesh), load(cell.hardware), [cell.method],
            strategies=ZOO[cell.model].strategies, limit=cell.limit,
        )  # fmt: skip
    row = found.to_dict()
    del row["arguments"]
    stages = analysis.seconds.items()
    return row | {
        "analysis_seconds": sum(s for stage, s in stages if stage != "lowering"),
        # Times mean little where others use the machine.
        "load": os.getloadavg()[0],
    }


def results(
    wanted: Sequence[Cell],
    store: Store,
    run_cell: Callable[[Cell], Row] = run,
    times: float = 0.0,
) -> dict[Cell, Row]:
    """The results of all cells: those in the store, and the others run and stored.

    What failed is run again: it may have been the machine.  AutoMap's limit is ``times`` TOAST's
    search time, where that is longer.
    """
    found: dict[Cell, Row] = {}
    ours: dict[tuple[str, ...], float] = {}
    for number, cell in enumerate(wanted, 1):
        if cell.method == "automap":
            needed = math.ceil(times * ours.get(cell.place, 0.0))
            cell = dataclasses.replace(cell, limit=max(cell.limit, needed))
        row = store.get(cell)
        if row is None or row["error"]:
            where = " ".join(cell.place)
            print(f"{number}/{len(wanted)} {where} {cell.method}", file=sys.stderr, flush=True)
            row = run_cell(cell)
            store.put(cell, row)
        if cell.method == "toast":
            ours[cell.place] = row["search_seconds"]
        found[cell] = row
    return found


Table = dict[tuple[str, ...], dict[str, Row]]


def by_place(found: dict[Cell, Row]) -> Table:
    """Results as ``[place][method]``."""
    table: Table = {}
    for cell, row in found.items():
        table.setdefault(cell.place, {})[cell.method] = row
    return table


# -- pages -----------------------------------------------------------------------------------------


def stopped(row: Row) -> bool:
    """Whether the search was ended by its limit."""
    return "time limit" in row["note"]


def step_text(row: Row) -> str:
    """The step of a result in ms; what does not fit, and what was stopped, is marked."""
    if row["error"]:
        return "-"
    text = f"{1e3 * row['step_seconds']:.4g}"
    return ("" if row["fits"] else "OOM ") + text + ("*" if stopped(row) else "")


def rivals(methods: dict[str, Row]) -> dict[str, float]:
    """The step of every baseline that fits, over TOAST's."""
    ours = methods["toast"]
    if ours["error"] or not ours["fits"]:
        return {}
    return {
        method: row["step_seconds"] / ours["step_seconds"]
        for method, row in methods.items()
        if method != "toast" and not row["error"] and row["fits"]
    }


def step_table(table: Table) -> str:
    """Step times in ms, and that of the best baseline over TOAST's."""
    lines = [
        f"| model | hardware | mesh | {' | '.join(METHODS)} | best baseline over TOAST |",
        "| --- | --- | --- |" + " ---: |" * (len(METHODS) + 1),
    ]
    for place, methods in table.items():
        ratios = rivals(methods)
        best = min(ratios, key=lambda method: ratios[method], default="")
        ratio = f"{ratios[best]:.3f} ({best})" if best else "-"
        steps = " | ".join(step_text(methods[method]) for method in METHODS)
        lines.append(f"| {' | '.join(place)} | {steps} | {ratio} |")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where TOAST stands in the rows of a table."""

    #: Rows where all others that fit are slower, and where the best of them is as fast.
    wins: int
    ties: int
    #: A sentence per row where another method is faster, or where only others fit.
    losses: tuple[str, ...]
    #: A sentence per row where nothing fits; in ``worse`` of them another method is faster.
    unfit: tuple[str, ...]
    worse: int

    @property
    def verdict(self) -> str:
        """Whether TOAST is first everywhere, for behind a colon."""
        if self.losses:
            return "missed in the rows named above"
        if self.worse:
            return "met where something fits; where nothing does, not in all rows, as said above"
        return "met where something fits" if self.unfit else "met"


def standing(table: Table) -> Standing:
    """Where TOAST is the best, where it is not, and where nothing fits."""
    wins = ties = worse = 0
    losses, unfit = [], []
    for place, methods in table.items():
        where, ours = ", ".join(place), methods["toast"]
        fitting = [method for method, row in methods.items() if row["fits"]]
        # Where nothing fits, steps are compared all the same.
        better = sorted(
            (row["step_seconds"] / ours["step_seconds"], method)
            for method, row in methods.items()
            if not ours["error"] and not row["error"] and row["fits"] == bool(fitting)
            if row["step_seconds"] < (1 - SAME) * ours["step_seconds"]
        )
        if ours["error"]:
            losses.append(f"{where}: TOAST has no plan: {ours['error']}")
        elif not fitting:
            worse += bool(better)
            unfit.append(
                f"{where}: nothing fits; TOAST's step is "
                + (_beaten_by(better, methods, "peak_bytes") if better else "no longer than any")
            )
        elif not ours["fits"]:
            losses.append(f"{where}: TOAST's plan does not fit, {', '.join(fitting)} do")
        elif better:
            losses.append(f"{where}: TOAST's step is {_beaten_by(better, methods, 'cost')}")
        elif all(ratio > 1 + SAME for ratio in rivals(methods).values()):
            wins += 1
        else:
            ties += 1
    return Standing(wins, ties, tuple(losses), tuple(unfit), worse)


def _beaten_by(better: Sequence[tuple[float, str]], methods: dict[str, Row], also: str) -> str:
    """Whose step is shorter, with costs or peaks of memory beside it."""

    def beside(method: str) -> str:
        value = methods[method][also]
        return f"{value / 2**30:.4g} GiB" if also == "peak_bytes" else f"{value:.5f}"

    word = "peak" if also == "peak_bytes" else "cost"
    return "longer: " + ", ".join(
        f"{method} takes {ratio:.3f} of it ({word} {beside(method)} against {beside('toast')})"
        for ratio, method in better
    )


def step_findings(table: Table) -> list[str]:
    """Where TOAST stands, and what ran out of memory."""
    found = standing(table)
    lines = [
        f"Of {len(table)} rows TOAST is the fastest in {found.wins}, within {SAME:.1%} of the "
        f"fastest in {found.ties} more, and beaten in {len(found.losses)}; nothing fits in "
        f"{len(found.unfit)}, where it is slower than another in {found.worse}."
    ]
    lines += [f"* {row}." for row in (*found.losses, *found.unfit)]
    over = {
        method: sum(not row["fits"] and not row["error"] for row in rows)
        for method in METHODS
        for rows in [[methods[method] for methods in table.values()]]
    }
    said = ", ".join(f"{method} {count}" for method, count in over.items() if count)
    lines.append(f"\nPlans that do not fit: {said or 'none'}.")
    return lines


def seconds_text(row: Row) -> str:
    """The search time of a result; what was stopped at its limit is marked."""
    if row["error"]:
        return "-"
    return f"{row['search_seconds']:.3g}" + ("*" if stopped(row) else "")


def made_with(script: str, options: argparse.Namespace, table: Table) -> str:
    """How a section came about."""
    command = f"benchmarks/{script}" + (" --quick" if options.quick else "")
    command += "".join(f" --only {word}" for word in options.only)
    if options.limit != (QUICK_LIMIT if options.quick else LIMIT):
        command += f" --limit {options.limit:g}"
    command += f" --times {options.times:g}" if options.times else ""
    longer = f", AutoMap to {options.times:g} times TOAST's search" if options.times else ""
    about = (
        f"Made by `{command}` with {versions()} on {os.cpu_count()} cores; AutoMap and "
        f"Alpa limited to {options.limit:g} s each{longer}, with what they set up and with what "
        "was under way then finished (* where that ended it)."
    )
    load = statistics.median(row["load"] for methods in table.values() for row in methods.values())
    if load > (os.cpu_count() or 1) + 0.5:
        about += (
            f" The machine was busy with other work, with a load of {load:.0f} in the median: "
            "searches ran slower than they do alone, and those with a limit saw less."
        )
    if options.quick:
        about += (
            " **This is the quick grid: few and small models, or a few layers of them, few meshes "
            "and a short limit. It shows that the benchmark works, and says little of the paper's "
            "figure.**"
        )
    return about


def write_section(page: pathlib.Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of a section, which are added where there are none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    whole = page.read_text()
    if begin not in whole:
        whole = whole.rstrip("\n") + f"\n\n{begin}{end}"
    head, rest = whole.split(begin)
    whole = head + begin + text.rstrip("\n") + "\n" + end + rest.split(end)[1]
    write_all({page: whole}, PlanError)


# -- pictures --------------------------------------------------------------------------------------

_COLORS = dict(zip(METHODS, ("#1565c0", "#2e7d32", "#ef6c00", "#8e24aa", "#757575"), strict=True))
_HEIGHT, _BAR, _LEFT = 200, 14, 60


def bars(unit: str, panels: dict[str, dict[str, dict[str, tuple[float, str]]]]) -> str:
    """An SVG picture: in each panel, bars of methods by group, on logarithmic axes.

    A bar is a number and a word about it; a bar with a word is hollow.
    """
    width = _LEFT + 40 + max(
        sum(len(group) * _BAR + 24 for group in groups.values()) for groups in panels.values()
    )  # fmt: skip
    width = max(width, _LEFT + 90 * len(METHODS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{len(panels) * (_HEIGHT + 80) + 70}" font-family="sans-serif" font-size="11">'
    ]
    for number, (method, color) in enumerate(_COLORS.items()):
        at = _LEFT + 90 * number
        parts.append(f'<rect x="{at}" y="8" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{at + 14}" y="17">{method}</text>')
    for number, (title, groups) in enumerate(panels.items()):
        top = 60 + number * (_HEIGHT + 80)
        parts += _panel(f"{title}, {unit}", groups, top, width)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str, groups: dict[str, dict[str, tuple[float, str]]], top: int, width: int
) -> Iterator[str]:
    numbers = [value for group in groups.values() for value, _ in group.values() if value > 0]
    low, high = min(numbers, default=1.0) / 2, max(numbers, default=2.0) * 1.2
    base = top + _HEIGHT

    def height(value: float) -> float:
        return _HEIGHT * math.log(max(value, low) / low) / math.log(high / low)

    yield f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{title}</text>'
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for tick in (10.0**power, 3 * 10.0**power):
            if low <= tick <= high:
                y = base - height(tick)
                yield (
                    f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width - 10}" y2="{y:.1f}" '
                    f'stroke="#ddd"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
                    f"{tick:g}</text>"
                )
    left = _LEFT + 10
    for label, group in groups.items():
        for method, (value, word) in group.items():
            tall, color = height(value), _COLORS[method]
            fill = "none" if word else color
            yield (
                f'<rect x="{left}" y="{base - tall:.1f}" width="{_BAR - 2}" height="{tall:.1f}" '
                f'fill="{fill}" stroke="{color}"><title>{label}, {method}: {value:.4g} {word}'
                "</title></rect>"
            )
            if word:
                yield (
                    f'<text transform="translate({left + 10},{base - 4}) rotate(-90)" '
                    f'font-size="9" fill="{color}">{word}</text>'
                )
            left += _BAR
        middle = left - len(group) * _BAR / 2
        for line, part in enumerate(label.split("\n")):
            yield (
                f'<text x="{middle:.1f}" y="{base + 14 + 13 * line}" text-anchor="middle">{part}'
                "</text>"
            )
        left += 24


def step_panels(table: Table) -> dict[str, dict[str, dict[str, tuple[float, str]]]]:
    """A panel per device: step times in ms, hollow where they do not fit."""
    panels: dict[str, dict[str, dict[str, tuple[float, str]]]] = {}
    for (model, hardware, mesh), methods in table.items():
        panels.setdefault(hardware, {})[_label(model, mesh)] = {
            method: (1e3 * row["step_seconds"], "" if row["fits"] else "OOM")
            for method, row in methods.items()
            if not row["error"]
        }
    return panels


def time_panels(table: Table) -> dict[str, dict[str, dict[str, tuple[float, str]]]]:
    """The same of search times, hollow where the limit ended them."""
    panels: dict[str, dict[str, dict[str, tuple[float, str]]]] = {}
    for (model, hardware, mesh), methods in table.items():
        panels.setdefault(hardware, {})[_label(model, mesh)] = {
            method: (row["search_seconds"], "limit" if stopped(row) else "")
            for method, row in methods.items()
            if not row["error"]
        }
    return panels


def _label(model: str, mesh: str) -> str:
    sizes = "x".join(str(size) for size in Mesh.parse(mesh).sizes)
    return "\n".join([*model.split(", "), sizes])


# -- scripts ---------------------------------------------------------------------------------------


def options_of(description: str) -> argparse.Namespace:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small grid, some minutes")
    parser.add_argument(
        "--limit", type=float,
        help="seconds that AutoMap and Alpa may take each, set-up included "
        f"(default: {LIMIT:g}; quick: {QUICK_LIMIT:g})",
    )  # fmt: skip
    parser.add_argument(
        "--times", type=float, default=0.0,
        help="AutoMap's limit in times of TOAST's search, where that is longer",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD",
        help="a part of the grid: cells with this model, device or mesh (may be given again)",
    )  # fmt: skip
    parser.add_argument("--store", type=pathlib.Path, default=STORE, help="where results are kept")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    if options.limit is None:
        options.limit = QUICK_LIMIT if options.quick else LIMIT
    # Before the hours that it takes, not behind them.
    if not 0 < options.limit < math.inf:  # nor NaN
        parser.error(f"--limit {options.limit:g}: give a number of seconds above 0")
    if not 0 <= options.times < math.inf:
        parser.error(f"--times {options.times:g}: give a number that is not negative")
    if not options.page.is_file():
        parser.error(f"--page {options.page}: no such file; give a page to put the section in")
    try:
        check_writable((options.page, options.store), PlanError)
    except ToastError as error:
        parser.error(str(error))
    return options


def chosen(cell: Cell, words: Sequence[str]) -> bool:
    """Whether a cell has all the words, of each kind one."""
    fields = (cell.model, cell.hardware, cell.mesh)
    kinds = (ZOO, HARDWARE, {cell.mesh, *words} - {*ZOO, *HARDWARE})
    return all(
        field in words or not set(words) & set(kind)
        for field, kind in zip(fields, kinds, strict=True)
    )


def measured(wanted: Sequence[Cell], options: argparse.Namespace) -> Table:
    """The results of all cells; an interrupt ends the script with a word on how to go on."""
    cells = [cell for cell in wanted if options.only == [] or chosen(cell, options.only)]
    if not cells:
        raise SystemExit(f"no cell of the grid is of {', '.join(options.only)}")
    try:
        return by_place(results(cells, Store(options.store, sources()), times=options.times))
    except KeyboardInterrupt:
        print(f"interrupted; what is done is in {options.store}, run again to go on",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(130) from None
