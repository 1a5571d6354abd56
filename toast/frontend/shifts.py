"""Writes rolls and shifts such that their dimension can be sharded in a device-local program.

``jnp.roll(x, 1)`` joins slices of 1 and n - 1 elements, which no mesh axis divides.  Here, each
piece becomes a pad that moves the whole dimension (it adds elements at one end, and cuts as many
off at the other), and a select chooses between them by position: all sizes are n.  Neighbours then
exchange the elements that move (GShard, 3.3.4), as for any pad.  The gradient of a roll pads such
slices, which is a pad of the whole dimension, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from toast.frontend import mlir
from toast.frontend import stablehlo as frontend
from toast.frontend.mlir import ModuleSource
from toast.program import Program

#: The largest share of the dimension for a piece that is no part of a tensor of this size.
_FEW = 0.125


class _Piece(NamedTuple):
    """A piece of a joined dimension."""

    value: Any
    #: Its first position, and the element of ``value`` that is there.
    position: int
    first: int
    length: int


def with_shifts(program: Program) -> Program:
    """``program`` with its rolls and shifts written as pads, or itself if it has none."""
    if not isinstance(program.source, ModuleSource):
        return program
    if not _shifting_ops(program, program.source):
        return program
    source: ModuleSource = program.source.copied()
    module = source.module
    with module.context, ir.Location.unknown():
        for op, text in program.annotations.items():
            mlir.mark(source.operations[op], annotation=text)
        source.mark_names(program.labels, program.makers)
        for number in _shifting_ops(program, source):
            operation = source.operations[number]
            is_pad = program.kind(number) == "pad"
            with operation.location, ir.InsertionPoint(operation):
                moved = _repadded(operation) if is_pad else _joined(operation, _pieces(operation))
            operation.results[0].replace_all_uses_with(moved)
            _erase_unused([operation, *(operand.owner for operand in operation.operands)])
        function = mlir.main_function(module, program.name)
        mlir.drop_dead_ops(function)
    result = frontend.flattened(
        module, function, name=program.name, file=source.file, calling=source.calling
    )
    whole = program.source.whole or program.source
    return dataclasses.replace(
        result, arguments=program.arguments, results=program.results, platform=program.platform,
        padding=program.padding, whole_digest=program.origin_digest, memory=program.memory,
        source=dataclasses.replace(result.source, here=program.source.here, whole=whole),
    )  # fmt: skip


def _erase_unused(operations: list[Any]) -> None:
    """Erases ops whose results have no uses: an op first, and then those of its operands."""
    for operation in dict.fromkeys(operations):
        if isinstance(operation, ir.Block):
            continue
        if not any(True for result in operation.results for _ in result.uses):
            operation.erase()


def _shifting_ops(program: Program, source: ModuleSource) -> list[int]:
    """The ops that join or pad a part of a tensor to the same size."""
    tests = {"concatenate": _pieces, "pad": _padded_part}
    found = []
    for number in range(len(program.ops)):
        test, operation = tests.get(program.kind(number)), source.operations[number]
        if test is not None and operation is not None and test(operation):
            found.append(number)
    return found


def _padded_part(operation: Any) -> list[_Piece]:
    """The slice that a pad moves within its dimension; none if it does anything else."""
    low, high, between = _edges(operation)
    changed = [d for d, edges in enumerate(zip(low, high, strict=True)) if any(edges)]
    if len(changed) != 1 or any(between):
        return []
    (d,) = changed
    size = int(operation.results[0].type.shape[d])
    piece = _part_of(operation.operands[0], d, size, low[d])
    if piece is None or low[d] < 0 or high[d] < 0:
        return []
    # What is beyond the slice must be beyond the tensor, or cut off.
    before = piece.first == 0 or piece.position == 0
    behind = size in (piece.first + piece.length, piece.position + piece.length)
    return [piece] if before and behind else []


def _repadded(operation: Any) -> Any:
    """The pad of a whole dimension instead of a slice of it."""
    (piece,) = _padded_part(operation)
    low, high, between = _edges(operation)
    distance = piece.position - piece.first
    low, high = (
        [sign * distance if edges else 0 for edges in map(any, zip(low, high, strict=True))]
        for sign in (1, -1)
    )
    return stablehlo.pad(piece.value, operation.operands[1], low, high, between)


def _edges(operation: Any) -> list[list[int]]:
    """What a pad adds before, behind and between the elements of each dimension."""
    return [
        [int(n) for n in ir.DenseI64ArrayAttr(operation.attributes[name])]
        for name in ("edge_padding_low", "edge_padding_high", "interior_padding")
    ]


def _pieces(operation: Any) -> list[_Piece]:
    """The pieces of a concatenate; none if it is no roll or shift."""
    d = ir.IntegerAttr(operation.attributes["dimension"]).value
    (result,) = operation.results
    size, position = int(result.type.shape[d]), 0
    pieces, parts = [], 0
    for operand in operation.operands:
        length = int(operand.type.shape[d])
        piece = _part_of(operand, d, size, position)
        parts += piece is not None
        if piece is None and length > _FEW * size:
            return []
        pieces.append(piece or _Piece(operand, position, 0, length))
        position += length
    return pieces if parts and len(pieces) > 1 else []


def _part_of(operand: Any, d: int, size: int, position: int) -> _Piece | None:
    """The piece at ``position``, if it is a slice of ``size`` elements along ``d`` alone."""
    owner = getattr(operand.owner, "operation", None)
    if owner is None or owner.name != "stablehlo.slice":
        return None
    value = owner.operands[0]
    starts, limits, strides = (
        [int(n) for n in ir.DenseI64ArrayAttr(owner.attributes[name])]
        for name in ("start_indices", "limit_indices", "strides")
    )
    shape = [int(n) for n in value.type.shape]
    whole = all(
        e == d or (starts[e] == 0 and limits[e] == n and strides[e] == 1)
        for e, n in enumerate(shape)
    )
    if not whole or shape[d] != size or strides[d] != 1:
        return None
    return _Piece(value, position, starts[d], limits[d] - starts[d])


def _joined(operation: Any, pieces: list[_Piece]) -> Any:
    """The joined pieces: each at its position in the whole dimension, and chosen by position."""
    d = ir.IntegerAttr(operation.attributes["dimension"]).value
    type_ = operation.results[0].type
    shape, element = list(type_.shape), type_.element_type
    zero = mlir.splat(0, [], element)
    index = ir.RankedTensorType.get(shape, ir.IntegerType.get_signless(32))
    at = stablehlo.iota(index, d)
    joined = None
    for piece in pieces:
        low, high = [0] * len(shape), [0] * len(shape)
        low[d] = piece.position - piece.first
        high[d] = shape[d] - low[d] - int(piece.value.type.shape[d])
        value = piece.value
        if low[d] or high[d]:
            value = stablehlo.pad(value, zero, low, high, [0] * len(shape))
        if joined is None:
            joined = value
            continue
        begin = mlir.splat(piece.position, shape, index.element_type)
        behind = stablehlo.compare(at, begin, stablehlo.ComparisonDirectionAttr.get("GE"))
        joined = stablehlo.select(behind, value, joined)
    return joined


__all__ = ["with_shifts"]
