"""The numbers of iterations of loops that a program does not state itself."""

from __future__ import annotations

import dataclasses
import numbers
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from toast.errors import TargetError
from toast.program.program import Program
from toast.units import listed

#: The attribute of a ``carry`` op, and its value if the number of iterations is unknown.
_ATTRIBUTE, _UNKNOWN = "trip_count", -1

#: The largest number of iterations that a user may state.
_MOST = 2**31

#: The most runs of an op: prices are doubles, which have 53 bits.
_MOST_REPEATS = 2**48

#: The most loops that a message names.
_NAMED = 5


class UncountedLoop(NamedTuple):
    """A loop with an unknown number of iterations."""

    #: Its first ``carry``, its last ``yield``, and the number of each.
    first: int
    last: int
    carried: int
    #: ``model.py:12``, or the path of JAX primitives without a source line; empty if unknown.
    place: str


def uncounted_loops(program: Program) -> tuple[UncountedLoop, ...]:
    """The loops of a program whose numbers of iterations are unknown, in program order."""
    end_of = {carry: end for end, carry in program.ties}
    unknown = [
        signature.kind == "carry" and signature.attribute(_ATTRIBUTE) == _UNKNOWN
        for signature in program.signatures
    ]
    loops: list[UncountedLoop] = []
    for op, of in enumerate(program.ops):
        if not unknown[of.signature] or op not in end_of:
            continue
        before = loops[-1] if loops else None
        # The carries of a loop are adjacent, and its yields in the same order.
        if before and (op, end_of[op]) == (before.first + before.carried, before.last + 1):
            loops[-1] = before._replace(last=end_of[op], carried=before.carried + 1)
        else:
            location = program.location(op)
            place = f"{location.shown_file}:{location.line}" if location.file else location.path
            loops.append(UncountedLoop(op, end_of[op], 1, place))
    return tuple(loops)


def with_trip_counts(program: Program, counts: Mapping[str, int] | int | None) -> Program:
    """The program with numbers of iterations for loops whose own are unknown.

    :param counts: by source location (``{"model.py:12": 100}``, where the file needs only its last
        parts), or by the number of the loop among those that are unknown (``{"0": 100}``); one
        number for all of them; ``None`` for none.
    :raises toast.errors.TargetError: for a place without such a loop, and a number that is not
        positive.
    """
    if counts is None or counts == {}:
        return program
    loops = uncounted_loops(program)
    chosen = counts if isinstance(counts, Mapping) else {"*": counts}
    stated: dict[int, int] = {}
    for place, count in chosen.items():
        whole = isinstance(count, numbers.Integral) and not isinstance(count, bool)
        if not whole or not 1 <= count <= _MOST:
            raise TargetError(
                f"trip_counts {place}: {count!r} is not a number of iterations from 1 to {_MOST}"
            )
        matching = [n for n, loop in enumerate(loops) if _is_at(str(place), n, loop)]
        if not matching:
            known = [f"{n} ({loop.place or 'unknown place'})" for n, loop in enumerate(loops)]
            which = f"; these are {listed(known, _NAMED)}" if known else ": it states them all"
            raise TargetError(
                f"trip_counts {place}: {program.name} has no loop there whose trip count is "
                f"unknown{which}"
            )
        for number in matching:
            if stated.setdefault(number, int(count)) != count:
                where = loops[number].place or "unknown place"
                raise TargetError(
                    f"trip_counts {place}: {count} iterations, but another key states "
                    f"{stated[number]} for loop {number} ({where}); state each loop once"
                )
    repeats, ops, signatures = list(program.repeats), list(program.ops), list(program.signatures)
    for number, count in stated.items():
        loop = loops[number]
        for op in range(loop.first + loop.carried, loop.last - loop.carried + 1):
            repeats[op] *= count
        for op in range(loop.first, loop.first + loop.carried):
            old = signatures[ops[op].signature]
            attributes = {**dict(old.attributes), _ATTRIBUTE: count}
            new = dataclasses.replace(old, attributes=tuple(sorted(attributes.items())))
            if new not in signatures:
                signatures.append(new)
            ops[op] = dataclasses.replace(ops[op], signature=signatures.index(new))
    if max(repeats) > _MOST_REPEATS:
        raise TargetError(
            f"trip_counts: loops run an op {max(repeats):,} times, more than the limit of "
            f"{_MOST_REPEATS}; lower the trip counts"
        )
    return dataclasses.replace(
        program, ops=tuple(ops), signatures=tuple(signatures), repeats=tuple(repeats)
    )


def _is_at(place: str, number: int, loop: UncountedLoop) -> bool:
    """Whether the text of a user means the loop with this number."""
    if place in ("*", str(number)):
        return True
    file, _, line = loop.place.rpartition(":")
    wanted, _, wanted_line = place.rpartition(":")
    if not wanted or line != wanted_line:
        return place == loop.place
    parts, ends = pathlib.PurePath(file).parts, pathlib.PurePath(wanted).parts
    return parts[-len(ends) :] == ends
