"""The sections of a program: layers, loops, forward and backward pass."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from toast.paths import list_positions
from toast.program import Program
from toast.space import PRODUCTS

#: Ops that only convert an argument into the form in which it is used.
_FORM = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})

#: Ops without operands; they belong to the ops that follow.
_SOURCES = frozenset({"constant", "iota"})

#: Maximum number of ops in a section; longer sections are split into parts.
MOST = 1000

#: Maximum number of functions in the detail of a section.
_FUNCTIONS = 4

#: A phase with fewer ops is part of its neighbours.
_SHORT = 8


@dataclasses.dataclass(frozen=True)
class Section:
    """A section: the ops from ``start`` to ``stop`` (exclusive)."""

    title: str
    #: ``forward``, ``backward`` or ``""``.
    phase: str
    #: The functions that do most of the work.
    detail: str
    start: int
    stop: int


def sections_of(program: Program) -> list[Section]:
    """The contiguous sections of a program, in order.

    The arguments of ops determine layers: an op that takes ``params['layers'][3]['wq']`` belongs to
    ``layers[3]``.  The ops between two layers belong to the later layer as far as they are the same
    before every layer.  Loops and the beginning of the backward pass also end a section.
    """
    first, last = len(program.arguments), len(program.ops) - len(program.results)
    sections = [Section("arguments", "", "", 0, first)] if first else []
    phases = _phases(program, first, last)
    marks = _layer_marks(program, phases, first, last)
    current = ""
    for op in range(first, last):
        if op in marks:
            current = marks[op]
        elif op == first or (program.repeats[op - 1], phases[op - 1]) != (
            program.repeats[op], phases[op],
        ):  # fmt: skip
            marks[op] = current
    starts = sorted(mark for mark in marks if first <= mark < last)
    # A program without ops between its arguments and its results has no marks.
    for start, stop in zip(starts, [*starts[1:], last], strict=False):
        if start < stop:
            sections += _split(program, marks[start], phases[start], start, stop)
    sections.append(Section("results", "", "", last, len(program.ops)))
    return [section for section in sections if section.start < section.stop]


def _split(program: Program, title: str, phase: str, start: int, stop: int) -> Iterator[Section]:
    """One section, or several parts if it is too long."""
    parts = -(-(stop - start) // MOST)
    for part in range(parts):
        a = start + (stop - start) * part // parts
        b = start + (stop - start) * (part + 1) // parts
        detail = _functions(program, a, b)
        name = title or detail.split(", ")[0] or "ops"
        if program.repeats[a] > 1:
            name += f" \u00d7 {program.repeats[a]}"
        if parts > 1:
            name += f", part {part + 1} of {parts}"
        yield Section(name, phase, detail, a, b)


def _functions(program: Program, start: int, stop: int) -> str:
    """The user's functions that do most of the work."""
    work: Counter[str] = Counter()
    for op in range(start, stop):
        if program.kind(op) not in _SOURCES:
            function = program.location(op).function
            name = re.sub(r"\.?<\w+>", "", function).rsplit(".", 1)[-1]
            if name:
                work[name] += _work(program, op)
    return ", ".join(name for name, _ in work.most_common(_FUNCTIONS))


def _work(program: Program, op: int) -> int:
    """The number of elements of the result; for a product, roughly of its multiplications."""
    signature = program.signatures[program.ops[op].signature]
    sizes = [math.prod(t.shape) for t in (*signature.operands[:2], *signature.results[:1])]
    return math.isqrt(math.prod(sizes)) if signature.kind in PRODUCTS else sizes[-1]


def _phases(program: Program, first: int, last: int) -> list[str]:
    """For each op ``forward`` or ``backward``, or ``""`` if the program has no gradient."""
    phases = [""] * len(program.ops)
    following = ""
    for op in reversed(range(first, last)):
        place = program.location(op)
        if program.kind(op) not in _SOURCES and place.path:
            following = (
                "backward" if "transpose(" in place.path
                else "forward" if "jvp(" in place.path else ""
            )  # fmt: skip
        phases[op] = following
    runs = [[first, first]]  # first and last op
    for op in range(first, last):
        if phases[op] == phases[runs[-1][0]]:
            runs[-1][1] = op
        else:
            runs.append([op, op])
    for start, stop in runs:
        near = [phases[op] for op in (start - 1, stop + 1) if first <= op < last]
        # The paths of functions that were traced separately do not contain their phase.
        if near and (near == near[:1] * 2 or stop - start + 1 < _SHORT):
            phases[start : stop + 1] = near[:1] * (stop - start + 1)
    return phases


def _layer_marks(program: Program, phases: Sequence[str], first: int, last: int) -> dict[int, str]:
    """The first op of each section with its layer; ``""`` for the ops after a layer."""
    anchors = _anchors(program, first, last)
    runs: list[tuple[str, str, int, int]] = []  # label, phase, first and last anchor
    for op, label in anchors:
        phase = phases[op]
        if runs and runs[-1][:2] == (label, phase):
            runs[-1] = (label, phase, runs[-1][2], op)
        else:
            runs.append((label, phase, op, op))
    # Uses of values that all layers share, such as a mask or positions, end no layer.
    stretches = [
        run for run, before, after in zip(runs, [None, *runs], [*runs[1:], None], strict=False)
        if run[0] or not (before and after and before[1] == after[1] == run[1])
        or not (before[0] and after[0])
    ]  # fmt: skip
    stretches = [
        (label, phase, group[0][2], group[-1][3])
        for (label, phase), members in itertools.groupby(stretches, key=lambda run: run[:2])
        for group in [list(members)]
    ]
    marks: dict[int, str] = {}
    for phase in dict.fromkeys(run[1] for run in stretches):
        same = [i for i, run in enumerate(stretches) if run[1] == phase and run[0]]
        if len(same) < 2:
            continue
        back = _alike_before(program, [stretches[i][2] for i in same], [
            stretches[i - 1][3] if i else first - 1 for i in same
        ])  # fmt: skip
        starts = [stretches[i][2] - back for i in same]
        lengths = Counter(b - a for a, b in itertools.pairwise(starts))
        usual = lengths.most_common(1)[0][0]
        for i, start in zip(same, starts, strict=True):
            marks[start] = stretches[i][0]
            end = stretches[i][3] + 1
            follows = stretches[i + 1] if i + 1 < len(stretches) else None
            if follows is None or not follows[0] or follows[1] != phase:
                if end <= start + usual <= (follows[2] if follows else last):
                    end = start + usual
                if end < last:
                    marks.setdefault(end, "")
    return marks


def _alike_before(program: Program, starts: list[int], limits: list[int]) -> int:
    """How many ops before each start, and after its limit, have equal signatures."""
    back = 0
    while all(start - back - 1 > limit for start, limit in zip(starts, limits, strict=True)):
        if len({program.ops[start - back - 1].signature for start in starts}) > 1:
            break
        back += 1
    return back


def _anchors(program: Program, first: int, last: int) -> list[tuple[int, str]]:
    """The ops that use arguments of exactly one layer, or of no layer (``""``), in order."""
    labels = _argument_layers(program.arguments)
    of_value = dict(zip(program.argument_values, labels, strict=True))
    anchors = []
    for op in range(first, last):
        operands = program.ops[op].operands
        known = {of_value[v] for v in operands if v in of_value}
        if len(known) != 1:
            continue
        (label,) = known
        anchors.append((op, label))
        if program.kind(op) in _FORM:
            of_value.update(dict.fromkeys(program.ops[op].results, label))
    return anchors


def _argument_layers(paths: Sequence[str]) -> list[str]:
    """The layer of each argument: ``layers[3]`` for ``params['layers'][3]['wq']``, else ``""``.

    Lists of equal length count as the same layers, for example those of parameters and of caches.
    """
    values: dict[str, set[str]] = defaultdict(set)
    places: list[list[tuple[str, str]]] = []
    for path in paths:
        here = list_positions(path)
        for prefix, number in here:
            values[prefix].add(number)
        places.append(here)
    several = {prefix: len(numbers) for prefix, numbers in values.items() if len(numbers) > 1}
    called: dict[int, Counter[str]] = defaultdict(Counter)
    words = {p: (re.findall(r"[^\W\d]\w*", p) or ["layer"])[-1] for p in several}
    for here in places:
        for prefix, _ in here:
            if prefix in several:
                called[several[prefix]][words[prefix]] += 1
    alone = {p: words[p] for p in several}
    for p, length in several.items():
        # Short lists may have equal lengths by chance.
        if length > 4:
            alone[p] = called[length].most_common(1)[0][0]
    labels = []
    for here in places:
        lists = [place for place in here if place[0] in several]
        # A list of two is more often a pair, such as moments, than two layers.
        lists = [p for p in lists if several[p[0]] > 2] or lists
        labels.append(f"{alone[lists[0][0]]}[{lists[0][1]}]" if lists else "")
    return labels
