"""Instances of collectives that a module contains (rules/ops/communication.lp)."""

from __future__ import annotations

from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance
from toast.program import TensorType


def _groups(draw: Draw) -> tuple[int, str]:
    """The number of replicas in a group, and its attribute; several replicas cannot run here."""
    count = pieces.count(draw, 1, 2)
    members = ", ".join(map(str, range(count)))
    return count, f"replica_groups = dense<[[{members}]]> : tensor<1x{count}xi64>"


def _replicated(name: str) -> st.SearchStrategy[Instance]:
    """Collectives that keep the shape."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        type_ = TensorType(pieces.shape(draw), pieces.dtype(draw, ("f32", "f64")))
        _, groups = _groups(draw)
        if name == "collective_permute":
            groups = "source_target_pairs = dense<[[0, 0]]> : tensor<1x2xi64>"
        region = pieces.body(type_.dtype, "add") if name == "all_reduce" else ""
        return Instance(f"stablehlo.{name}", (type_,), (type_,), groups, region)

    return strategy()


def _resizing(name: str) -> st.SearchStrategy[Instance]:
    """Collectives that gather or scatter along dimensions."""

    @st.composite
    def strategy(draw: Draw) -> Instance:
        shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw, ("f32", "f64"))
        count, groups = _groups(draw)
        one, other = (pieces.count(draw, 0, len(shape) - 1) for _ in range(2))
        large = [size * (count if d == one else 1) for d, size in enumerate(shape)]
        moved = [size * (count if d == other else 1) for d, size in enumerate(shape)]
        small, big, turned = (TensorType(tuple(s), dtype) for s in (shape, large, moved))
        if name == "all_gather":
            return Instance(
                "stablehlo.all_gather", (small,), (big,), f"all_gather_dim = {one} : i64, {groups}"
            )
        if name == "reduce_scatter":
            return Instance(
                "stablehlo.reduce_scatter", (big,), (small,),
                f"scatter_dimension = {one} : i64, {groups}", pieces.body(dtype, "add"),
            )  # fmt: skip
        return Instance(
            "stablehlo.all_to_all", (big,), (turned,),
            f"split_dimension = {one} : i64, concat_dimension = {other} : i64, "
            f"split_count = {count} : i64, {groups}",
        )  # fmt: skip

    return strategy()


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "all_gather": _resizing("all_gather"),
    "all_reduce": _replicated("all_reduce"),
    "all_to_all": _resizing("all_to_all"),
    "collective_broadcast": _replicated("collective_broadcast"),
    "collective_permute": _replicated("collective_permute"),
    "cross_replica_sum": _replicated("cross-replica-sum"),
    "reduce_scatter": _resizing("reduce_scatter"),
}
