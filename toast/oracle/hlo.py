"""Collectives in a program that XLA has scheduled."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

from toast.frontend import element_bytes

_KINDS = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "collective-permute": "collective_permute",
    "ragged-all-to-all": "all_to_all",
}  # fmt: skip
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r"^\s+(?:ROOT )?%[\w.\-]+ = (?P<types>\(.*?\)|\S+) (?P<kind>" + "|".join(_KINDS) + r")"
    r"(?P<start>-start)?\("
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALL = re.compile(r"(?:body|to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")

#: Loops in which the partitioner overlaps a product with the transfer of its parts.
_WINDOWED = re.compile(r"windowed_dot_general_body_(rs|ag)")


@dataclasses.dataclass(frozen=True)
class Communication:
    """Collectives of one kind: how many run, and the bytes of their results per device."""

    kind: str
    count: int
    bytes: float


def communication_in(text: str) -> tuple[Communication, ...]:
    """The collectives of an HLO module, by kind, those in loops as often as they run.

    One collective that the scheduler cut into several instructions has one channel and counts
    once.  A windowed product counts as the reduce-scatter or all-gather that it is made of.
    """
    lines = list(_with_computation(text))
    repeats = _repeats(lines)
    count: dict[str, int] = collections.defaultdict(int)
    size: dict[str, float] = collections.defaultdict(float)
    seen: set[tuple[str, str]] = set()
    windowed: dict[str, list[float]] = collections.defaultdict(list)
    for computation, line in lines:
        found = _COLLECTIVE.match(line)
        if found is None:
            continue
        channel = re.search(r"channel_id=(\d+)", line)
        if channel is not None:
            if (found["kind"], channel[1]) in seen:
                continue
            seen.add((found["kind"], channel[1]))
        arrays = [_bytes(*array) for array in _ARRAY.findall(found["types"])]
        if found["start"]:  # (operands, results, ...)
            arrays = arrays[len(arrays) // 2 :] if found["kind"] == "all-gather" else arrays[:1]
        times = repeats.get(computation, 1)
        loop = _WINDOWED.search(computation)
        if loop:
            windowed[computation].append(times * sum(arrays))
            continue
        count[_KINDS[found["kind"]]] += times
        size[_KINDS[found["kind"]]] += times * sum(arrays)
    for computation, moved in windowed.items():
        kind = "reduce_scatter" if "body_rs" in computation else "all_gather"
        count[kind] += 1
        size[kind] += max(moved)
    return tuple(Communication(k, count[k], size[k]) for k in sorted(count))


def _with_computation(text: str) -> Iterator[tuple[str, str]]:
    computation = ""
    for line in text.splitlines():
        found = _COMPUTATION.match(line)
        if found:
            computation = found[1]
        yield computation, line


def _repeats(lines: list[tuple[str, str]]) -> dict[str, int]:
    """How often each computation runs, by the trip counts of the loops around it."""
    # Counted loops begin at 0 and end at the constant that their condition compares with.
    bounds: dict[str, int] = {}
    for computation, line in lines:
        if found := _BOUND.search(line):
            bounds[computation] = max(bounds.get(computation, 1), int(found[1]))
    callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for computation, line in lines:
        times = 1
        if " while(" in line:
            known, condition = _TRIPS.search(line), _CONDITION.search(line)
            times = int(known[1]) if known else bounds.get(condition[1], 1) if condition else 1
        for called in _CALL.findall(line):
            callers[called].append((computation, times))
    made: dict[str, int] = {}

    def of(computation: str) -> int:
        if computation not in made:
            made[computation] = 1  # of the entry, and of what calls itself
            above = callers.get(computation, [])
            made[computation] = max((of(c) * times for c, times in above), default=1)
        return made[computation]

    for computation in list(callers):
        of(computation)
    return made


def _bytes(dtype: str, shape: str) -> float:
    names = {"pred": "i1", "s8": "i8", "s16": "i16", "s32": "i32", "s64": "i64", "u8": "ui8",
             "u16": "ui16", "u32": "ui32", "u64": "ui64"}  # fmt: skip
    sizes = [int(size) for size in shape.split(",") if size]
    try:
        return float(math.prod(sizes) * element_bytes(names.get(dtype, dtype)))
    except KeyError:
        return 0.0
