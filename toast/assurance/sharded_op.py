"""Splits one op along a factor, and compares the combined results with those of the whole op."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from toast.analysis.rules import SignatureRule
from toast.apply.verify import random_operands, tolerance_of
from toast.program import Signature, TensorType

#: Numbers of shards to try; the first one that divides the factor is used.
_SHARDS = (2, 3)

#: The most elements of an operand or result of an op that is run.
_LARGEST = 2**20

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def identity(combiner: str, dtype: Any) -> Any:
    """The identity element of a combiner."""
    floating = dtype.kind in "fcV"
    lowest, highest = (-np.inf, np.inf) if floating else _range(dtype)
    return {
        "add": 0, "multiply": 1, "maximum": lowest, "minimum": highest, "or": 0,
        "and": 1 if dtype.kind == "b" else -1 if dtype.kind == "i" else highest,
    }[combiner]  # fmt: skip


def _range(dtype: Any) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


#: Ops that pick along a dimension, and the attribute with the dimensions of their indices.
_INDICES = {
    "gather": "start_index_map", "scatter": "scattered_dims_to_operand_dims",
    "torch_index_select": "",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class ShardedOp:
    """An op that is run whole once, and in shards once per factor."""

    number: int
    signature: Signature
    rule: SignatureRule
    text: str
    seed: int
    reference: Callable[..., Any] | None = None

    def claims(self) -> Iterator[tuple[int, int]]:
        """Every factor that may take an axis, and the number of shards to split it into."""
        for index, factor in enumerate(self.rule.factors):
            shards = next((n for n in _SHARDS if factor.divisor % n == 0), 0)
            if factor.shardable and not (factor.permutation or factor.halo) and shards:
                yield index, shards

    def unclaimed(self, factor: int) -> str:
        """The reason why a factor cannot be tested with plain shards; empty if it can."""
        types = (*self.signature.operands, *self.signature.results)
        if any(np.prod(t.shape, dtype=np.float64) > _LARGEST for t in types):
            return "too large to run"
        if not self.signature.operands:
            return "has no operands"
        if self.signature.attribute("replica_groups") not in (None, (0,)):
            return "needs several replicas"
        combiner = self.rule.factors[factor].combiner
        if combiner and combiner not in _COMBINE:
            return f"no combiner {combiner}"
        if self._picks(factor) and self.signature.kind not in _INDICES:
            return "devices mask the indices that are not theirs"
        if self.signature.kind == "dynamic_update_slice":
            update = self.rule.operands[1]
            if not any(stack[0] == factor for stack in update):
                return "devices mask the part of the update that is not theirs"
        return ""

    @functools.cached_property
    def arguments(self) -> list[Any]:
        """Random operands of the whole op."""
        arguments = random_operands(self.signature.operands, self.seed)
        combiners = {factor.combiner for factor in self.rule.factors} & set(_COMBINE)
        if combiners and self.signature.kind in ("reduce", "scatter"):
            # Initial values and the target of a scatter must count once, but every shard has them.
            count = len(self.signature.results)
            starts = range(count, 2 * count) if self.signature.kind == "reduce" else range(count)
            for place in starts:
                start = arguments[place]
                arguments[place] = np.full_like(start, identity(min(combiners), start.dtype))
        return arguments

    def whole(self) -> tuple[str, tuple[TensorType, ...], tuple[TensorType, ...]]:
        """The text, operand types and result types of the whole op."""
        return self.text, self.signature.operands, self.signature.results

    def part(
        self, factor: int, shards: int
    ) -> tuple[str, tuple[TensorType, ...], tuple[TensorType, ...]]:
        """The text, operand types and result types of the op on one of ``shards`` shards."""

        def local(type_: TensorType, dims: tuple[tuple[int, ...], ...]) -> TensorType:
            shape = [
                size // shards if stack[0] == factor else size
                for size, stack in zip(type_.shape, dims, strict=True)
            ]
            return TensorType(tuple(shape), type_.dtype)

        operands = tuple(map(local, self.signature.operands, self.rule.operands))
        results = tuple(map(local, self.signature.results, self.rule.results))
        return self._resized(factor, shards), operands, results

    def split(self, factor: int, shards: int) -> list[list[Any]]:
        """The operands of each of ``shards`` shards."""
        columns = []
        for argument, dims in zip(self.arguments, self.rule.operands, strict=True):
            split = [argument] * shards
            for d, stack in enumerate(dims):
                if stack[0] == factor:
                    split = np.split(argument, shards, axis=d)
            columns.append(split)
        parts = list(map(list, zip(*columns, strict=True)))
        if self._picks(factor):
            for shard, part in enumerate(parts):
                place = self._index_place
                part[place] = self._shifted(factor, shards, shard)
        return parts

    def compare(self, factor: int, shards: int, pieces: list[list[Any]], want: list[Any]) -> str:
        """Compares the combined results of the shards with those of the whole op.

        :param pieces: the results of each shard.
        :param want: the results of the whole op.
        :returns: ``proven``, or a text that begins with ``wrong``.
        """
        types = (*self.signature.operands, *self.signature.results)
        limit = tolerance_of(type_.dtype for type_ in types)
        for index, (dims, whole) in enumerate(zip(self.rule.results, want, strict=True)):
            parts = [piece[index] for piece in pieces]
            if self._picks(factor) and self.rule.factors[factor].combiner:
                parts = [
                    np.where(self._mine(factor, shards, shard, dims), part, 0)
                    for shard, part in enumerate(parts)
                ]
            if not _close(self._together(parts, dims, factor), whole, limit):
                return f"wrong: result {index} in {shards} shards differs from the whole"
        return "proven"

    def _together(self, pieces: list[Any], dims: tuple[tuple[int, ...], ...], factor: int) -> Any:
        for d, stack in enumerate(dims):
            if stack[0] == factor:
                return np.concatenate(pieces, axis=d)
        combiner = self.rule.factors[factor].combiner
        return functools.reduce(_COMBINE[combiner], pieces) if combiner else pieces[0]

    # -- indices: each device reads or writes only its own elements ----------------------------

    def _picks(self, factor: int) -> bool:
        return self.rule.factors[factor].label.startswith("picked")

    @property
    def _index_place(self) -> int:
        return len(self.signature.results) if self.signature.kind == "scatter" else 1

    def _picked_dim(self, factor: int) -> int:
        return next(d for d, stack in enumerate(self.rule.operands[0]) if stack[0] == factor)

    def _component(self, factor: int) -> tuple[Any, ...] | None:
        """The part of the index array with the indices along the picked dimension."""
        name = _INDICES[self.signature.kind]
        if not name:
            return (Ellipsis,)
        moved = self.signature.attribute(name)
        vector = self.signature.attribute("index_vector_dim")
        assert isinstance(vector, int)
        order = list(moved) if isinstance(moved, tuple) else []
        if self._picked_dim(factor) not in order:
            return None
        if vector == len(self.signature.operands[self._index_place].shape):
            return (Ellipsis,)
        return (slice(None),) * vector + (order.index(self._picked_dim(factor)),)

    def _shifted(self, factor: int, shards: int, shard: int) -> Any:
        """The indices relative to the first element of a shard."""
        indices = np.array(self.arguments[self._index_place])
        where = self._component(factor)
        size = self.signature.operands[0].shape[self._picked_dim(factor)]
        if where is not None:
            # An index out of range is clamped, but a scatter ignores it.
            if self.signature.kind != "scatter":
                indices[where] = np.clip(indices[where], 0, size - 1)
            indices[where] -= shard * (size // shards)
        return indices

    def _mine(self, factor: int, shards: int, shard: int, dims: tuple[tuple[int, ...], ...]) -> Any:
        """The mask of the elements of a result that a shard reads from its own elements."""
        where = self._component(factor)
        if where is None:  # every index is 0
            return shard == 0
        places = self._shifted(factor, shards, shard)[where]
        size = self.signature.operands[0].shape[self._picked_dim(factor)]
        mine = (places >= 0) & (places < size // shards)
        factors = [stack[0] for stack in self.rule.operands[self._index_place]]
        if where != (Ellipsis,):
            del factors[where.index(next(w for w in where if isinstance(w, int)))]
        order = [factors.index(stack[0]) for stack in dims if stack[0] in factors]
        mine = mine.transpose(order)
        extents = iter(mine.shape)
        return mine.reshape([next(extents) if stack[0] in factors else 1 for stack in dims])

    def _resized(self, factor: int, shards: int) -> str:
        """The text of the op; attributes with sizes along the factor are divided by ``shards``."""
        text = self.text
        shape = self.signature.operands[0].shape
        split = [d for d, stack in enumerate(self.rule.operands[0]) if stack[0] == factor]
        for name in ("limit_indices", "slice_sizes"):
            attribute = re.search(rf"{name} = array<i64: ([\d, ]+)>", text)
            if attribute:
                numbers = [int(n) for n in attribute[1].split(",")]
                for d in split:
                    if numbers[d] == shape[d]:
                        numbers[d] //= shards
                text = text.replace(
                    attribute[0], f"{name} = array<i64: {', '.join(map(str, numbers))}>"
                )
        if self.signature.kind == "broadcast":
            sizes = [
                size // shards if stack[0] == factor else size
                for size, stack in zip(
                    self.signature.results[0].shape, self.rule.results[0], strict=True
                )
            ]
            new = ", ".join(map(str, sizes[: len(sizes) - len(shape)]))
            text = re.sub(r"broadcast_sizes = array<i64: [\d, ]+>",
                          f"broadcast_sizes = array<i64: {new}>", text)  # fmt: skip
        if self.rule.factors[factor].label == "group":
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
    if (
        not np.array_equal(a[~finite], e[~finite], equal_nan=True)
        or not np.isfinite(a[finite]).all()
    ):
        return False
    scale = float(np.abs(e[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(a[finite] - e[finite]).max(initial=0.0)) <= 10 * max(limit, 1e-6) * scale
