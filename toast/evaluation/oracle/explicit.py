"""The collectives that Shardy's partitioner makes explicit, one by one.

Passes of Shardy turn every difference between two shardings, and every sum over a sharded factor,
into collectives.  XLA does not run these passes yet, but they define the meaning of a plan.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping

from toast.apply import annotate
from toast.frontend import mlir
from toast.program import Program, Shardings, element_bytes

_PASSES = (
    "builtin.module(func.func(sdy-sharding-constraint-to-reshard))",
    "builtin.module(func.func("
    "sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))",
    "builtin.module(cse)",
)
_RESULT = re.compile(
    r"^\s+(%[\w#]+) = \"?sdy\.(all_gather|all_reduce|all_slice|all_to_all|collective_permute)\"?"
    r" (.*?)(%[\w#]+) out_sharding=<@\w+, \[(.*?)\]>.* : tensor<([^>]*)>"
)

#: A part of an axis, ``"a":(1)2``.
_PART_OF_AXIS = re.compile(r"\":\(\d+\)\d+")

#: The name and the sharding of an argument, and of the result of another op.
_ARGUMENT = re.compile(r"(%arg\d+): tensor<[^>]*> {[^%]*?<@\w+, \[(.*?)\]>")
_VALUE = re.compile(r"^\s+(%[\w#]+) = .*<@\w+, \[(.*?)\]>", re.MULTILINE)

#: Counts by kind, axes in mesh order, and bytes as in ``toast.hardware.COLLECTIVES``.
Multiset = Mapping[tuple[str, tuple[str, ...], float], int]


def explicit_collectives(program: Program, shardings: Shardings) -> Multiset | None:
    """The collectives of ``program`` with ``shardings``, and how often each occurs in its text.

    An all-reduce whose result is only sliced counts as a reduce-scatter.  ``None`` if Shardy splits
    an axis in two on the way from one sharding to another one.
    """
    module = annotate(program, shardings)
    for passes in _PASSES:
        mlir.run_passes(module, passes)
    sizes = dict(shardings.mesh.axes)
    rows = []
    users: collections.Counter[str] = collections.Counter()
    text = str(module)
    if _PART_OF_AXIS.search(text):
        return None
    for line in text.splitlines():
        _, _, right = line.partition(" = ")
        users.update(re.findall(r"%[\w#]+", right or line))
        if match := _RESULT.match(line):
            rows.append(match.groups())
    slices = {row[3]: row for row in rows if row[1] == "all_slice"}
    counted: collections.Counter[tuple[str, tuple[str, ...], float]] = collections.Counter()
    defined = {**dict(_ARGUMENT.findall(text)), **dict(_VALUE.findall(text))}
    for name, kind, what, operand, sharding, type_ in rows:
        if kind == "all_slice":
            continue
        *shape, dtype = type_.split("x")
        held = re.findall(r"\"(\w+)\"", sharding)
        full = math.prod(map(int, shape)) * element_bytes(dtype)
        size = full / math.prod(sizes[axis] for axis in held)
        axes = tuple(a for a in shardings.mesh.names if f'"{a}"' in what)
        if kind == "collective_permute":
            moved = _moved(defined.get(operand, ""), sharding)
            axes = tuple(axis for axis in shardings.mesh.names if axis in moved)
        if kind == "all_reduce" and name in slices and users[name] == 1:
            sliced = tuple(a for a in shardings.mesh.names if f'"{a}"' in slices[name][2])
            shared = tuple(a for a in axes if a in sliced)
            rest = tuple(a for a in axes if a not in sliced)
            if shared:
                counted["reduce_scatter", shared, size] += 1
                if rest:
                    counted["all_reduce", rest, size / math.prod(sizes[a] for a in shared)] += 1
                continue
        counted[kind, axes, size] += 1
    return counted


def _moved(before: str, after: str) -> set[str]:
    """The axes of the dimensions whose shards change places."""
    moved: set[str] = set()
    dims = (re.findall(r"\{([^}]*)\}", sharding) for sharding in (before, after))
    for old, new in zip(*(map(re.compile(r"\w+").findall, each) for each in dims), strict=False):
        differs = [a != b for a, b in zip(old, new, strict=False)]
        if {*old} != {*new}:
            moved |= {*old, *new}
        elif True in differs:
            moved |= {*new[differs.index(True) : len(differs) - differs[::-1].index(True)]}
    return moved
