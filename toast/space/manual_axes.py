"""Manual regions on a mesh: the axes that they take, and the factors that these axes shard.

A region of the program (``jax.shard_map``) names axes of the program's mesh.  They are the axes of
the mesh with the same names or, for a name that the mesh does not have, the axis of the same size
if there is only one.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.errors import MeshError
from toast.hardware import Mesh
from toast.program import Program, Signature
from toast.units import listed

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: Ops at the boundary of a region.
BOUNDARY = frozenset({"manual_entry", "manual_exit"})

#: In holders: plans decide on the axis.
FREE = -2


@dataclasses.dataclass(frozen=True)
class RegionAxis:
    """An axis of the program's mesh that manual regions take."""

    name: str
    size: int
    #: An op at the boundary of a region that takes it.
    op: int


def region_axes(program: Program) -> tuple[RegionAxis, ...]:
    """The axes that the manual regions of a program take; one for each name and size."""
    taken = [
        [*zip(_texts(signature, "manual_axes"), _numbers(signature, "manual_sizes"), strict=True)]
        if signature.kind in BOUNDARY else []
        for signature in program.signatures
    ]  # fmt: skip
    found: dict[tuple[str, int], int] = {}
    if any(taken):
        for number, op in enumerate(program.ops):
            for axis in taken[op.signature]:
                found.setdefault(axis, number)
    return tuple(RegionAxis(name, size, op) for (name, size), op in found.items())


def _texts(signature: Signature, name: str) -> tuple[str, ...]:
    items = signature.attribute(name)
    return tuple(map(str, items)) if isinstance(items, tuple) else ()


def _numbers(signature: Signature, name: str) -> tuple[int, ...]:
    items = signature.attribute(name)
    return tuple(map(int, items)) if isinstance(items, tuple) else ()


def split_axes(signature: Signature) -> list[tuple[str, int]]:
    """The axes of the program that split a value at a boundary, each with its dimension.

    Those of one dimension are neighbours, major to minor.
    """
    axes, dims = _texts(signature, "split_axes"), _numbers(signature, "split_dimensions")
    return [*zip(axes, dims, strict=True)]


def place_of_region(program: Program, op: int) -> str:
    """The source line of the innermost manual region with ``op`` at its boundary or inside.

    If the region has no source line, that of the first op in it.
    """
    for number in range(_entry(program, op), len(program.ops)):
        place = program.location(number)
        if place.file:
            return f"{place.shown_file}:{place.line}"
    return str(program.location(op))


def _entry(program: Program, op: int) -> int:
    """The last entry of the region of :func:`place_of_region` before ``op``, or ``op``."""
    signature = program.signatures[program.ops[op].signature]
    if signature.kind == "manual_entry":
        return op
    around = {*_texts(signature, "manual"), *_texts(signature, "manual_axes")}
    for number in range(op - 1, -1, -1):
        entry = program.signatures[program.ops[number].signature]
        axes = _texts(entry, "manual_axes")
        if entry.kind == "manual_entry" and around == {*axes, *_texts(entry, "manual")}:
            return number
    return op


def matched_axes(program: Program, mesh: Mesh) -> dict[str, str]:
    """The axis of ``mesh`` for each axis of the program's manual regions.

    Raises :class:`toast.errors.MeshError` if the mesh has no such axis, or one of another size.
    """
    axes = region_axes(program)
    sizes = dict(mesh.axes)
    for axis in axes:
        here = sizes.get(axis.name, axis.size)
        if here != axis.size:
            raise MeshError(
                f"mesh {mesh}: shard_map at {place_of_region(program, axis.op)} is manual over "
                f"{axis.name}={axis.size}, and the mesh has {axis.name}={here}; use "
                f"{axis.name}={axis.size}"
            )
    matched = {axis.name: axis.name for axis in axes if axis.name in sizes}
    others = [axis for axis in axes if axis.name not in sizes]
    wanted = Counter(axis.size for axis in others)
    for axis in others:
        fitting = [
            name for name, size in mesh.axes if size == axis.size and name not in matched.values()
        ]
        if len(fitting) != 1 or wanted[axis.size] > 1:
            if not fitting:
                reason = "the mesh has no such axis"
            elif len(fitting) > 1:
                reason = f"the mesh has several axes of size {axis.size}"
            else:
                reason = f"so it is over several axes of size {axis.size}"
            raise MeshError(
                f"mesh {mesh}: shard_map at {place_of_region(program, axis.op)} is manual over "
                f"{axis.name}={axis.size}, and {reason}; name an axis "
                f"{axis.name}={axis.size}"
            )
        matched[axis.name] = fitting[0]
    return matched


def region_notes(program: Program, mesh: Mesh) -> list[str]:
    """One line for the axes that regions take, and one for axes that only match by size."""
    axes = region_axes(program)
    if not axes:
        return []
    matched = matched_axes(program, mesh)
    places: dict[str, list[str]] = {}
    for op, names in _regions(program):
        shown = ", ".join(matched[name] for name in names)
        place = place_of_region(program, op)
        if place not in places.setdefault(shown, []):
            places[shown].append(place)
    notes = [
        f"manual over {shown} at {listed(where, 3)} (shard_map): the axes are taken there, and "
        "values at the boundary have the shardings of its specs"
        for shown, where in places.items() if shown
    ]  # fmt: skip
    by_size = [f"{own} is {axis}" for own, axis in matched.items() if own != axis]
    if by_size:
        notes.append(f"axes of shard_map, matched with the mesh by size: {', '.join(by_size)}")
    return notes


def _regions(program: Program) -> list[tuple[int, tuple[str, ...]]]:
    """The first op of each region at its boundary, with the axes of the region."""
    names = [
        _texts(signature, "manual_axes") if signature.kind in BOUNDARY else ()
        for signature in program.signatures
    ]
    return [(n, names[op.signature]) for n, op in enumerate(program.ops) if names[op.signature]]


@dataclasses.dataclass(frozen=True)
class RegionHolders:
    """What manual regions decide, for a program and the axes of ``mesh.real``."""

    #: The axis of the mesh for each axis of the regions.
    matched: Mapping[str, str]
    #: ``[ops, axes]`` the factor that holds an axis in every plan, -1 for none, :data:`FREE` if
    #: no region takes the axis.
    holders: npt.NDArray[np.int8]
    #: Pairs of axes; the first one is major where both shard a dimension.
    order: tuple[tuple[str, str], ...]


def hold(analysis: Analysis, mesh: Mesh) -> RegionHolders:
    """The axes that regions hold; ``mesh`` is the whole mesh.

    Raises the errors of :func:`matched_axes`.
    """
    program, real = analysis.program, mesh.real
    matched = matched_axes(program, mesh)
    holders = np.full((len(program.ops), len(real.axes)), FREE, dtype=np.int8)
    if not matched:
        return RegionHolders(matched, holders, ())
    rows = np.full((len(program.signatures), len(real.axes)), FREE, dtype=np.int8)
    for row, rule in zip(rows, analysis.rules, strict=True):
        for axis, factor in rule.fixed:
            row[real.names.index(matched[axis])] = factor
    holders = rows[[op.signature for op in program.ops]]
    pairs = Counter[tuple[str, str]]()
    wished: list[tuple[str, str, int]] = []
    for number, signature in enumerate(program.signatures):
        if signature.kind not in BOUNDARY:
            continue
        split = [(matched[axis], d) for axis, d in split_axes(signature)]
        pairs.update((a, b) for n, (a, d) in enumerate(split) for b, e in split[n + 1 :] if d == e)
        free = [
            name for name, row in zip(real.names, rows[number].tolist(), strict=True)
            if row == FREE
        ]  # fmt: skip
        wished += [(a, b, number) for a in dict.fromkeys(axis for axis, _ in split) for b in free]
    order = [pair for pair, _ in pairs.most_common()]
    kept = acyclic(order, ())
    # Axes of a region are major to those that pass through it; where that contradicts another
    # region, the others do not pass.
    after = acyclic(dict.fromkeys((a, b) for a, b, _ in wished), kept)
    for a, b, number in wished:
        if (a, b) not in after:
            here = np.array([op.signature == number for op in program.ops])
            holders[here, real.names.index(b)] = -1
    return RegionHolders(matched, holders, (*kept, *after))


def acyclic(
    pairs: Iterable[tuple[str, str]], known: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    """The pairs of an order that contradict neither ``known`` ones nor earlier ones."""
    kept: list[tuple[str, str]] = []
    for pair in pairs:
        graph: dict[str, set[str]] = {}
        for first, then in (*known, *kept, pair):
            graph.setdefault(then, set()).add(first)
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError:
            continue
        kept.append(pair)
    return tuple(kept)
