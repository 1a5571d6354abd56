"""The program in sections that can be folded: layers, loops, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from toast.program import Program
from toast.space import PRODUCTS

#: Ops that only bring an argument into the form in which it is used.
_FORM = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})

#: Made anywhere: they belong to what follows.
_SOURCES = frozenset({"constant", "iota"})

#: Longest section; what is longer and has no structure is cut into parts.
MOST = 1000

#: Functions that a section names.
_FUNCTIONS = 4

#: A phase shorter than this is no section of its own.
_SHORT = 8


@dataclasses.dataclass(frozen=True)
class Section:
    """Ops ``start`` to ``stop`` (exclusive), which belong together."""

    title: str
    #: ``forward``, ``backward`` or nothing.
    phase: str
    #: The functions that do most of their work.
    detail: str
    start: int
    stop: int


def sections_of(program: Program) -> list[Section]:
    """The program cut into contiguous sections, in order.

    Layers are told by the arguments: an op that takes ``params['layers'][3]['wq']`` is of
    ``layers[3]``.  The ops between two layers go to the later one as far as they are the same
    before every layer.  Loops, and where backward begins, end a section too.
    """
    first, last = len(program.arguments), len(program.ops) - len(program.results)
    found = [Section("arguments", "", "", 0, first)] if first else []
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
    # A program without ops between its arguments and its results has none to begin with.
    for start, stop in zip(starts, [*starts[1:], last], strict=False):
        if start < stop:
            found += _cut(program, marks[start], phases[start], start, stop)
    found.append(Section("results", "", "", last, len(program.ops)))
    return [section for section in found if section.start < section.stop]


def _cut(program: Program, title: str, phase: str, start: int, stop: int) -> Iterator[Section]:
    """One section, or its parts where it is too long."""
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
    """Elements that an op makes; of a product, about as many as it multiplies."""
    signature = program.signatures[program.ops[op].signature]
    sizes = [math.prod(t.shape) for t in (*signature.operands[:2], *signature.results[:1])]
    return math.isqrt(math.prod(sizes)) if signature.kind in PRODUCTS else sizes[-1]


def _phases(program: Program, first: int, last: int) -> list[str]:
    """``forward`` or ``backward`` by op where the program was differentiated."""
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
        # Functions inside that were traced for themselves do not say which they are of.
        if near and (near == near[:1] * 2 or stop - start + 1 < _SHORT):
            phases[start : stop + 1] = near[:1] * (stop - start + 1)
    return phases


def _layer_marks(program: Program, phases: Sequence[str], first: int, last: int) -> dict[int, str]:
    """Ops that a section begins with, and the layer that it is of; none for what is behind it."""
    anchors = _anchors(program, first, last)
    runs: list[tuple[str, str, int, int]] = []  # label, phase, first and last anchor
    for op, label in anchors:
        phase = phases[op]
        if runs and runs[-1][:2] == (label, phase):
            runs[-1] = (label, phase, runs[-1][2], op)
        else:
            runs.append((label, phase, op, op))
    # What all layers share, as a mask or positions, ends none.
    kept = [
        run for run, before, after in zip(runs, [None, *runs], [*runs[1:], None], strict=False)
        if run[0] or not (before and after and before[1] == after[1] == run[1])
        or not (before[0] and after[0])
    ]  # fmt: skip
    kept = [
        (label, phase, group[0][2], group[-1][3])
        for (label, phase), found in itertools.groupby(kept, key=lambda run: run[:2])
        for group in [list(found)]
    ]
    marks: dict[int, str] = {}
    for phase in dict.fromkeys(run[1] for run in kept):
        same = [i for i, run in enumerate(kept) if run[1] == phase and run[0]]
        if len(same) < 2:
            continue
        back = _alike_before(program, [kept[i][2] for i in same], [
            kept[i - 1][3] if i else first - 1 for i in same
        ])  # fmt: skip
        starts = [kept[i][2] - back for i in same]
        lengths = Counter(b - a for a, b in itertools.pairwise(starts))
        usual = lengths.most_common(1)[0][0]
        for i, start in zip(same, starts, strict=True):
            marks[start] = kept[i][0]
            end = kept[i][3] + 1
            follows = kept[i + 1] if i + 1 < len(kept) else None
            if follows is None or not follows[0] or follows[1] != phase:
                if end <= start + usual <= (follows[2] if follows else last):
                    end = start + usual
                if end < last:
                    marks.setdefault(end, "")
    return marks


def _alike_before(program: Program, starts: list[int], limits: list[int]) -> int:
    """How many ops before each of ``starts``, behind its limit, are of the same signatures."""
    back = 0
    while all(start - back - 1 > limit for start, limit in zip(starts, limits, strict=True)):
        if len({program.ops[start - back - 1].signature for start in starts}) > 1:
            break
        back += 1
    return back


def _anchors(program: Program, first: int, last: int) -> list[tuple[int, str]]:
    """Ops that use arguments of one layer, or of none (``""``), in order."""
    labels = _argument_layers(program.arguments)
    of_value = dict(zip(program.argument_values, labels, strict=True))
    found = []
    for op in range(first, last):
        operands = program.ops[op].operands
        known = {of_value[v] for v in operands if v in of_value}
        if len(known) != 1:
            continue
        (label,) = known
        found.append((op, label))
        if program.kind(op) in _FORM:
            of_value.update(dict.fromkeys(program.ops[op].results, label))
    return found


def _argument_layers(paths: Sequence[str]) -> list[str]:
    """``layers[3]`` for ``params['layers'][3]['wq']``; nothing for what is of no layer.

    Lists of equal length are taken for the same layers: those of parameters and of caches.
    """
    values: dict[str, set[str]] = defaultdict(set)
    places: list[list[tuple[str, str]]] = []
    for path in paths:
        here = []
        for match in re.finditer(r"\[(\d+)\]", path):
            prefix = re.sub(r"\[\d+\]", "[*]", path[: match.start()])
            values[prefix].add(match[1])
            here.append((prefix, match[1]))
        places.append(here)
    several = {prefix: len(found) for prefix, found in values.items() if len(found) > 1}
    called: dict[int, Counter[str]] = defaultdict(Counter)
    words = {p: (re.findall(r"[^\W\d]\w*", p) or ["layer"])[-1] for p in several}
    for here in places:
        for prefix, _ in here:
            if prefix in several:
                called[several[prefix]][words[prefix]] += 1
    alone = {p: words[p] for p in several}
    for p, length in several.items():
        # Short lists are as long as others by chance.
        if length > 4:
            alone[p] = called[length].most_common(1)[0][0]
    labels = []
    for here in places:
        found = [place for place in here if place[0] in several]
        # A pair is rather two of a kind, as moments, than two layers.
        found = [p for p in found if several[p[0]] > 2] or found
        labels.append(f"{alone[found[0][0]]}[{found[0][1]}]" if found else "")
    return labels
