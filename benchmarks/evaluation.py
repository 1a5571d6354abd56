"""The paper's evaluation in cells: a model, a device, a mesh and a method.

A file stores one result per line, so an interrupted run continues where it stopped.  The scripts
figure8.py, figure9.py, figure10.py and zoo.py choose cells and write docs/evaluation.md.
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
sys.path.insert(0, str(ROOT))  # run the code that sources() reads, not an installed version

import toast
from toast.cli.elapsed import elapsed
from toast.cost import CostModel
from toast.errors import PlanError, ToastError
from toast.evaluation.compare import METHODS, compare
from toast.files import check_writable, write_all
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.search.relaxation import proposing
from toast.space import Space

PAGE = ROOT / "docs" / "evaluation.md"
STORE = ROOT / "benchmarks" / ".evaluation.jsonl"

MODELS = ("t2b", "t7b", "gns", "unet", "itx")
HARDWARE = ("tpu-v3", "a100", "p100")
#: 16 and 32 devices.
MESHES = ("data=4,model=4", "data=8,model=4")
#: Time limit of a baseline's search in seconds, in the full grid and in the quick grid.
LIMIT, QUICK_LIMIT = 120.0, 20.0
#: Layers of a model in the quick grid.
QUICK_LAYERS = 2

#: Step times with a smaller relative difference count as equal.
SAME = 0.005

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a method that plans a model for a mesh of a device."""

    model: str
    #: Options that change the model's size.
    options: tuple[tuple[str, int], ...]
    hardware: str
    mesh: str
    method: str
    #: Time limit in seconds; 0 for methods without a limit.
    limit: float

    @property
    def place(self) -> tuple[str, ...]:
        """The row of a table: model with its options, hardware and mesh."""
        size = ", ".join(f"{name} {value}" for name, value in self.options)
        return (f"{self.model}, {size}" if size else self.model, self.hardware, self.mesh)


def cells(
    models: Iterable[tuple[str, tuple[tuple[str, int], ...], str]],
    hardware: Iterable[str],
    limit: float,
) -> list[Cell]:
    """One cell per method for each (model, options, mesh) and device."""
    devices = tuple(hardware)
    return [
        Cell(model, options, device, mesh, method, limit if method in ("automap", "alpa") else 0.0)
        for model, options, mesh in models
        for device in devices
        for method in METHODS
    ]


def grid(quick: bool, limit: float) -> list[Cell]:
    """The cells of Figures 8 and 9."""
    # The number of layers of the U-Net is fixed, and the baselines need minutes for it.
    models = [m for m in MODELS if "layers" in ZOO[m].options or not quick]
    options = (("layers", QUICK_LAYERS),) if quick else ()
    meshes = MESHES[:1] if quick else MESHES
    return cells([(m, options, mesh) for m in models for mesh in meshes], HARDWARE, limit)


# -- results ---------------------------------------------------------------------------------------


#: Modules that results do not depend on: they show plans, run them, or compile them.
ASIDE = ("cli", "report", "oracle", "apply", "prove.py", "validate.py", "interchange.py", "lint.py")


@functools.cache
def sources() -> str:
    """A digest of everything that results depend on: code, rules, devices, libraries."""
    digest = hashlib.sha256()
    for folder, kind in (("toast", "*.py"), ("rules", "*.lp"), ("hardware", "*.toml")):
        for path in sorted((ROOT / folder).rglob(kind)):
            name = path.relative_to(ROOT)
            if name.parts[1] not in ASIDE:
                digest.update(f"{name}\n".encode() + path.read_bytes())
    digest.update(versions().encode())
    return digest.hexdigest()[:12]


def versions() -> str:
    """The versions of the libraries that influence results."""
    names = ("jax", "jaxlib", "numpy", "scipy", "clingo")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


class Store:
    """Results by cell, in a file of JSON lines; results of other versions stay unchanged."""

    def __init__(self, path: pathlib.Path, version: str) -> None:
        self._path, self._version = path, version
        self._rows: dict[Cell, Row] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            # The last line of an interrupted run may be incomplete.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["version"] == version:
                    fields = entry["cell"]
                    fields["options"] = tuple((name, value) for name, value in fields["options"])
                    self._rows[Cell(**fields)] = entry["row"]

    def get(self, cell: Cell) -> Row | None:
        """The stored result of a cell, or None."""
        return self._rows.get(cell)

    def put(self, cell: Cell, row: Row) -> None:
        """Store a result on disk."""
        entry = {"version": self._version, "cell": dataclasses.asdict(cell), "row": row}
        text = json.dumps(entry, allow_nan=False) + "\n"
        with self._path.open("a+b") as stream:
            stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
            if stream.read(1) not in (b"", b"\n"):
                text = "\n" + text  # after an incomplete line
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        self._rows[cell] = row


@functools.lru_cache(maxsize=1)
def analyzed(model: str, options: tuple[tuple[str, int], ...]) -> toast.Analysis:
    """The analysis of a model; the last one is cached.

    This also does the imports and the one-time work of a first search.  Otherwise the search time
    of the first method would include them.
    """
    sizes: dict[str, Any] = dict(options)
    analysis = toast.analyze(build(model, **sizes))
    proposing(CostModel(Space(analysis, Mesh.parse("a=2")), load("tpu-v3")))(1.0)
    return analysis


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let an interrupt end the block at once; a search would return its best plan instead."""
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
        (compared,) = compare(
            analysis, Mesh.parse(cell.mesh), load(cell.hardware), [cell.method],
            strategies=ZOO[cell.model].strategies, limit=cell.limit,
        )  # fmt: skip
    row = compared.to_dict()
    del row["arguments"]
    stages = analysis.seconds.items()
    return row | {
        "analysis_seconds": sum(s for stage, s in stages if stage != "lowering"),
        # Times are not comparable on a busy machine.
        "load": os.getloadavg()[0],
    }


def results(
    wanted: Sequence[Cell],
    store: Store,
    run_cell: Callable[[Cell], Row] = run,
    times: float = 0.0,
) -> dict[Cell, Row]:
    """The results of all cells; cells without a stored result are run and stored.

    Failed cells are run again, because the machine may have caused the failure.  AutoMap's limit is
    ``times`` TOAST's search time if that is longer than the limit of the cell.
    """
    rows: dict[Cell, Row] = {}
    ours: dict[tuple[str, ...], float] = {}
    with elapsed() as show:
        for number, cell in enumerate(wanted, 1):
            if cell.method == "automap":
                needed = math.ceil(times * ours.get(cell.place, 0.0))
                cell = dataclasses.replace(cell, limit=max(cell.limit, needed))
            row = store.get(cell)
            if row is None or row["error"]:
                show(f"{number} of {len(wanted)}: {' '.join(cell.place)} {cell.method}")
                row = run_cell(cell)
                store.put(cell, row)
            if cell.method == "toast":
                ours[cell.place] = row["search_seconds"]
            rows[cell] = row
    return rows


Table = dict[tuple[str, ...], dict[str, Row]]


def by_place(rows: dict[Cell, Row]) -> Table:
    """Results as ``[place][method]``."""
    table: Table = {}
    for cell, row in rows.items():
        table.setdefault(cell.place, {})[cell.method] = row
    return table


# -- pages -----------------------------------------------------------------------------------------


def stopped(row: Row) -> bool:
    """Whether the time limit ended the search."""
    return "time limit" in row["note"]


def step_text(row: Row) -> str:
    """The step time in ms; OOM marks plans that do not fit, * searches that the limit ended."""
    if row["error"]:
        return "-"
    text = f"{1e3 * row['step_seconds']:.4g}"
    return ("" if row["fits"] else "OOM ") + text + ("*" if stopped(row) else "")


def rivals(methods: dict[str, Row]) -> dict[str, float]:
    """For each baseline whose plan fits, its step time over TOAST's."""
    ours = methods["toast"]
    if ours["error"] or not ours["fits"]:
        return {}
    return {
        method: row["step_seconds"] / ours["step_seconds"]
        for method, row in methods.items()
        if method != "toast" and not row["error"] and row["fits"]
    }


def step_table(table: Table) -> str:
    """A table of step times in ms, with the best baseline's step time over TOAST's."""
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
    """How TOAST compares with the other methods in the rows of a table."""

    #: Rows where all other plans that fit are slower; rows where the best of them is as fast.
    wins: int
    ties: int
    #: One sentence per row where another method is faster, or where only other plans fit.
    losses: tuple[str, ...]
    #: One sentence per row where no plan fits; in ``worse`` of these, another method is faster.
    unfit: tuple[str, ...]
    worse: int

    @property
    def verdict(self) -> str:
        """Whether TOAST is first in all rows, as the end of a sentence with "this"."""
        if self.losses:
            return "does not hold in the rows listed above"
        if self.worse:
            return "holds where a plan fits, but not in all other rows (listed above)"
        return "holds where a plan fits" if self.unfit else "holds"


def standing(table: Table) -> Standing:
    """Count the rows where TOAST is best, where it is not, and where no plan fits."""
    wins = ties = worse = 0
    losses, unfit = [], []
    for place, methods in table.items():
        where, ours = ", ".join(place), methods["toast"]
        fitting = [method for method, row in methods.items() if row["fits"]]
        # If no plan fits, the step times are compared all the same.
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
                f"{where}: no plan fits; "
                + (
                    _beaten_by(better, methods, "peak_bytes")
                    if better
                    else "no step is shorter than TOAST's"
                )
            )
        elif not ours["fits"]:
            losses.append(f"{where}: TOAST's plan does not fit; {', '.join(fitting)} fit")
        elif better:
            losses.append(f"{where}: {_beaten_by(better, methods, 'cost')}")
        elif all(ratio > 1 + SAME for ratio in rivals(methods).values()):
            wins += 1
        else:
            ties += 1
    return Standing(wins, ties, tuple(losses), tuple(unfit), worse)


def _beaten_by(better: Sequence[tuple[float, str]], methods: dict[str, Row], also: str) -> str:
    """The methods with a shorter step, each with its cost or its peak memory."""

    def value_text(method: str) -> str:
        value = methods[method][also]
        return f"{value / 2**30:.4g} GiB" if also == "peak_bytes" else f"{value:.5f}"

    word = "peak" if also == "peak_bytes" else "cost"
    return ", ".join(
        f"the step of {method} is {ratio:.3f} times TOAST's "
        f"({word} {value_text(method)}; TOAST's: {value_text('toast')})"
        for ratio, method in better
    )


def step_findings(table: Table) -> list[str]:
    """Sentences about TOAST's rank and about plans that do not fit."""
    rank = standing(table)
    lines = [
        f"TOAST is the fastest in {rank.wins} of {len(table)} rows, within {SAME:.1%} of the "
        f"fastest in {rank.ties} more, and slower than another method in {len(rank.losses)}. No "
        f"plan fits in {len(rank.unfit)} rows; another method is faster in {rank.worse} of these."
    ]
    lines += [f"* {row}." for row in (*rank.losses, *rank.unfit)]
    over = {
        method: sum(not row["fits"] and not row["error"] for row in rows)
        for method in METHODS
        for rows in [[methods[method] for methods in table.values()]]
    }
    counts = ", ".join(f"{method} {count}" for method, count in over.items() if count)
    lines.append(f"\nPlans that do not fit: {counts or 'none'}.")
    return lines


def seconds_text(row: Row) -> str:
    """The search time in seconds; * marks searches that the limit ended."""
    if row["error"]:
        return "-"
    return f"{row['search_seconds']:.3g}" + ("*" if stopped(row) else "")


def provenance(script: str, options: argparse.Namespace, table: Table) -> str:
    """The command, the versions, the limits and the machine of a section."""
    command = f"benchmarks/{script}" + (" --quick" if options.quick else "")
    command += "".join(f" --only {word}" for word in options.only)
    if options.limit != (QUICK_LIMIT if options.quick else LIMIT):
        command += f" --limit {options.limit:g}"
    command += f" --times {options.times:g}" if options.times else ""
    longer = (
        f" (AutoMap: {options.times:g} times TOAST's search time, if that is longer)"
        if options.times
        else ""
    )
    about = (
        f"Written by `{command}` with {versions()} on {os.cpu_count()} cores. AutoMap and Alpa "
        f"had a limit of {options.limit:g} s each{longer}, setup included; they finished the step "
        "in progress at the limit. * marks searches that the limit ended."
    )
    load = statistics.median(row["load"] for methods in table.values() for row in methods.values())
    if load > (os.cpu_count() or 1) + 0.5:
        about += (
            f" The machine was busy with other work (median load {load:.0f}): searches took longer "
            "than alone, and searches with a limit saw fewer states."
        )
    if options.quick:
        about += (
            " **This is the quick grid: few and small models, or models with few layers, few "
            "meshes, and a short limit. It shows that the benchmark works, but says little about "
            "the paper's figure.**"
        )
    return about


def write_section(page: pathlib.Path, name: str, text: str) -> None:
    """Put ``text`` between the marks of a section; add the marks if they are missing."""
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

    A bar is a number and a word; a bar with a nonempty word is hollow.
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
    """One panel per device: step times in ms, hollow if the plan does not fit."""
    panels: dict[str, dict[str, dict[str, tuple[float, str]]]] = {}
    for (model, hardware, mesh), methods in table.items():
        panels.setdefault(hardware, {})[_label(model, mesh)] = {
            method: (1e3 * row["step_seconds"], "" if row["fits"] else "OOM")
            for method, row in methods.items()
            if not row["error"]
        }
    return panels


def time_panels(table: Table) -> dict[str, dict[str, dict[str, tuple[float, str]]]]:
    """One panel per device: search times in seconds, hollow if the limit ended the search."""
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
    """The options that all scripts share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small grid that takes some minutes")
    parser.add_argument(
        "--limit", type=float,
        help="time limit of AutoMap and of Alpa in seconds, setup included "
        f"(default: {LIMIT:g}; quick: {QUICK_LIMIT:g})",
    )  # fmt: skip
    parser.add_argument(
        "--times", type=float, default=0.0,
        help="AutoMap's limit as a multiple of TOAST's search time, if that is longer",
    )  # fmt: skip
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD",
        help="only cells with this model, device or mesh (repeatable)",
    )  # fmt: skip
    parser.add_argument("--store", type=pathlib.Path, default=STORE, help="the file of results")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, help="the page to write")
    options = parser.parse_args()
    if options.limit is None:
        options.limit = QUICK_LIMIT if options.quick else LIMIT
    # Errors are reported before the hours of work.
    if not 0 < options.limit < math.inf:  # nor NaN
        parser.error(f"--limit {options.limit:g}: give a number of seconds above 0")
    if not 0 <= options.times < math.inf:
        parser.error(f"--times {options.times:g}: give a number that is not negative")
    if not options.page.is_file():
        parser.error(f"--page {options.page}: no such file; name an existing page for the section")
    try:
        check_writable((options.page, options.store), PlanError)
    except ToastError as error:
        parser.error(str(error))
    return options


def chosen(cell: Cell, words: Sequence[str]) -> bool:
    """Whether a cell matches the words: one of each kind (model, device, mesh) if there are any."""
    fields = (cell.model, cell.hardware, cell.mesh)
    kinds = (ZOO, HARDWARE, {cell.mesh, *words} - {*ZOO, *HARDWARE})
    return all(
        field in words or not set(words) & set(kind)
        for field, kind in zip(fields, kinds, strict=True)
    )


def measured(wanted: Sequence[Cell], options: argparse.Namespace) -> Table:
    """The results of all cells; an interrupt ends the script with a message on how to continue."""
    cells = [cell for cell in wanted if options.only == [] or chosen(cell, options.only)]
    if not cells:
        raise SystemExit(f"no cell of the grid matches {', '.join(options.only)}")
    try:
        return by_place(results(cells, Store(options.store, sources()), times=options.times))
    except KeyboardInterrupt:
        print(f"interrupted; finished results are in {options.store}; run again to continue",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(130) from None
