"""The shardings of a plan in its function traced with another memory policy, without a search."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.analysis import analyzed
from toast.cost import CostModel
from toast.plan.make_plan import make_plan
from toast.plan.plan import Plan
from toast.plan.unknown_ops import follow
from toast.program import Program, Signature
from toast.search import SearchResult, begin_with_fixed
from toast.space import Space
from toast.uneven import padded_program

if TYPE_CHECKING:
    from toast.analysis import Analysis

#: What the path of an op has in blocks, and in gradients: ``transpose(jvp(NAME))``.
_AGAIN = re.compile(r"(checkpoint|rematted_computation|eval_jaxpr)/")
_GRADIENT = re.compile(r"(transpose)?\((?:jvp\()+([^()]*)\)+|jvp\(([^()]*)\)")

#: Ops that carry values through loops, and into what runs again: a program has as many as values.
_PASSING = frozenset({
    "carry", "yield", "dynamic_slice", "dynamic_update_slice", "optimization_barrier",
})  # fmt: skip


def with_same_shardings(plan: Plan, analysis: Analysis) -> Plan:
    """The plan that shards another program as ``plan`` shards its own.

    :param plan: the plan; how its shardings were found does not matter.
    :param analysis: the analysis of the same function, traced with another memory policy.  Ops that
        both programs have get the shardings of the plan; others follow them.
    :returns: the plan of that program, under the options of ``plan``.
    """
    if plan.padding and not analysis.program.padding:
        larger = padded_program(analysis, plan.mesh, 1.0, only=plan.padding)
        if larger is not None:
            analysis = analyzed(
                larger.program, rules=analysis.rule_files, lowering=analysis.lowering
            )
    space = Space(analysis, plan.mesh, constraints=plan.constraints, resolution=plan.resolution)
    op_state = same_shardings(plan.analysis.program, plan.op_state, space)
    space = Space(
        analysis, plan.mesh, constraints=plan.constraints, resolution=plan.resolution,
        apart=op_state,
    )  # fmt: skip
    state = space.within(op_state[space.classes.representative])
    model = CostModel(space, plan.hardware, overlap=plan.model.overlap, safety=plan.safety)
    begin_with_fixed(model)
    cost = float(model.cost(model.price(state[None]), plan.memory_bytes)[0])
    other = make_plan(
        model, SearchResult((), state, cost, 1, 0.0, ()), memory_bytes=plan.memory_bytes,
        seed=plan.seed, seconds=dict(analysis.seconds), resolution=plan.resolution,
    )  # fmt: skip
    return dataclasses.replace(other, origin=plan.origin)


def same_shardings(
    theirs: Program, op_state: npt.NDArray[np.int8], space: Space
) -> npt.NDArray[np.int8]:
    """``[ops, axes]`` the shardings of a program in one that recomputes other values.

    :param theirs: the program.
    :param op_state: ``[ops, axes]`` its shardings.
    :param space: the decision space of the other program, with the same mesh axes.
    """
    ours = space.analysis.program
    state = space.of_ops(space.pinned).copy()
    known = np.zeros(len(state), dtype=bool)
    places = _Places()
    there, here = places.of(theirs), places.of(ours)
    for level in range(3):
        waiting = np.flatnonzero(~known).tolist()
        wanted = _grouped(here, waiting, level)
        others = _grouped(there, range(len(there)), level, wanted)
        for key, ops in wanted.items():
            if key not in others:
                continue
            if len(others[key]) == len(ops):
                rows = op_state[others[key]]
                if level and _runs_backwards(theirs, others[key]) != _runs_backwards(ours, ops):
                    rows = _of_last_layer_first(ours, rows)
            elif ours.kind(ops[0]) in _PASSING:
                continue  # other values are carried
            else:
                rows = _repeated(op_state[others[key]], len(ops))
            state[ops] = np.where(state[ops] < 0, rows, state[ops])
            known[ops] = True
    follow(state, known, space)
    return state


def _runs_backwards(program: Program, ops: Sequence[int]) -> bool:
    """Whether the ops run for the last layer first: those that run again do."""
    return all(program.passes[op] == "recomputed" for op in ops)


def _of_last_layer_first(program: Program, rows: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """The rows of the layers of a block in the opposite order; those of a layer keep theirs."""
    runs = [block.runs for block in program.memory.blocks] if program.memory else []
    layers = max([n for n in runs if n and len(rows) % n == 0], default=1)
    return rows.reshape(layers, -1, rows.shape[1])[::-1].reshape(rows.shape)


def _repeated(rows: npt.NDArray[np.int8], count: int) -> npt.NDArray[np.int8]:
    """The rows for another number of the same ops: one after the other, or the most frequent."""
    if len(rows) % count == 0 or count % len(rows) == 0:
        times = -(-count // len(rows))
        return np.tile(rows, (times, 1))[:count]
    (most, _), *_ = collections.Counter(map(tuple, rows.tolist())).most_common(1)
    return np.tile(np.array(most, dtype=np.int8), (count, 1))


#: What an op computes, its source line, its path without blocks and passes, and its pass.
_Place = tuple[int, str, int, str, str]


class _Places:
    """The places of ops of several programs."""

    def __init__(self) -> None:
        self._signatures: dict[Signature, int] = {}
        self._plain: dict[str, str] = {}

    def of(self, program: Program) -> list[_Place]:
        """The place of each op."""
        numbers = [
            self._signatures.setdefault(signature, len(self._signatures))
            for signature in program.signatures
        ]
        places: list[_Place] = []
        for number, (op, here) in enumerate(zip(program.ops, program.passes, strict=True)):
            at = program.location(number)
            places.append((numbers[op.signature], at.file, at.line, self._of_path(at.path), here))
        return places

    def _of_path(self, path: str) -> str:
        if path not in self._plain:
            self._plain[path] = _GRADIENT.sub(
                lambda match: match[2] or match[3] or "", _AGAIN.sub("", path)
            )
        return self._plain[path]


def _grouped(
    places: Sequence[_Place],
    ops: Iterable[int],
    level: int,
    wanted: Container[tuple[object, ...]] | None = None,
) -> dict[tuple[object, ...], list[int]]:
    """The ops by their places; a higher level tells fewer of them apart.

    Level 0 tells passes apart, and level 1 only paths; level 2 only source lines.
    """
    found: dict[tuple[object, ...], list[int]] = collections.defaultdict(list)
    for op in ops:
        key = places[op][: 5 - level]
        if wanted is None or key in wanted:
            found[key].append(op)
    return dict(found)


__all__ = ["same_shardings", "with_same_shardings"]
