"""Predict published training steps: the cases of validation/, and the table of docs/fidelity.md.

    python benchmarks/published.py [--only PART] [--record [--accept CASE REASON]...]

A case is a folder ``validation/SOURCE/CASE``.  Its ``case.toml`` has the configuration as the
source states it, the cited numbers, and the program that is planned: a model of the zoo with
options, or ``program.py`` with a function ``build(batch, sequence, **options)`` and
``STRATEGIES``, in the folder of the case.  A strategy may also be :class:`toast.Constraints`, with
which TOAST plans; ``code`` names a file of the source that cases share.
``predicted.toml`` has the prediction that was recorded last, and the smallest errors of all that
were recorded.  A case whose source leaves something
open says what is ``assumed``; it is listed apart, is not in the figures of the others, and does not
fail the run.

The exit code is 1 if the error of a step or of a peak is more than two points above the smallest
one, and 2 for a case without its configuration.  ``--record`` writes the predictions and the table,
unless such an error has grown: then it writes nothing.  ``--accept CASE REASON`` lets the errors of
a case grow; its ``predicted.toml`` keeps the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import pathlib
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
from msgspec import Meta, Struct, structs

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP))

import toast
from toast.boundary.typed import Misfit, checked
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.errors import PlanError, ToastError
from toast.evaluation.baselines import manual_states
from toast.hardware import Mesh, load
from toast.models import ZOO, Model, build
from toast.plan import Prediction
from toast.space import Space

CASES = TOP / "validation"
PAGE = TOP / "docs" / "fidelity.md"
#: The marks around the tables of the page: of full configurations, and of assumed ones.
FULL, ASSUMED = "published", "published, in part assumed"
GIB = 2.0**30

#: By how much an error may exceed the smallest one before the run fails.
MOST_GROWTH = 0.02

Text = Annotated[str, Meta(pattern=r"\S", title="a printable text")]
Count = Annotated[int, Meta(ge=1, title="a whole number from 1")]
FileName = Annotated[str, Meta(pattern=r"^(\w+\.py)?$", title="the name of a Python file")]
Positive = Annotated[float, Meta(gt=0, title="a positive number")]
NotNegative = Annotated[float, Meta(ge=0, title="a number from 0")]


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table with these keys and no others."""


class Configuration(_Table, frozen=True, kw_only=True):
    """``[configuration]``: what the source says of the run."""

    model: Text
    #: The name of a hardware file.
    hardware: Text
    devices: Count
    sequence: Count
    #: Not a whole number where several devices have a sequence together.
    sequences_per_device: Positive
    parallelism: Text
    precision: Text
    recomputation: Text
    #: What the source leaves open, and what is assumed for it.
    assumed: str = ""


class Cited(_Table, frozen=True, kw_only=True):
    """``[cited]``: what was measured, and where it stands."""

    seconds: Positive
    url: Annotated[str, Meta(pattern=r"^https://", title="an address")]
    peak_gib: Positive | None = None


class Program(_Table, frozen=True, kw_only=True):
    """``[program]``: what is planned; without ``model``, a file has the program."""

    mesh: Text
    strategy: Text = "FSDP"
    model: str = ""
    #: A file of the source that cases share, in place of ``program.py`` in the folder of the case.
    code: FileName = ""
    options: Mapping[str, str | int | float] = {}
    #: ``gathers`` if flags of the compiler put all-gathers into the background; ``asynchronous`` if
    #: they put sums there, too.
    overlap: Literal["partial", "gathers", "asynchronous"] = "partial"


class Case(_Table, frozen=True, kw_only=True):
    """``case.toml``."""

    configuration: Configuration
    cited: Cited
    program: Program

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return round(self.configuration.devices * self.configuration.sequences_per_device)


_TABLES: Mapping[str, type[_Table]] = {
    "configuration": Configuration, "cited": Cited, "program": Program,
}  # fmt: skip


def _required(table: type[_Table]) -> tuple[str, ...]:
    """The keys without defaults."""
    return tuple(field.name for field in structs.fields(table) if field.required)


class Predicted(_Table, frozen=True, kw_only=True):
    """A prediction."""

    seconds: Positive
    peak_gib: Positive
    jax: Text


class Recorded(Predicted, frozen=True, kw_only=True):
    """``predicted.toml``: the prediction that was recorded last, and the smallest errors so far."""

    #: The smallest errors, as fractions, of the step and of the peak, if it is published.
    best_step: NotNegative
    best_peak: NotNegative | None = None
    #: Why errors may have grown: the smallest ones are then counted from there.
    accepted: Annotated[str, Meta(pattern=r'^[^"\\\n]*$', title="a line without quotes")] = ""

    @property
    def best(self) -> dict[str, float]:
        """The smallest errors, by what was measured."""
        found = {"step": self.best_step, "peak": self.best_peak}
        return {what: error for what, error in found.items() if error is not None}


@dataclasses.dataclass(frozen=True)
class Result:
    """A case, its prediction, and the one that was recorded."""

    name: str
    case: Case
    predicted: Predicted
    recorded: Recorded | None

    def errors(self) -> dict[str, float]:
        """The errors of the prediction, by what was measured."""
        cited, ours = self.case.cited, self.predicted
        found = {"step": abs(ours.seconds / cited.seconds - 1)}
        if cited.peak_gib:
            found["peak"] = abs(ours.peak_gib / cited.peak_gib - 1)
        return found

    def to_record(self, accepted: str = "") -> Recorded:
        """What is recorded: the prediction, and the smallest errors.

        With a reason why errors are ``accepted``, those of the prediction are the smallest ones.
        """
        best = self.errors()
        if self.recorded is not None and not accepted:
            before = self.recorded.best
            best = {what: min(error, before.get(what, error)) for what, error in best.items()}
            accepted = self.recorded.accepted
        rounded = {what: float(f"{error:.4g}") for what, error in best.items()}
        return Recorded(
            **structs.asdict(self.predicted), best_step=rounded["step"],
            best_peak=rounded.get("peak"), accepted=accepted,
        )  # fmt: skip

    def grown(self) -> list[str]:
        """What is worse than the smallest error by more than :data:`MOST_GROWTH`.

        The error of an assumed configuration says as much about what is assumed as about prices.
        """
        if self.recorded is None:
            return [f"{self.name}: no prediction is recorded; record it: --record"]
        if self.case.configuration.assumed:
            return []
        best = self.recorded.best
        return [
            f"{self.name}: the error of the {what} has grown from {best[what]:.1%}, the smallest "
            f"one recorded, to {now:.1%}"
            for what, now in self.errors().items()
            if now > best.get(what, now) + MOST_GROWTH
        ]


#: A table and its key.
_PLACE = 2


def _misfit_text(error: Misfit, data: Mapping[str, Any]) -> str:
    """What a case has in a wrong place, as it is written in the file."""
    _, marker, expected = error.text.rpartition(": expected ")
    if not marker or error.missing_key or error.unknown_key or len(error.place) != _PLACE:
        return str(error)
    table, key = map(str, error.place)
    return f"[{table}] {key} = {json.dumps(data[table][key], default=str)}: expected {expected}"


def read_case(folder: pathlib.Path) -> Case:
    """The case in a folder; raises :class:`toast.errors.PlanError` with what is missing."""
    place = "/".join(folder.parts[-3:])
    try:
        text = (folder / "case.toml").read_text(encoding="utf-8")
    except OSError:
        raise PlanError(f"{place}: no configuration; write a case.toml") from None
    except UnicodeDecodeError as error:
        raise PlanError(f"{place}/case.toml: not UTF-8: {error.reason}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{place}/case.toml: {error}") from None
    missing = [
        f"[{name}] {key}"
        for name, table in _TABLES.items()
        for key in _required(table)
        if not isinstance(data.get(name, {}), dict) or key not in data.get(name, {})
    ]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise PlanError(f"{place}/case.toml: the source's {', '.join(missing)} {are} missing")
    try:
        case = checked(data, Case)
    except Misfit as error:
        raise PlanError(f"{place}/case.toml: {_misfit_text(error, data)}") from None
    try:
        load(case.configuration.hardware)
        devices = math.prod(Mesh.parse(case.program.mesh).sizes)
    except ToastError as error:
        raise PlanError(f"{place}/case.toml: {error}") from None
    if devices != case.configuration.devices:
        raise PlanError(
            f"{place}/case.toml: mesh {case.program.mesh} has {devices} devices, the "
            f"configuration {case.configuration.devices}"
        )
    sequences = case.configuration.devices * case.configuration.sequences_per_device
    if case.batch < 1 or not math.isclose(sequences, case.batch):
        raise PlanError(
            f"{place}/case.toml: {sequences:g} sequences on {devices} devices; write a number "
            "of sequences per device that gives whole sequences"
        )
    if case.program.model and case.program.code:
        raise PlanError(f"{place}/case.toml: [program] has a model and code; remove one of them")
    if not case.program.model and not (path := code_of(folder, case)).exists():
        raise PlanError(f"{place}: [program] has no model, and there is no {path.name}")
    return case


def code_of(folder: pathlib.Path, case: Case) -> pathlib.Path:
    """The file of a case's program."""
    code = case.program.code
    return folder.parent / code if code else folder / "program.py"


#: As :data:`toast.models.Strategies`, or constraints within which TOAST plans.
Offered = Mapping[str, Sequence[tuple[str, int, str]] | toast.Constraints]


def program_of(folder: pathlib.Path, case: Case) -> tuple[Model, Offered]:
    """The program of a case, and its expert strategies."""
    sizes: dict[str, Any] = {"batch": case.batch, "sequence": case.configuration.sequence}
    sizes |= case.program.options
    if case.program.model:
        return build(case.program.model, **sizes), ZOO[case.program.model].strategies
    spec = importlib.util.spec_from_file_location("validated_program", code_of(folder, case))
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(**sizes), module.STRATEGIES


def predict(folder: pathlib.Path, case: Case) -> Predicted:
    """The prediction for the case's strategy."""
    program, strategies = program_of(folder, case)
    hardware = load(case.configuration.hardware)
    analysis = toast.analyze(program, platform=hardware.platform)
    name = case.program.strategy
    if name not in strategies:
        raise PlanError(f"{folder.name}: no strategy {name}; use one of {', '.join(strategies)}")
    strategy = strategies[name]
    if isinstance(strategy, toast.Constraints):
        plan = toast.plan(
            analysis, mesh=case.program.mesh, hardware=hardware, overlap=case.program.overlap,
            constraints=strategy,
        )  # fmt: skip
        return of_prediction(plan.after)
    space = Space(analysis, Mesh.parse(case.program.mesh))
    model = CostModel(space, hardware, overlap=case.program.overlap)
    state = dict(manual_states(model, {name: strategy})).get(name, space.initial)
    sizes = dict(zip(space.mesh.names, space.axis_sizes.tolist(), strict=True))
    idle = [
        axis for number, (axis, size) in enumerate(sizes.items())
        if size > 1 and not (state[..., number] >= 0).any()
    ]  # fmt: skip
    if idle:
        raise PlanError(f"{folder.name}: strategy {name} shards nothing over {', '.join(idle)}")
    return of_prediction(Prediction.of(model.price(state[None])))


def of_prediction(found: Prediction) -> Predicted:
    """What is recorded of a prediction."""
    return Predicted(
        seconds=float(f"{found.step_seconds:.4g}"),
        peak_gib=float(f"{found.peak_bytes / GIB:.4g}"),
        jax=jax.__version__,
    )


def recorded(folder: pathlib.Path) -> Recorded | None:
    """What is recorded in a folder, if there is anything."""
    path = folder / "predicted.toml"
    if not path.exists():
        return None
    place = "/".join(path.parts[-4:])
    try:
        return checked(tomllib.loads(path.read_text(encoding="utf-8")), Recorded)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, Misfit) as error:
        raise PlanError(f"{place}: {error}; predict it again: --record") from None


def record(folder: pathlib.Path, found: Recorded) -> None:
    """Write a prediction and the smallest errors into a folder."""
    lines = ["# Written by benchmarks/published.py --record."]
    for key, value in structs.asdict(found).items():
        if value not in (None, ""):
            lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
    (folder / "predicted.toml").write_text("\n".join([*lines, ""]), encoding="utf-8")


def folders(only: str = "") -> list[pathlib.Path]:
    """The folders of all cases, or of those with ``only`` in their names."""
    return sorted(
        path
        for path in CASES.glob("*/[!_]*")  # Python's caches are no cases
        if path.is_dir() and only in "/".join(path.parts[-2:])
    )


def chosen(only: str | None) -> list[tuple[pathlib.Path, Case]]:
    """The cases with ``only`` in their names, or all of them without it.

    Raises :class:`toast.errors.PlanError` for a text that no name has, or that has no letters.
    """
    if only is not None and not only.strip():
        raise PlanError("--only is empty; write a part of the name of a case, or leave --only out")
    cases = [(folder, read_case(folder)) for folder in folders(only or "")]
    if not cases:
        raise PlanError(f"no case in validation/ has {only!r} in its name")
    return cases


def accepted_cases(
    pairs: Sequence[Sequence[str]], cases: Sequence[tuple[pathlib.Path, Case]], *, recording: bool
) -> dict[str, str]:
    """The reasons by the names of the cases whose errors may grow.

    Raises :class:`toast.errors.PlanError` for an unknown case, a reason that says nothing or has
    quotes, and without ``recording``.
    """
    names = {"/".join(folder.parts[-2:]) for folder, _ in cases}
    if pairs and not recording:
        raise PlanError("--accept is for --record; add it")
    for name, reason in pairs:
        if name not in names:
            raise PlanError(f"--accept {name!r}: no such case; write its whole name, SOURCE/CASE")
        if not reason.strip() or not reason.isprintable() or {*reason} & {*'"\\'}:
            raise PlanError(f"--accept {name}: write a reason in one line, without double quotes")
    return {pair[0]: pair[1] for pair in pairs}


def results(cases: Sequence[tuple[pathlib.Path, Case]]) -> Iterator[Result]:
    """The results of cases."""
    for folder, case in steps(cases, lambda own: own[0].name):
        name = "/".join(folder.parts[-2:])
        try:
            yield Result(name, case, predict(folder, case), recorded(folder))
        except ToastError as error:
            raise PlanError(f"{name}: {error}") from None


HEADER = (
    "| case | devices | tokens per device | published step | predicted | ratio | "
    "published peak | predicted |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def line(result: Result) -> str:
    """The row of a result."""
    c, cited, ours = result.case.configuration, result.case.cited, result.predicted
    peak = f"{cited.peak_gib:.1f} GiB" if cited.peak_gib else "-"
    ratio = ours.seconds / cited.seconds
    return (
        f"| [{result.name}]({cited.url}) | {c.devices} {c.hardware} | "
        f"{c.sequence * c.sequences_per_device:.0f} | {cited.seconds:.3g} s | "
        f"{ours.seconds:.3g} s | {ratio:.2f} | {peak} | {ours.peak_gib:.1f} GiB |"
    )


def summary(found: Sequence[Result]) -> str:
    """The figures of cases."""
    errors = [result.errors()["step"] for result in found]
    ratios = [result.predicted.seconds / result.case.cited.seconds for result in found]
    return (
        f"{len(found)} cases; steps: median of the ratios {statistics.median(ratios):.2f}, mean "
        f"error {statistics.mean(errors):.1%}, worst {max(errors):.1%}."
    )


def memory(found: Sequence[Result]) -> str:
    """Whether cases fit by prediction; as they ran, all should.

    JAX's limit on GPUs is a default, which a run may raise: there, the whole memory counts.
    """
    over = []
    for result in found:
        machine = load(result.case.configuration.hardware)
        tpu = machine.platform == "tpu"
        has = machine.memory_limit_bytes if tpu else machine.memory_capacity_bytes
        if result.predicted.peak_gib * GIB > has:
            over.append(f"{result.name} ({result.predicted.peak_gib:.1f} of {has / GIB:.1f} GiB)")
    names = f": {', '.join(over)}" if over else ""
    return (
        f"All of them ran. Predicted peak over the memory of the device: {len(over)} of "
        f"{len(found)}{names}."
    )


def by_table(found: Sequence[Result]) -> dict[str, list[Result]]:
    """The results of each table: of cases that their sources state in full, and of the others."""
    tables: dict[str, list[Result]] = {FULL: [], ASSUMED: []}
    for result in found:
        tables[ASSUMED if result.case.configuration.assumed else FULL].append(result)
    return {name: rows for name, rows in tables.items() if rows}


def write_page(name: str, found: Sequence[Result]) -> None:
    """Put a table into docs/fidelity.md, with its figures if all in it is stated."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    figures = ["", summary(found), "", memory(found)] if name == FULL else ["", memory(found)]
    text = "\n".join([HEADER, *map(line, found), *figures])
    PAGE.write_text(f"{head}{begin}{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a part of the names of cases")
    parser.add_argument("--record", action="store_true", help="write predictions and the table")
    parser.add_argument(
        "--accept", nargs=2, action="append", default=[], metavar=("CASE", "REASON"),
        help="let the errors of a case grow, and record why",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        cases = chosen(options.only)
        accepted = accepted_cases(options.accept, cases, recording=options.record)
        print(HEADER)
        found = []
        for result in results(cases):
            found.append(result)
            print(line(result), flush=True)
    except ToastError as error:
        print(f"published.py: {error}", file=sys.stderr)
        return 2
    print()
    for name, rows in by_table(found).items():
        print(f"{'' if name == FULL else 'In part assumed: '}{summary(rows)}\n{memory(rows)}")
    grown = [
        text for result in found for text in result.grown()
        if not (options.record and (result.name in accepted or result.recorded is None))
    ]  # fmt: skip
    print(*grown, sep="\n", file=sys.stderr, end="\n" if grown else "")
    if options.record:
        if grown:
            print("nothing is recorded; say why they grow: --accept CASE REASON", file=sys.stderr)
            return 1
        for (folder, _), result in zip(cases, found, strict=True):
            record(folder, result.to_record(accepted.get(result.name, "")))
        if not options.only:
            for name, rows in by_table(found).items():
                write_page(name, rows)
        return 0
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
