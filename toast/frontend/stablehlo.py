"""StableHLO to :class:`Program`: text, bytecode or a portable artifact."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from toast.errors import TargetError
from toast.frontend import mlir
from toast.frontend.program import Attribute, Builder, Program, TensorType


def from_file(path: str | pathlib.Path) -> Program:
    """Read a ``.mlir`` file (text, bytecode or portable artifact).

    Raises :class:`toast.errors.TargetError` when the file is missing or not StableHLO.
    """
    path = pathlib.Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TargetError(f"{path}: cannot read: {error.strerror}; check the path") from None
    return from_module(mlir.parse(data, str(path)), name=path.stem, file=str(path))


def from_module(module: ir.Module, *, name: str, file: str = "", calling: Any = None) -> Program:
    """The program of a parsed module; ``module`` is inlined in place and kept as its source.

    ``file`` is the one that it was read from.
    """
    origin = file or name
    with module.context:
        mlir.inline_calls(module, origin)
        function = mlir.main_function(module, origin)
        mlir.drop_dead_ops(function)
        return _Reader(module, origin, file).read(function, name, calling)


#: Custom calls with which GSPMD and Shardy enter and leave code written for one device.
_MANUAL_CALLS = frozenset({
    "SPMDFullToShardShape", "SPMDShardToFullShape",
    "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape",
})  # fmt: skip


class _Reader:
    """Flattens a function: bodies of loops and branches stand in line.

    A value that a loop carries has one sharding at its start, in the body, at the end of the body
    and after the loop.  It becomes an op ``carry`` before the body (initial value -> body argument)
    and an op ``yield`` after it (new value -> result), tied to one another.  Values that the body
    hands on unchanged are no new values.  Each result of ``case`` and ``if`` becomes an op ``join``
    of the branches' values; each value of an ``optimization_barrier`` one of its own.  An element
    of a ``tuple`` is the value that went in.
    """

    def __init__(self, module: ir.Module, origin: str, file: str) -> None:
        self._module, self._origin, self._file = module, origin, file
        self._builder = Builder()
        self._type, self._attributes = mlir.TypeReader(), mlir.AttributeReader()
        self._numbers: dict[Any, int] = {}
        self._tuples: dict[Any, list[Any]] = {}
        self._operations: list[Any] = []
        self._sites: dict[tuple[int, int], tuple[Any, int]] = {}
        self._results: list[tuple[Any, tuple[int, ...]]] = []
        self._labels: dict[int, str] = {}
        self._constraints: dict[int, tuple[tuple[str, ...] | None, ...]] = {}

    def read(self, function: Any, name: str, calling: Any) -> Program:
        block = function.operation.regions[0].blocks[0]
        arguments = []
        for index, argument in enumerate(block.arguments):
            try:
                type_ = self._type(argument.type)
            except TargetError as error:
                raise TargetError(f"{self._origin}: argument {index}: {error}") from None
            (self._numbers[argument],) = self._add(None, "argument", (), (type_,))
            place = argument.location
            arguments.append(
                place.name_str if mlir.is_location(place, "NameLoc") else f"arg{index}"
            )
        returned = self._block(block, 1)
        for index, value in enumerate(returned.operands):
            if mlir.is_tuple(value):
                raise TargetError(
                    f"{self._at(returned)}: result {index} is a tuple; return its elements"
                )
            self._sites[self._builder.next_op, 0] = (returned, index)
            self._add(None, "return", (self._numbers[value],), ())
        count = len(returned.operands)
        aliases = [-1] * count
        attributes = function.operation.attributes
        if "arg_attrs" in attributes:
            for index, entry in enumerate(attributes["arg_attrs"]):
                if "tf.aliasing_output" in entry:
                    aliases[entry["tf.aliasing_output"].value] = index
                if demanded := mlir.argument_constraint(entry):
                    self._constraints[index] = demanded
        results = [f"result[{index}]" for index in range(count)]
        if "res_attrs" in attributes:
            for index, entry in enumerate(attributes["res_attrs"]):
                if "jax.result_info" in entry:
                    results[index] = entry["jax.result_info"].value or "result"
        self._constrain_arguments(block)
        source = mlir.Source(
            self._module, tuple(self._operations), self._sites, tuple(self._results), calling,
            self._file,
        )  # fmt: skip
        return self._builder.build(
            name, arguments, results, aliases, labels=self._labels,
            constraints=self._constraints, source=source,
        )  # fmt: skip

    def _at(self, operation: Any) -> str:
        """Where an operation stands, for errors."""
        place = mlir.location(operation, self._file)
        in_file = place.file and place.file == self._file
        return str(place) if in_file else f"{self._origin}: {place}"

    def _constrain_arguments(self, block: Any) -> None:
        """An argument that is used through one sharding constraint only has that sharding.

        This is what ``in_shardings`` of a ``jax.jit`` inside become.
        """
        for index, argument in enumerate(block.arguments):
            uses = {mlir.constraint(use.owner) for use in argument.uses}
            if len(uses) == 1 and (demanded := uses.pop()):
                self._constraints.setdefault(index, demanded)

    def _add(
        self,
        operation: Any,
        kind: str,
        operands: Sequence[int],
        results: Sequence[TensorType],
        attributes: tuple[tuple[str, Attribute], ...] = (),
        repeats: int = 1,
    ) -> tuple[int, ...]:
        self._operations.append(operation)
        return self._builder.add(kind, operands, results, attributes, repeats=repeats)

    def _block(self, block: Any, repeats: int) -> Any:
        """Read the ops of a block, each running ``repeats`` times; returns its terminator."""
        *body, terminator = [op.operation for op in block.operations]
        special = {
            "stablehlo.while": self._while,
            "stablehlo.case": self._branches,
            "stablehlo.if": self._branches,
            "stablehlo.optimization_barrier": self._barrier,
            "stablehlo.tuple": self._tuple,
            "stablehlo.get_tuple_element": self._element,
            "sdy.named_computation": self._named,
            "sdy.manual_computation": self._manual,
        }
        for operation in body:
            special.get(operation.name, self._op)(operation, repeats)
        return terminator

    def _types(self, operation: Any) -> list[TensorType]:
        try:
            return [self._type(result.type) for result in operation.results]
        except TargetError as error:
            raise TargetError(f"{self._at(operation)}: {error}") from None

    def _define(self, operation: Any, values: Sequence[int]) -> None:
        self._numbers.update(zip(operation.results, values, strict=True))
        if values:
            self._results.append((operation, tuple(values)))

    def _op(self, operation: Any, repeats: int) -> None:
        if mlir.call_target(operation) in _MANUAL_CALLS:
            self._manual(operation, repeats)
        number = self._builder.next_op
        operands = [self._numbers[value] for value in operation.operands]
        for index in range(len(operands)):
            self._sites[number, index] = (operation, index)
        called, demanded = mlir.take_name(operation), mlir.constraint(operation)
        if called:
            self._labels[self._builder.next_value] = called
        if demanded:
            self._constraints[number] = demanded
        attributes = self._attributes(operation)
        types = self._types(operation)
        kind = mlir.kind(operation)
        self._define(operation, self._add(operation, kind, operands, types, attributes, repeats))

    def _tuple(self, operation: Any, repeats: int) -> None:
        self._tuples[operation.results[0]] = list(operation.operands)
        if any(
            use.owner.name != "stablehlo.get_tuple_element" for use in operation.results[0].uses
        ):
            self._op(operation, repeats)

    def _element(self, operation: Any, repeats: int) -> None:
        parts = self._tuples.get(operation.operands[0])
        if parts is None:  # of a tuple that some other op made
            self._op(operation, repeats)
            return
        part, result = parts[operation.attributes["index"].value], operation.results[0]
        if part in self._tuples:
            self._tuples[result] = self._tuples[part]
        if part in self._numbers:
            self._numbers[result] = self._numbers[part]

    def _named(self, operation: Any, repeats: int) -> None:
        body = operation.regions[0].blocks[0]
        for argument, operand in zip(body.arguments, operation.operands, strict=True):
            self._numbers[argument] = self._numbers[operand]
        end = self._block(body, repeats)
        for result, value in zip(operation.results, end.operands, strict=True):
            self._numbers[result] = self._numbers[value]

    def _manual(self, operation: Any, _repeats: int) -> None:
        raise TargetError(
            f"{self._at(operation)}: shard_map fixes its own mesh, which a "
            "plan replaces; plan the function without it"
        )

    def _barrier(self, operation: Any, repeats: int) -> None:
        values: list[int] = []
        for index, (operand, type_) in enumerate(
            zip(operation.operands, self._types(operation), strict=True)
        ):
            self._sites[self._builder.next_op, 0] = (operation, index)
            used = (self._numbers[operand],)
            values += self._add(operation, mlir.kind(operation), used, (type_,), (), repeats)
        self._define(operation, values)

    def _branches(self, operation: Any, repeats: int) -> None:
        ends = [self._block(region.blocks[0], repeats) for region in operation.regions]
        values: list[int] = []
        for index, type_ in enumerate(self._types(operation)):
            number = self._builder.next_op
            for branch, end in enumerate(ends):
                self._sites[number, branch] = (end, index)
            joined = [self._numbers[end.operands[index]] for end in ends]
            values += self._add(operation, "join", joined, (type_,), (), repeats)
        self._define(operation, values)

    def _while(self, operation: Any, repeats: int) -> None:
        trips = mlir.trip_count(operation)
        types = self._types(operation)
        body = operation.regions[1].blocks[0]
        end = list(body.operations)[-1].operation
        values = [self._numbers[value] for value in operation.operands]
        carried = [
            index for index, argument in enumerate(body.arguments)
            if end.operands[index] != argument
        ]  # fmt: skip
        carries = {}
        for index, argument in enumerate(body.arguments):
            self._numbers[argument] = values[index]
            if index in carried:
                carries[index] = number = self._builder.next_op
                self._sites[number, 0] = (operation, index)
                note = (("trip_count", -1 if trips is None else trips),)
                (self._numbers[argument],) = self._add(
                    operation, "carry", (values[index],), (types[index],), note, repeats
                )
        self._block(body, repeats * max(1, trips or 1))
        for index in carried:
            number = self._builder.next_op
            self._sites[number, 0] = (end, index)
            new = self._numbers[end.operands[index]]
            (values[index],) = self._add(operation, "yield", (new,), (types[index],), (), repeats)
            self._builder.tie(number, carries[index])
        self._define(operation, values)
