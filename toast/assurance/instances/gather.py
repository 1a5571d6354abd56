"""Instances of gather, scatter and torch_index_select (rules/ops/gather.lp)."""

from __future__ import annotations

import dataclasses

from hypothesis import assume
from hypothesis import strategies as st

from toast.assurance.instances import pieces
from toast.assurance.instances.pieces import Draw, Instance, Shape
from toast.program import TensorType


@dataclasses.dataclass(frozen=True)
class _Indexed:
    """The dimension numbers and shapes of a gather, or of a scatter, its transpose."""

    target: Shape
    indices: Shape
    moved: Shape
    window_dims: Shape
    collapsed: Shape
    batching: Shape
    index_batching: Shape
    index_map: Shape
    vector_dim: int
    sizes: Shape


def _indexed(draw: Draw) -> _Indexed:
    target = pieces.shape(draw, 1, 4)
    roles = [draw(st.sampled_from(["window", "window", "collapsed", "batching"])) for _ in target]
    batching = [d for d, role in enumerate(roles) if role == "batching"]
    collapsed = [d for d, role in enumerate(roles) if role == "collapsed"]
    windows = [d for d, role in enumerate(roles) if role == "window"]
    batching_order = draw(st.permutations(batching)) if batching else []
    # The batch: dimensions that are paired with those of the target, and others, in any order.
    batch = [("with", d) for d in batching_order]
    batch += [("free", pieces.size(draw)) for _ in range(pieces.count(draw, 0, 2))]
    batch = list(draw(st.permutations(batch))) if batch else []
    batch_sizes = [target[n] if role == "with" else n for role, n in batch]
    mapped = [d for d in (*collapsed, *windows) if d in collapsed or pieces.flag(draw)]
    index_map = tuple(draw(st.permutations(mapped))) if mapped else ()
    vector = pieces.count(draw, 0, len(batch))
    indices = list(batch_sizes)
    if len(index_map) == 1 and pieces.flag(draw):
        vector = len(batch)  # implied: each index is a scalar
    else:
        indices.insert(vector, len(index_map))
    places = [i + (i >= vector and len(indices) > len(batch)) for i in range(len(batch))]
    where = {d: places[batch.index(("with", d))] for d in batching_order}
    # A window must cover the dimensions without an index.
    sizes = tuple(
        1 if d not in windows else pieces.count(draw, 1, size) if pieces.flag(draw) else size
        for d, size in enumerate(target)
    )
    rank = len(batch) + len(windows)
    window_dims = tuple(sorted(pieces.order(draw, rank)[: len(windows)]))
    moved, left, right = [], iter(batch_sizes), iter(windows)
    for place in range(rank):
        moved.append(sizes[next(right)] if place in window_dims else next(left))
    return _Indexed(
        target, tuple(indices), tuple(moved), window_dims, tuple(collapsed), tuple(batching_order),
        tuple(where[d] for d in batching_order), index_map, vector, sizes,
    )  # fmt: skip


def _by_target(batching: Shape, index_batching: Shape) -> tuple[Shape, Shape]:
    pairs = sorted(zip(batching, index_batching, strict=True))
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


@st.composite
def _gather(draw: Draw) -> Instance:
    i, dtype = _indexed(draw), pieces.dtype(draw)
    batching, index_batching = _by_target(i.batching, i.index_batching)
    numbers = (
        f"offset_dims = {pieces.bracketed(i.window_dims)}, "
        f"collapsed_slice_dims = {pieces.bracketed(i.collapsed)}, "
        f"operand_batching_dims = {pieces.bracketed(batching)}, "
        f"start_indices_batching_dims = {pieces.bracketed(index_batching)}, "
        f"start_index_map = {pieces.bracketed(i.index_map)}, index_vector_dim = {i.vector_dim}"
    )
    return Instance(
        "stablehlo.gather", (TensorType(i.target, dtype), TensorType(i.indices, "i32")),
        (TensorType(i.moved, dtype),),
        f"dimension_numbers = #stablehlo.gather<{numbers}>, slice_sizes = {pieces.array(i.sizes)}, "
        "indices_are_sorted = false",
    )  # fmt: skip


@st.composite
def _scatter(draw: Draw) -> Instance:
    i, dtype = _indexed(draw), pieces.dtype(draw, ("f32", "f64"))
    # Without an index vector, XLA (jaxlib 0.10.2, CPU) keeps the last update of a single element.
    assume(i.index_map)
    batching, index_batching = _by_target(i.batching, i.index_batching)
    count = pieces.count(draw, 1, 2)
    numbers = (
        f"update_window_dims = {pieces.bracketed(i.window_dims)}, "
        f"inserted_window_dims = {pieces.bracketed(i.collapsed)}, "
        f"input_batching_dims = {pieces.bracketed(batching)}, "
        f"scatter_indices_batching_dims = {pieces.bracketed(index_batching)}, "
        f"scatter_dims_to_operand_dims = {pieces.bracketed(i.index_map)}, "
        f"index_vector_dim = {i.vector_dim}"
    )
    target, moved = TensorType(i.target, dtype), TensorType(i.moved, dtype)
    combiner = draw(st.sampled_from(pieces.COMBINERS))
    return Instance(
        "stablehlo.scatter",
        (*(target,) * count, TensorType(i.indices, "i32"), *(moved,) * count), (target,) * count,
        f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, "
        "indices_are_sorted = false, unique_indices = false",
        pieces.body(dtype, combiner, count),
    )  # fmt: skip


@st.composite
def _torch_index_select(draw: Draw) -> Instance:
    shape, dtype = pieces.shape(draw, 1), pieces.dtype(draw)
    dim = pieces.count(draw, 0, len(shape) - 1)
    batch = pieces.count(draw, 0, dim)
    index = (*shape[:batch], *pieces.shape(draw, 0, 2))
    result_shape = (*shape[:dim], *index[batch:], *shape[dim + 1 :])
    return Instance(
        "stablehlo.torch_index_select", (TensorType(shape, dtype), TensorType(index, "i32")),
        (TensorType(result_shape, dtype),), f"dim = {dim} : i64, batch_dims = {batch} : i64",
    )  # fmt: skip


#: The strategy of each op kind.
STRATEGIES: dict[str, st.SearchStrategy[Instance]] = {
    "gather": _gather(),
    "scatter": _scatter(),
    "torch_index_select": _torch_index_select(),
}
