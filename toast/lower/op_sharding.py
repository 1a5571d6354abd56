"""The sharding of an op: the axes of each factor, and what follows for its operands and results."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from toast.analysis import Analysis, Factor, SignatureRule
from toast.cost.joint_sums import JointSum
from toast.errors import PlanError
from toast.hardware import Mesh
from toast.program import Program, Shardings, Signature, Spec


@dataclasses.dataclass(frozen=True)
class OpFactors:
    """The factor of each op that holds each axis of a mesh: a state of the search, by op."""

    #: The names of the axes.
    axes: tuple[str, ...]
    #: ``[ops, axes]`` the factor, or -1.
    held: npt.NDArray[np.int8] = dataclasses.field(repr=False)
    #: ``[ops, axes]`` the number of the plan's step that gave the axis to it, from 1; 0 for none.
    steps: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    #: Products, and the operand of each, that use the shards of a gather one after the other.
    looped_gathers: frozenset[tuple[int, int]] = frozenset()
    #: Products whose scattered sums go around the devices.
    looped_sums: frozenset[int] = frozenset()
    #: Partial sums that wait while ops are linear.
    joint_sums: tuple[JointSum, ...] = ()

    def renamed(self, names: Mapping[str, str]) -> OpFactors:
        """The same with other names of axes."""
        return dataclasses.replace(
            self,
            axes=tuple(names.get(axis, axis) for axis in self.axes),
            joint_sums=tuple(joint.renamed(names) for joint in self.joint_sums),
        )

    def of(self, op: int) -> dict[int, frozenset[str]]:
        """The axes of each factor of an op that has any."""
        factors: dict[int, frozenset[str]] = {}
        for axis, factor in zip(self.axes, self.held[op].tolist(), strict=True):
            if factor >= 0:
                factors[factor] = factors.get(factor, frozenset()) | {axis}
        return factors

    def check(self, analysis: Analysis, mesh: Mesh) -> None:
        """Checks that every op has the factors, and that their axes divide them.

        Raises :class:`toast.errors.PlanError`, which names the op and the factor.
        """
        program, sizes = analysis.program, dict(mesh.axes)
        for op in np.flatnonzero((self.held >= 0).any(axis=1)).tolist():
            rule = analysis.rules[program.ops[op].signature]
            for number, axes in self.of(op).items():
                along = ", ".join(sorted(axes))
                if number >= len(rule.factors):
                    raise PlanError(
                        f"{program.name}: {program.describe(op)} has {len(rule.factors)} factors, "
                        f"and the state shards its factor {number} along {along}; check that it is "
                        "a state of this program"
                    )
                factor = rule.factors[number]
                shards = math.prod(sizes[axis] for axis in axes)
                if factor.divisor % shards:
                    raise PlanError(
                        f"{program.name}: {program.describe(op)}: {shards} devices ({along}) do "
                        f"not divide factor {factor.label} of {factor.divisor} elements; use "
                        "another sharding, or plan with uneven=1 (--uneven 1)"
                    )

    def causes(self, ops: tuple[int, ...], axes: frozenset[str]) -> tuple[int, ...]:
        """The numbers of the steps that gave ``axes`` to ``ops``, ascending."""
        columns = [n for n, axis in enumerate(self.axes) if axis in axes]
        return tuple(sorted({*self.steps[np.ix_(ops, columns)].ravel().tolist()} - {0}))


@dataclasses.dataclass(frozen=True)
class OpSharding:
    """An op with the shardings of its operands and results."""

    op: int
    signature: Signature
    rule: SignatureRule
    #: The axes of each factor that has any.
    axes: Mapping[int, frozenset[str]]
    #: The sharding in which the op uses each operand, and in which it computes each result.
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    #: Axes over which operands are partial sums that the op passes on.
    waiting: frozenset[str] = frozenset()

    @functools.cached_property
    def sharded(self) -> tuple[int, ...]:
        """The factors with axes, in ascending order."""
        return tuple(sorted(self.axes))

    def factor(self, number: int) -> Factor:
        """A factor by its number."""
        return self.rule.factors[number]

    def partial(self, result: int) -> dict[str, frozenset[str]]:
        """The axes over which a result is a partial sum, by combiner."""
        inside = {f for factors in self.rule.results[result] for f in factors}
        sums: dict[str, frozenset[str]] = {}
        for number in self.sharded:
            combiner = self.factor(number).combiner
            if combiner and number not in inside:
                sums[combiner] = sums.get(combiner, frozenset()) | self.axes[number]
        if self.waiting:
            sums["add"] = sums.get("add", frozenset()) | self.waiting
        return sums

    @functools.cached_property
    def axes_of_sums(self) -> frozenset[str]:
        """The axes over which results are partial sums."""
        partial = [self.partial(index) for index in range(len(self.results))]
        return frozenset(axis for sums in partial for axes in sums.values() for axis in axes)

    def whole_along(self, factors: frozenset[int]) -> OpSharding:
        """The same op with some factors whole."""
        if not factors:
            return self
        gone = frozenset(axis for number in factors for axis in self.axes[number])

        def without(spec: Spec) -> Spec:
            return tuple(tuple(axis for axis in axes if axis not in gone) for axes in spec)

        return dataclasses.replace(
            self,
            axes={number: axes for number, axes in self.axes.items() if number not in factors},
            operands=tuple(map(without, self.operands)),
            results=tuple(map(without, self.results)),
        )


def op_sharding(
    program: Program,
    shardings: Shardings,
    rule: SignatureRule,
    op: int,
    axes: Mapping[int, frozenset[str]],
) -> OpSharding:
    """The sharding of an op of ``program``.

    ``axes`` has the axes of its factors.
    """
    used = program.ops[op]
    signature = program.signatures[used.signature]

    def of_factors(dims: Sequence[Sequence[int]]) -> Spec:
        return tuple(
            tuple(a for a in shardings.mesh.names if any(a in axes.get(n, ()) for n in factors))
            for factors in dims
        )

    # XLA shards no empty arrays, but the op has its shards of them.
    operands = tuple(
        of_factors(dims) if 0 in type_.shape else shardings.at(program, op, index)
        for index, (dims, type_) in enumerate(zip(rule.operands, signature.operands, strict=True))
    )
    results = tuple(
        of_factors(dims) if 0 in type_.shape else shardings.sums.get(v, shardings.of(program, v))
        for v, dims, type_ in zip(used.results, rule.results, signature.results, strict=True)
    )
    return OpSharding(op, signature, rule, axes, operands, results)
