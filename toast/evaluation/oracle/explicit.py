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

#: Counts by kind, axes in mesh order, and bytes as in ``toast.hardware.COLLECTIVES``.
Multiset = Mapping[tuple[str, tuple[str, ...], float], int]


def explicit_collectives(program: Program, shardings: Shardings) -> Multiset:
    """The collectives of ``program`` with ``shardings``, and how often each occurs in its text.

    An all-reduce whose result is only sliced counts as a reduce-scatter.
    """
    module = annotate(program, shardings)
    for passes in _PASSES:
        mlir.run_passes(module, passes)
    sizes = dict(shardings.mesh.axes)
    rows = []
    users: collections.Counter[str] = collections.Counter()
    text = str(module)
    for line in text.splitlines():
        _, _, right = line.partition(" = ")
        users.update(re.findall(r"%[\w#]+", right or line))
        if match := _RESULT.match(line):
            rows.append(match.groups())
    slices = {row[3]: row for row in rows if row[1] == "all_slice"}
    counted: collections.Counter[tuple[str, tuple[str, ...], float]] = collections.Counter()
    for name, kind, what, _, sharding, type_ in rows:
        if kind == "all_slice":
            continue
        *shape, dtype = type_.split("x")
        held = re.findall(r"\"(\w+)\"", sharding)
        full = math.prod(map(int, shape)) * element_bytes(dtype)
        size = full / math.prod(sizes[axis] for axis in held)
        axes = tuple(a for a in shardings.mesh.names if f'"{a}"' in what)
        if kind == "collective_permute":  # of axes that change places along a dimension
            shared_dims = [d for d in re.findall(r"\{([^}]*)\}", sharding) if "," in d]
            axes = tuple(a for a in shardings.mesh.names if any(f'"{a}"' in d for d in shared_dims))
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
