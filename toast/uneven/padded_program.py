"""Pads the dimensions of a program that the axes of a mesh do not divide (GShard, 3.3.1).

The result is a program of its own: arguments and results have their shapes, as JAX shards only
whole shards of these; values between them have padded shapes.  It is analyzed, searched, priced and
lowered as any other, so its prices include the padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from toast.analysis import Analysis
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend import stablehlo as frontend
from toast.frontend.mlir import ModuleSource
from toast.hardware import Mesh
from toast.program import PaddedDimension, Program
from toast.uneven.padded_forms import (
    can_be_padded,
    cut,
    identity,
    masked,
    moved_pad,
    moved_slice,
    padded,
    resize_attributes,
)
from toast.uneven.padded_sizes import (
    UnevenDimension,
    moving_dimensions,
    recorded_dimensions,
    uneven_dimensions,
)

Shape = tuple[int, ...]

#: The attribute of operations that are no ops: they name residuals in a survey.
_NAMING = "toast_naming"


@dataclasses.dataclass(frozen=True)
class PaddedProgram:
    """A program with padded dimensions."""

    program: Program
    #: The dimensions of the program without padding, those of :attr:`Program.padding`.
    dimensions: tuple[UnevenDimension, ...]
    #: The op of the padded program for each op of the program without padding; -1 for none.
    ops: tuple[int, ...]


def padded_program(
    analysis: Analysis,
    mesh: Mesh,
    most_added: float,
    *,
    only: Sequence[PaddedDimension] | None = None,
) -> PaddedProgram | None:
    """The program with padded dimensions.

    :param analysis: the analysis of the program.
    :param mesh: the mesh whose axes divide the padded sizes.
    :param most_added: the largest share of elements that padding may add to a dimension.
    :param only: the dimensions to pad, and to which size, whatever the mesh and the share.
    :returns: the program; ``None`` if padding changes no dimension.
    :raises toast.errors.PlanError: if the program has no module, or code for single devices.
    """
    program, source = analysis.program, analysis.program.source
    if not isinstance(source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to pad")
    if any(signature.kind.startswith("manual_") for signature in program.signatures):
        raise PlanError(
            f"{program.name} has shard_map regions, whose shards have fixed sizes; it cannot be "
            "padded"
        )
    if only is None:
        dimensions = uneven_dimensions(analysis, mesh, most_added)
    else:
        dimensions = recorded_dimensions(analysis, only)
    sizes = analysis.names.divisor.copy()
    for dimension in dimensions:
        sizes[dimension.names] = dimension.record.padded
    if (sizes == analysis.names.divisor).all():
        return None
    padding = _Padding(analysis, sizes.tolist(), dimensions)
    module = padding.run()
    if not padding.changes:
        return None
    with module.context:
        function = mlir.main_function(module, program.name)
        mlir.drop_dead_ops(function)
    result = frontend.flattened(
        module, function, name=program.name, file=source.file, calling=source.calling
    )
    dimensions = tuple(
        dimension for dimension in dimensions
        if (dimension.record.elements, dimension.record.padded) in padding.changes
    )  # fmt: skip
    result = dataclasses.replace(
        result, arguments=program.arguments, results=program.results, platform=program.platform,
        padding=tuple(dimension.record for dimension in dimensions),
        whole_digest=program.origin_digest, memory=program.memory,
        source=dataclasses.replace(result.source, here=source.here, whole=source.whole or source),
    )  # fmt: skip
    return PaddedProgram(result, dimensions, _same_ops(padding.operations, result))


def _same_ops(operations: Sequence[Any], padded: Program) -> tuple[int, ...]:
    """The op of a padded program for each of the program's ``operations``; -1 for none."""
    numbers: dict[Any, int] = {}
    for number, operation in enumerate(padded.source.operations):
        if operation is not None:
            numbers[operation] = -1 if operation in numbers else number
    return tuple(
        numbers.get(operation, -1) if operation is not None and _is_left(operation) else -1
        for operation in operations
    )


def _is_left(operation: Any) -> bool:
    """Whether an operation has not been erased."""
    try:
        return bool(operation.name)
    except RuntimeError:
        return False


class _Padding:
    """The padding of one program."""

    def __init__(
        self, analysis: Analysis, sizes: list[int], dimensions: Sequence[UnevenDimension]
    ) -> None:
        self._analysis, self._program = analysis, analysis.program
        self._sizes = sizes
        #: The padded size of each color and size.
        self._larger_sizes = {
            (int(analysis.color[np.argmax(each.names)]), each.record.elements): each.record.padded
            for each in dimensions
        }
        self._source: ModuleSource = analysis.program.source.copied()
        self._module = self._source.module
        #: Values with another shape, by value, shape and block: uses share them.
        self._copies: dict[tuple[Any, Shape, Any], Any] = {}
        #: The padded sizes: from which, and to which.
        self.changes: set[tuple[int, int]] = set()

    @property
    def operations(self) -> tuple[Any, ...]:
        """The operation of each op of the program without padding."""
        return self._source.operations

    def run(self) -> Any:
        """Pads the whole program; returns the module."""
        program = self._program
        with self._module.context, ir.Location.unknown():
            for op, text in program.annotations.items():
                mlir.mark(self._source.operations[op], annotation=text)
            self._source.mark_names(program.labels, program.makers)
            for operation, _, _ in self._source.names:
                operation.attributes[_NAMING] = ir.UnitAttr.get()
            for operation, values in self._source.results:
                if operation.name in mlir.WITH_REGIONS:
                    self._set_types_of_region(operation, values)
            for op in range(len(program.ops)):
                kind = program.kind(op)
                if kind == "return":
                    self._use(op, 0, program.values[program.ops[op].operands[0]].type.shape)
                elif kind == "argument":
                    continue
                elif kind in mlir.OF_REGIONS:
                    (value,) = program.ops[op].results
                    for index in range(len(program.ops[op].operands)):
                        self._use(op, index, self._stored(value))
                else:
                    self._pad(op)
            self._cut_captured()
            self._verify()
        return self._module

    def _set_type(self, value: Any, type_: ir.Type) -> None:
        """Sets the type of a value, and of the results of operations that name it."""
        if value.type != type_:
            value.set_type(type_)
        for use in value.uses:
            if _NAMING in use.owner.attributes:
                self._set_type(use.owner.results[0], type_)

    def _stored(self, value: int) -> Shape:
        """The shape of a value where it is defined."""
        names, program = self._analysis.names, self._program
        shape = program.values[value].type.shape
        op = int(names.value_op[value])
        kind = program.kind(op)
        if kind == "argument":
            return shape
        if kind not in mlir.OF_REGIONS:
            if moving := self._moving(op):
                return self._moved_shapes(op, moving)[1]
            rule = self._analysis.rules[program.ops[op].signature]
            dims = rule.results[program.ops[op].results.index(value)]
            return _padded_shape(self._larger(op), dims, shape)
        first = int(names.value_dim[value])
        named = names.def_name[first : first + len(shape)].tolist()
        return tuple(
            self._sizes[name] if names.divisor[name] == size else size
            for name, size in zip(named, shape, strict=True)
        )

    def _larger(self, op: int) -> dict[int, int]:
        """The padded sizes of the factors of an op that are padded."""
        number = self._program.ops[op].signature
        signature, rule = self._program.signatures[number], self._analysis.rules[number]
        first = int(self._analysis.names.first_name[op])
        return {
            n: self._sizes[first + n]
            for n, factor in enumerate(rule.factors)
            if self._sizes[first + n] != factor.divisor and can_be_padded(signature, rule, n)
        }

    def _set_types_of_region(self, operation: Any, values: Any) -> None:
        for index, value in enumerate(values):
            type_, shape = self._program.values[value].type, self._stored(value)
            if shape == type_.shape or type_.dtype == "token":
                continue
            self.changes |= {
                pair for pair in zip(type_.shape, shape, strict=True) if pair[0] != pair[1]
            }
            local = mlir.tensor_type(shape, type_.dtype)
            self._set_type(operation.results[index], local)
            if operation.name == "stablehlo.while":
                for region in operation.regions:
                    self._set_type(region.blocks[0].arguments[index], local)
                self._cut_for_condition(operation, index, type_.shape)

    def _cut_for_condition(self, loop: Any, index: int, shape: Shape) -> None:
        """Cuts the padding off what the condition of a loop uses: its elements are arbitrary."""
        (block,) = loop.regions[0].blocks
        uses = [(use.owner, use.operand_number) for use in block.arguments[index].uses]
        if uses:
            with loop.location, ir.InsertionPoint.at_block_begin(block):
                whole = cut(block.arguments[index], shape)
            for owner, place in uses:
                owner.operands[place] = whole

    def _cut_captured(self) -> None:
        """The same for what a condition uses from outside of its loop."""
        for block, _, reads in self._source.conditions():
            for value, of_value in reads.items():
                shape = self._program.values[value].type.shape
                operand = of_value[0].operation.operands[of_value[0].place]
                if not isinstance(operand.type, ir.RankedTensorType):
                    continue
                if list(operand.type.shape) != [*shape]:
                    with block.owner.location, ir.InsertionPoint.at_block_begin(block):
                        whole = cut(operand, shape)
                    for read in of_value:
                        read.operation.operands[read.place] = whole

    def _use(self, op: int, index: int, shape: Shape) -> None:
        """Gives an operand a shape: pads it, or cuts the padding off."""
        operation, place = self._source.operand_sites[op, index]
        value = operation.operands[place]
        if not isinstance(value.type, ir.RankedTensorType) or tuple(value.type.shape) == shape:
            return
        key = value, shape, operation.block
        if key not in self._copies:
            smaller = tuple(map(min, value.type.shape, shape))
            with operation.location, ir.InsertionPoint(operation):
                self._copies[key] = padded(cut(value, smaller), shape)
        operation.operands[place] = self._copies[key]

    def _pad(self, op: int) -> None:
        """Pads an op along the factors for which it has a padded form."""
        program, operation = self._program, self._source.operations[op]
        number = program.ops[op].signature
        signature, rule = program.signatures[number], self._analysis.rules[number]
        if moving := self._moving(op):
            self._move(op, moving)
            return
        larger = self._larger(op)
        for index, (dims, type_) in enumerate(zip(rule.operands, signature.operands, strict=True)):
            self._use(op, index, _padded_shape(larger, dims, type_.shape))
        if not larger:
            return
        self.changes |= {(rule.factors[n].size, size) for n, size in larger.items()}
        for n in larger:
            if combiner := rule.factors[n].combiner:
                self._mask(operation, op, n, combiner)
        if signature.operands:
            dims, type_ = rule.operands[0], signature.operands[0]
            resize_attributes(
                operation, signature.kind, type_.shape, _padded_shape(larger, dims, type_.shape)
            )
        self._set_results(op, [
            _padded_shape(larger, dims, type_.shape)
            for dims, type_ in zip(rule.results, signature.results, strict=True)
        ])  # fmt: skip

    # -- slices and pads whose dimensions have padding --------------------------------------------

    def _moving(self, op: int) -> tuple[int, ...]:
        """The dimensions of a slice or pad that change their size, with padding before or after."""
        signature = self._program.signatures[self._program.ops[op].signature]
        return tuple(
            d for d in moving_dimensions(self._analysis, op)
            if any(
                (self._color(op, d), tensors[0].shape[d]) in self._larger_sizes
                for tensors in (signature.operands, signature.results)
            )
        )  # fmt: skip

    def _color(self, op: int, d: int) -> int:
        """The color of a dimension of an op's result."""
        (factor, *_) = self._analysis.rules[self._program.ops[op].signature].results[0][d]
        return int(self._analysis.color[int(self._analysis.names.first_name[op]) + factor])

    def _moved_shapes(self, op: int, moving: Sequence[int]) -> tuple[Shape, Shape]:
        """The padded shapes of the operand and of the result of a slice or pad."""
        number, larger = self._program.ops[op].signature, self._larger(op)
        signature, rule = self._program.signatures[number], self._analysis.rules[number]
        ends = (
            (rule.operands[0], signature.operands[0].shape),
            (rule.results[0], signature.results[0].shape),
        )
        before, after = (
            tuple(
                self._larger_sizes.get((self._color(op, d), size), size) if d in moving else other
                for d, (size, other) in enumerate(
                    zip(shape, _padded_shape(larger, dims, shape), strict=True)
                )
            )
            for dims, shape in ends
        )
        return before, after

    def _move(self, op: int, moving: Sequence[int]) -> None:
        """Writes a slice or pad of dimensions with padding as one of the padded sizes."""
        program, operation = self._program, self._source.operations[op]
        signature = program.signatures[program.ops[op].signature]
        whole, (before, after) = signature.operands[0].shape, self._moved_shapes(op, moving)
        self._use(op, 0, before)
        self.changes |= {
            pair for pair in zip(signature.results[0].shape, after, strict=True)
            if pair[0] != pair[1]
        }  # fmt: skip
        _, place = self._source.operand_sites[op, 0]
        with operation.location, ir.InsertionPoint(operation):
            value = operation.operands[place]
            new = (
                moved_slice(operation, value, whole, after, moving)
                if signature.kind == "slice"
                else moved_pad(operation, value, whole, after, moving)
            )
        operation.results[0].replace_all_uses_with(new)
        self._set_type(new, new.type)
        operation.erase()

    def _set_results(self, op: int, shapes: list[Shape]) -> None:
        operation = self._source.operations[op]
        if operation.name == "stablehlo.constant":
            (result,), (shape,) = operation.results, shapes
            if mlir.resize_splat(operation, shape):
                self._set_type(
                    result, ir.RankedTensorType.get(list(shape), result.type.element_type)
                )
                return
            uses = [(use.owner, use.operand_number) for use in result.uses]
            with operation.location, ir.InsertionPoint.after(operation):
                large = padded(result, shape)
            for owner, place in uses:
                owner.operands[place] = large
            self._set_type(large, large.type)
            return
        for result, shape in zip(operation.results, shapes, strict=True):
            if tuple(result.type.shape) != shape:
                self._set_type(
                    result, ir.RankedTensorType.get(list(shape), result.type.element_type)
                )

    def _mask(self, operation: Any, op: int, number: int, combiner: str) -> None:
        """Puts the identity of a combiner into the padding of the operands that it combines."""
        rule = self._analysis.rules[self._program.ops[op].signature]
        for index, dims in enumerate(rule.operands):
            for d, factors in enumerate(dims):
                if number not in factors:
                    continue
                _, place = self._source.operand_sites[op, index]
                value = operation.operands[place]
                element = value.type.element_type
                fill = identity(combiner, element)
                if fill is None:
                    raise PlanError(
                        f"{self._program.describe(op)} has no padded form for {element}"
                    )
                if (
                    fill == 0
                    and isinstance(value.owner, ir.Operation | ir.OpView)
                    and (value.owner.name == "stablehlo.pad" and value in self._copies.values())
                ):
                    continue  # zeros already
                size = rule.factors[number].size
                with operation.location, ir.InsertionPoint(operation):
                    operation.operands[place] = masked(value, d, size, fill)

    def _verify(self) -> None:
        for operation in mlir.walk(self._module.body):
            if _NAMING in operation.attributes:
                del operation.attributes[_NAMING]
        try:
            self._module.operation.verify()
        except ir.MLIRError as error:
            text = " ".join(str(error).split())[:300]
            raise PlanError(
                f"{self._program.name}: the padded program is not valid: {text}"
            ) from None


def _padded_shape(larger: Mapping[int, int], dims: Sequence[Sequence[int]], shape: Shape) -> Shape:
    """A shape with the padded sizes of factors; ``dims`` has the factors of each dimension."""
    return tuple(
        larger.get(factors[0], size) if len(factors) == 1 else size
        for factors, size in zip(dims, shape, strict=True)
    )


__all__ = ["PaddedProgram", "padded_program"]
