"""Rules proven by execution: an op run on shards must equal the op run on the whole.

For every distinct op of a program and every factor that its rule lets a mesh axis lie on, the
operands are split along the factor, the op is run on each part, and the results are concatenated,
or put together by the factor's combiner.  No sharding and no partitioner takes part: what is tested
is the claim that the rule makes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from toast.analysis.rules import Factor, SignatureRule, solve_rules
from toast.apply.execute import flat_jit
from toast.apply.verify import random_arguments, tolerance
from toast.errors import PlanError, TargetError
from toast.frontend import Program, Signature, TensorType, mlir, stablehlo
from toast.frontend.mlir import Source

#: Shards an op is split into, where the factor's size allows.
_SHARDS = (2, 3)

#: Elements of an operand or result beyond which an op is not run.
_LARGEST = 2**20

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip

#: What leaves a value as it is under a combiner that would otherwise count it once per shard.
_IDENTITY = {"add": 0, "multiply": 1}


@dataclasses.dataclass(frozen=True)
class Proof:
    """The outcome for one factor of one op."""

    kind: str
    op: int
    factor: str
    #: ``proven``, ``wrong``, or why it was not run.
    outcome: str

    @property
    def wrong(self) -> bool:
        """Whether running the op contradicts its rule."""
        return self.outcome.startswith("wrong")


@dataclasses.dataclass(frozen=True)
class Tally:
    """Outcomes of one op kind."""

    kind: str
    instances: int
    proven: int
    wrong: int
    skipped: int


def prove(program: Program, rules: Sequence[Any] = (), *, seed: int = 0) -> tuple[Proof, ...]:
    """Prove the rules of all distinct ops of ``program``, which should be small.

    Raises :class:`toast.errors.PlanError` for fact bases, which have nothing to run.
    """
    source = program.source
    if not isinstance(source, Source):
        raise PlanError(f"{program.name} is a fact base: there are no ops to run")
    solved = solve_rules(program, rules)
    seen: set[int] = set()
    proofs = []
    for number, op in enumerate(program.ops):
        if op.signature in seen or source.operations[number] is None:
            continue
        seen.add(op.signature)
        signature, rule = program.signatures[op.signature], solved[op.signature]
        if rule.missing or signature.kind in ("carry", "yield", "join", "optimization_barrier"):
            continue
        instance = _Instance(signature, rule, source.operations[number], seed)
        proofs += [
            Proof(signature.kind, number, factor.label, outcome)
            for factor, outcome in instance.outcomes()
        ]
    return tuple(proofs)


def tally(proofs: Sequence[Proof]) -> tuple[Tally, ...]:
    """Outcomes by op kind, sorted."""
    by_kind = collections.defaultdict(list)
    for proof in proofs:
        by_kind[proof.kind].append(proof)
    return tuple(
        Tally(
            kind,
            len({p.op for p in found}),
            sum(p.outcome == "proven" for p in found),
            sum(p.wrong for p in found),
            sum(p.outcome != "proven" and not p.wrong for p in found),
        )
        for kind, found in sorted(by_kind.items())
    )


class _Instance:
    """One op: run whole once, and in shards once per factor."""

    def __init__(
        self, signature: Signature, rule: SignatureRule, operation: Any, seed: int
    ) -> None:
        self._signature, self._rule, self._seed = signature, rule, seed
        self._text = mlir.generic_text(operation)

    def outcomes(self) -> Iterator[tuple[Factor, str]]:
        """Every factor that an axis may lie on, with its outcome."""
        for index, factor in enumerate(self._rule.factors):
            shards = next((n for n in _SHARDS if factor.divisor % n == 0), 0)
            if factor.shardable and not factor.permutation and shards:
                yield factor, self._unclaimed(index) or self._run(index, shards)

    def _unclaimed(self, factor: int) -> str:
        """Why the claim for a factor cannot be tested by running the op on plain shards."""
        types = (*self._signature.operands, *self._signature.results)
        if any(np.prod(t.shape, dtype=np.float64) > _LARGEST for t in types):
            return "too large to run"
        if not self._signature.operands:
            return "makes its result from nothing"
        combiner = self._rule.factors[factor].combiner
        if combiner and combiner not in _COMBINE:
            return f"no combiner {combiner}"
        if self._rule.factors[factor].label.startswith("picked"):
            return "devices mask the indices that are not theirs"
        if self._signature.kind == "dynamic_update_slice":
            update = self._rule.operands[1]
            if not any(stack[0] == factor for stack in update):
                return "devices mask the part of the update that is not theirs"
        return ""

    def _run(self, factor: int, shards: int) -> str:
        with jax.enable_x64(True):  # an op may have 64-bit types of its own
            return self._compare(factor, shards)

    def _compare(self, factor: int, shards: int) -> str:
        try:
            whole = self._executable(None, 1)
            part = self._executable(factor, shards)
        except (TargetError, PlanError) as error:
            return f"cannot be built in parts: {error}"
        arguments = self._arguments(whole[0], factor)
        try:
            expected = [np.asarray(r) for r in whole[1](*arguments)]
            pieces = [
                [np.asarray(r) for r in part[1](*split)]
                for split in self._split(arguments, factor, shards)
            ]
        except Exception as error:  # XLA's own: no kernel for this op here
            return f"does not run here: {str(error).splitlines()[0]}"
        limit = tolerance(whole[0])
        for index, (dims, want) in enumerate(zip(self._rule.results, expected, strict=True)):
            got = self._together([p[index] for p in pieces], dims, factor)
            if not _close(got, want, limit):
                return f"wrong: result {index} in {shards} shards differs from the whole"
        return "proven"

    def _arguments(self, program: Program, factor: int) -> list[Any]:
        arguments = random_arguments(program, self._seed)
        combiner = self._rule.factors[factor].combiner
        if combiner in _IDENTITY and self._signature.kind in ("reduce", "scatter"):
            # What every shard starts from must count once: initial values, a scatter's target.
            count = len(self._signature.results)
            starts = range(count, 2 * count) if self._signature.kind == "reduce" else range(count)
            for place in starts:
                arguments[place] = np.full_like(arguments[place], _IDENTITY[combiner])
        return arguments

    def _split(self, arguments: list[Any], factor: int, shards: int) -> Iterator[list[Any]]:
        columns = []
        for argument, dims in zip(arguments, self._rule.operands, strict=True):
            split = [argument] * shards
            for d, stack in enumerate(dims):
                if stack[0] == factor:
                    split = np.split(argument, shards, axis=d)
            columns.append(split)
        return map(list, zip(*columns, strict=True))

    def _together(self, pieces: list[Any], dims: tuple[tuple[int, ...], ...], factor: int) -> Any:
        for d, stack in enumerate(dims):
            if stack[0] == factor:
                return np.concatenate(pieces, axis=d)
        combiner = self._rule.factors[factor].combiner
        return functools.reduce(_COMBINE[combiner], pieces) if combiner else pieces[0]

    def _executable(self, factor: int | None, shards: int) -> tuple[Program, Any]:
        """The op alone, of the size of a shard, as a compiled function."""

        def local(type_: TensorType, dims: tuple[tuple[int, ...], ...]) -> str:
            shape = [
                size // shards if stack[0] == factor else size
                for size, stack in zip(type_.shape, dims, strict=True)
            ]
            return mlir.type_text(TensorType(tuple(shape), type_.dtype))

        operands = list(map(local, self._signature.operands, self._rule.operands))
        results = list(map(local, self._signature.results, self._rule.results))
        text = self._resized(factor, shards) if factor is not None else self._text
        module = mlir.module_of_op(text, operands, results)
        program = stablehlo.from_module(module, name=self._signature.kind)
        return program, flat_jit(program, program.source.module, None, None)

    def _resized(self, factor: int, shards: int) -> str:
        """The op's text with those attributes that count elements along the factor divided."""
        text = self._text
        if not self._signature.operands:
            return text
        shape = self._signature.operands[0].shape
        split = [d for d, stack in enumerate(self._rule.operands[0]) if stack[0] == factor]
        for name in ("limit_indices", "slice_sizes"):
            found = re.search(rf"{name} = array<i64: ([\d, ]+)>", text)
            if found:
                numbers = [int(n) for n in found[1].split(",")]
                for d in split:
                    if numbers[d] == shape[d]:
                        numbers[d] //= shards
                text = text.replace(
                    found[0], f"{name} = array<i64: {', '.join(map(str, numbers))}>"
                )
        if self._rule.factors[factor].label == "group":
            text = re.sub(
                r"(feature_group_count|batch_group_count) = (\d+)",
                lambda m: f"{m[1]} = {int(m[2]) // shards if int(m[2]) > 1 else 1}",
                text,
            )
        return text


def _close(got: Any, want: Any, limit: float) -> bool:
    if got.shape != want.shape:
        return False
    if want.dtype.kind in "biu":
        return bool((got == want).all())
    a, e = got.astype(np.complex128), want.astype(np.complex128)
    finite = np.isfinite(e)
    if (np.isfinite(a) != finite).any():
        return False
    scale = float(np.abs(e[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(a - e)[finite].max(initial=0.0)) <= 10 * max(limit, 1e-6) * scale
