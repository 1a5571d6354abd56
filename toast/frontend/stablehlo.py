"""Converts StableHLO (text, bytecode or a portable artifact) to a :class:`Program`."""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import json
import pathlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir

from toast.boundary import children
from toast.boundary.printable import printable, shortened
from toast.boundary.regular_files import read_bytes, shown
from toast.errors import TargetError
from toast.frontend import mlir
from toast.program import (
    Attribute,
    Builder,
    Program,
    Signature,
    TensorType,
    is_residual_label,
    label_of_result,
)


def from_file(path: str | pathlib.Path, *, function: str = "") -> Program:
    """Reads a StableHLO file (text, bytecode or a portable artifact).

    :param function: the entry; by default the public function ``main``, or the only public one.
    :raises toast.errors.TargetError: if the file cannot be read, is not StableHLO, or does not have
        the function.
    """
    path = pathlib.Path(path)
    _, content = _confined(path, "program", function)
    module = mlir.parse(content, shown(path))
    return from_module(module, name=printable(function or path.stem), file=str(path))


def _reread(
    data: bytes, calling: Any, file: str, here: Any = None, whole: Any = None
) -> mlir.ModuleSource:
    source: mlir.ModuleSource = from_module(mlir.parse(data, file), name="", calling=calling).source
    return dataclasses.replace(source, file=file, here=here, whole=whole)


def _reduced(source: mlir.ModuleSource) -> tuple[Any, ...]:
    """A source for pickles and copies: the inlined module as bytecode.

    The pytrees of the arguments, the static arguments and the functions of callbacks are left
    out if they cannot be pickled.
    """
    calling = source.calling
    choices = [calling, calling and dataclasses.replace(calling, static={}, callbacks=()), None]
    calling = next(choice for choice in choices if _pickles(choice))
    marked = source
    if source.names:  # else they would be ops when the module is read again
        marked = source.copied()
        with marked.module.context:
            marked.mark_names({}, ())
    return _reread, (mlir.bytecode(marked.module), calling, source.file, source.here, source.whole)


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # a user's pytree node may raise anything
        return False
    return True


copyreg.pickle(mlir.ModuleSource, _reduced)


def functions_of(path: str | pathlib.Path) -> tuple[tuple[Program, ...], tuple[str, ...]]:
    """The program of a file with one public function; otherwise one for each function.

    The programs of functions share one module.  If one of several public functions is ``main``,
    their calls are inlined.  Otherwise calls stay, and are ops: the programs serve for work on
    single ops only.

    :returns: the programs, and a line for each function that TOAST cannot read.
    :raises toast.errors.TargetError: as for :func:`from_file`, or if it can read no function.
    """
    path = pathlib.Path(path)
    kind, content = _confined(path, "functions", "")
    module = mlir.parse(content, shown(path))
    if kind == PROGRAM:
        return (from_module(module, name=printable(path.stem), file=str(path)),), ()
    return separate(module, str(path))


def separate(module: ir.Module, origin: str) -> tuple[tuple[Program, ...], tuple[str, ...]]:
    """A program for each function of a module, without inlining; ``origin`` is its file.

    The second result is a line for each function that TOAST cannot read, such as one with dynamic
    shapes.  Raises :class:`toast.errors.TargetError` if it can read none.
    """
    programs, errors = [], {}
    mlir.read_annotations(module)
    with module.context:
        for name, function in mlir.functions_of(module).items():
            try:
                reader = _Reader(module, origin, origin)
                programs.append(reader.read(function, printable(name), None))
            except TargetError as error:
                errors[name] = error
    if not programs:
        raise next(iter(errors.values()))
    lines = (f"@{printable(name)} is left out: {error}" for name, error in errors.items())
    return tuple(programs), tuple(lines)


def _confined(path: pathlib.Path, what: str, function: str) -> tuple[bytes, bytes]:
    """The answer of :mod:`toast.frontend.confined` for a file: its kind, and bytecode."""
    data = read_bytes(path, TargetError, most=_LARGEST_BYTES)
    name = shown(path)
    request = {
        "bytes": _MEMORY_BYTES, "seconds": _SECONDS, "name": name, "what": what,
        "function": function,
    }  # fmt: skip
    answer = children.answer(
        _CONFINED, json.dumps(request).encode() + b"\n" + data,
        seconds=_SECONDS, needs_toast=True,
    )  # fmt: skip
    kind, content = answer.output[:1], answer.output[1:]
    if kind == ERROR:
        raise TargetError(content.decode(errors="replace"))
    if answer.failure or answer.status or not kind:
        reason = answer.failure or "crashes the parser"
        raise TargetError(f"{name}: reading it {reason}; check that it is valid StableHLO")
    return kind, content


_CONFINED = pathlib.Path(__file__).with_name("confined.py")

#: The kinds of answers: an inlined module, a module whose functions are read separately, an error.
PROGRAM, FUNCTIONS, ERROR = b"M", b"F", b"E"

#: Limits of reading a file: its size, and the memory and time of the process.
_LARGEST_BYTES, _MEMORY_BYTES, _SECONDS = 2**31, 12 * 2**30, 40.0


def from_module(
    module: ir.Module, *, name: str, file: str = "", calling: Any = None, platform: str = ""
) -> Program:
    """The program of a parsed module.

    :param module: the module; its calls are inlined in place, and the program refers to it.  Large
        constants of a traced function become arguments.
    :param name: the name of the program.
    :param file: the file that the module was read from, if any.
    :param calling: the :class:`toast.frontend.jax.Calling` of a traced function.
    :param platform: the platform that JAX lowered it for; empty if unknown.
    :raises toast.errors.TargetError: for a module that TOAST cannot shard.
    """
    function = inlined(module, file or name)
    if calling is not None:
        with module.context:
            arrays = mlir.open_captured_arrays(function)
        calling = dataclasses.replace(calling, captured=(*calling.captured, *arrays))
    program = flattened(module, function, name=name, file=file, calling=calling)
    return dataclasses.replace(program, platform=platform)


def inlined(module: ir.Module, origin: str) -> Any:
    """The main function of a module, after inlining its calls in place.

    ``origin`` names the module in errors.
    """
    mlir.read_annotations(module)
    with module.context:
        mlir.inline_calls(module, origin)
        mlir.drop_idle_ops(module)
        function = mlir.main_function(module, origin)
        mlir.drop_dead_ops(function)
        return function


def inlined_public(module: ir.Module, origin: str) -> None:
    """Inlines the calls of every public function of a module in place, as :func:`inlined`."""
    mlir.read_annotations(module)
    with module.context:
        mlir.inline_public(module, origin)
        mlir.drop_idle_ops(module)
        for function in mlir.public_functions(module):
            if function.operation.regions[0].blocks:
                mlir.drop_dead_ops(function)


def flattened(
    module: ir.Module, function: Any, *, name: str, file: str = "", calling: Any = None
) -> Program:
    """The program of a function without calls; the arguments are those of :func:`from_module`."""
    with module.context:
        return _Reader(module, file or name, file).read(function, name, calling)


#: Custom calls around code for one device, in GSPMD's form and as Shardy writes it for XLA.
_MANUAL_CALLS = frozenset({
    "SPMDFullToShardShape", "SPMDShardToFullShape",
    "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape",
})  # fmt: skip


#: The most runs of an op: prices are doubles, which have 53 bits.
_MOST_REPEATS = 2**48


class _Reader:
    """Flattens a function: the ops in the bodies of loops and branches are ops of the program.

    A value that a loop carries has the same sharding before the loop, in the body, at the end of
    the body and after the loop.  It becomes an op ``carry`` before the body (initial value -> body
    argument) and an op ``yield`` after it (new value -> result), which are tied.  A value that the
    body does not change stays one value; if it changes none, the first one is carried.  Each result
    of ``case`` and ``if`` becomes an op ``join`` of the values of the branches.  Each value of an
    ``optimization_barrier`` becomes an op.  An element of a ``tuple`` is the value that the tuple
    was built from.

    Each operand of a manual region becomes an op ``manual_entry`` (whole value -> the part in the
    region), each result an op ``manual_exit`` (part -> whole value).  The ops of the body state the
    axes that the region takes.
    """

    def __init__(
        self, module: ir.Module, origin: str, file: str,
        bodies: dict[str, Program | None] | None = None,
    ) -> None:  # fmt: skip
        self._module, self._origin, self._file = module, origin, file
        #: The decompositions of composites that have been read, by function; ``None`` if there is
        #: no program of it.
        self._bodies = {} if bodies is None else bodies
        self._decompositions: dict[Signature, list[Program]] = {}
        self._builder = Builder()
        self._type, self._attributes = mlir.TypeReader(), mlir.AttributeReader()
        self._numbers: dict[Any, int] = {}
        self._tuples: dict[Any, list[Any]] = {}
        self._operations: list[Any] = []
        self._sites: dict[tuple[int, int], tuple[Any, int]] = {}
        self._results: list[tuple[Any, tuple[int, ...]]] = []
        self._labels: dict[int, str] = {}
        self._constraints: dict[int, tuple[tuple[str, ...] | None, ...]] = {}
        self._annotations: dict[int, str] = {}
        self._condition_reads: list[tuple[int, int]] = []
        #: Values of residuals of a survey that gradients use before they have their names.
        self._results_used: set[Any] = set()
        #: Operations that only name residuals: with the values, and the names.
        self._names: list[tuple[Any, int, str]] = []
        self._captured_reads: list[mlir.CapturedRead] = []
        #: The manual regions around the current op, and their axes.
        self._regions: tuple[mlir.Region, ...] = ()
        self._manual_axes: tuple[str, ...] = ()

    def read(self, function: Any, name: str, calling: Any) -> Program:
        block = self._only_block(function.operation.regions[0])
        arguments = []
        for index, argument in enumerate(block.arguments):
            if mlir.is_tuple(argument):
                raise TargetError(
                    f"{self._origin}: argument {index} is a tuple; make its elements arguments"
                )
            try:
                type_ = self._type(argument.type)
            except TargetError as error:
                raise TargetError(f"{self._origin}: argument {index}: {error}") from None
            if calling is not None and type_.dtype == "token":
                raise TargetError(
                    f"{self._origin}: its effects are ordered, and JAX runs those on one device "
                    "only; use ordered=False, as in io_callback(..., ordered=False)"
                )
            (self._numbers[argument],) = self._add(None, "argument", (), (type_,))
            place = argument.location
            named = place.name_str if mlir.is_location(place, "NameLoc") else ""
            arguments.append(printable(named, breaks=False) or f"arg{index}")
        returned = self._block(block, 1)
        for index, value in enumerate(returned.operands):
            if mlir.is_tuple(value):
                raise TargetError(
                    f"{self._at(returned)}: result {index} is a tuple; return its elements"
                )
            self._sites[self._builder.next_op, 0] = (returned, index)
            self._add(None, "return", (self._numbers[value],), ())
        count = len(returned.operands)
        attributes = function.operation.attributes
        self._refuse_several_platforms(attributes)
        aliases = self._aliases(block, returned, attributes)
        if "arg_attrs" in attributes:
            for index, entry in enumerate(attributes["arg_attrs"]):
                if constraint := mlir.argument_constraint(entry):
                    self._constraints[index] = constraint
        results = [f"result[{index}]" for index in range(count)]
        if "res_attrs" in attributes:
            for index, entry in enumerate(attributes["res_attrs"]):
                if "jax.result_info" in entry:
                    info = entry["jax.result_info"]
                    text = info.value if isinstance(info, ir.StringAttr) else str(info)
                    results[index] = printable(text, breaks=False) or "result"
        self._constrain_arguments(block)
        source = mlir.ModuleSource(
            self._module, tuple(self._operations), self._sites, tuple(self._results), calling,
            self._file, captured_reads=tuple(self._captured_reads), names=tuple(self._names),
        )  # fmt: skip
        return self._builder.build(
            name, arguments, results, aliases, labels=self._labels,
            constraints=self._constraints, annotations=self._annotations, source=source,
            foreign=bool(self._file), condition_reads=self._condition_reads,
            result_uses=self._uses_of_results(),
            decompositions={s: tuple(bodies) for s, bodies in self._decompositions.items()},
        )  # fmt: skip

    def _refuse_several_platforms(self, attributes: Any) -> None:
        """Refuses a module that branches on the platform, which JAX adds as its first argument."""
        if mlir.has_platform_argument(attributes):
            raise TargetError(
                f"{self._origin}: it is lowered for several platforms; lower it for one, as in "
                'jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))'
            )

    def _aliases(self, block: Any, returned: Any, attributes: Any) -> list[int]:
        """The argument that each result overwrites, or -1."""
        count = len(returned.operands)
        aliases = [-1] * count
        if "arg_attrs" not in attributes:
            return aliases
        for index, entry in enumerate(attributes["arg_attrs"]):
            if "tf.aliasing_output" not in entry:
                continue
            alias = entry["tf.aliasing_output"]
            result = alias.value if isinstance(alias, ir.IntegerAttr) else -1
            if not 0 <= result < count:
                raise TargetError(
                    f"{self._origin}: argument {index}: tf.aliasing_output = "
                    f"{shortened(str(alias))} is not the number of a result (there are {count}); "
                    "correct or remove it"
                )
            if aliases[result] >= 0:
                raise TargetError(
                    f"{self._origin}: arguments {aliases[result]} and {index} alias result "
                    f"{result}; remove one tf.aliasing_output"
                )
            if block.arguments[index].type != returned.operands[result].type:
                raise TargetError(
                    f"{self._origin}: argument {index} aliases result {result} of another type; "
                    "remove its tf.aliasing_output"
                )
            aliases[result] = index
        # JAX states donations without results if a module has several devices.  XLA then overwrites
        # an argument with any result of its type: here, with the first.
        for index, entry in enumerate(attributes["arg_attrs"]):
            if "jax.buffer_donor" in entry:
                type_ = block.arguments[index].type
                fitting = (
                    result for result, value in enumerate(returned.operands)
                    if aliases[result] < 0 and value.type == type_
                )  # fmt: skip
                if (result := next(fitting, -1)) >= 0:
                    aliases[result] = index
        return aliases

    def _only_block(self, region: Any) -> Any:
        blocks = list(region.blocks)
        if len(blocks) != 1:
            raise TargetError(
                f"{self._origin}: a region has {len(blocks)} blocks; lower branches (cf.br) to "
                "stablehlo.if, case or while"
            )
        return blocks[0]

    def _at(self, operation: Any) -> str:
        """The location of an operation, for errors."""
        place = mlir.location(operation, self._file)
        in_file = place.file and place.file == self._file
        return str(place) if in_file else f"{self._origin}: {place}"

    def _constrain_arguments(self, block: Any) -> None:
        """Constrains arguments whose only use is one sharding constraint.

        The ``in_shardings`` of a nested ``jax.jit`` have this form.
        """
        for index, argument in enumerate(block.arguments):
            uses = {mlir.constraint(use.owner) for use in argument.uses}
            if len(uses) == 1 and (constraint := uses.pop()):
                self._constraints.setdefault(index, constraint)

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
        if self._manual_axes:
            attributes = tuple(sorted((*attributes, ("manual", self._manual_axes))))
        return self._builder.add(kind, operands, results, attributes, repeats=repeats)

    def _block(self, block: Any, repeats: int) -> Any:
        """Reads the ops of a block, which run ``repeats`` times; returns its terminator."""
        *body, terminator = [op.operation for op in block.operations]
        if repeats > _MOST_REPEATS:
            raise TargetError(
                f"{self._at(terminator)}: loops run it {shortened(str(repeats), 30)} times, more "
                f"than the limit of {_MOST_REPEATS}; lower the trip counts"
            )
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
            raise TargetError(
                f"{self._at(operation)}: code for one device in GSPMD's form; lower shard_map to "
                "sdy.manual_computation (JAX's default)"
            )
        number = self._builder.next_op
        operands = [self._numbers[value] for value in operation.operands]
        for index in range(len(operands)):
            self._sites[number, index] = (operation, index)
        name, constraint = mlir.take_name(operation), mlir.constraint(operation)
        if is_residual_label(name) and operands[0] not in self._labels:
            # Surveys are not run: their names change nothing, not even the price.
            self._labels[operands[0]] = name
            self._names.append((operation, operands[0], name))
            if self._used(operation):
                self._labels[operands[0]] = label_of_result(name)
                self._results_used.add(operation.operands[0])
            self._numbers.update(zip(operation.results, operands, strict=True))
            return
        if name:
            self._labels[self._builder.next_value] = name
        try:
            annotation = mlir.take_annotation(operation)
        except TargetError as error:
            raise TargetError(f"{self._at(operation)}: {error}") from None
        if annotation:
            self._annotations[number] = annotation
        if constraint:
            self._constraints[number] = constraint
        attributes = self._attributes(operation)
        if self._regions and mlir.names_devices(operation):
            attributes = self._between_axes(operation, attributes)
        if mlir.captured(operation):
            attributes = tuple(sorted((*attributes, ("captured", 1))))
        types = self._types(operation)
        kind = mlir.kind(operation)
        self._define(operation, self._add(operation, kind, operands, types, attributes, repeats))
        if function := mlir.decomposition(operation):
            self._decompose(self._builder.signature(number), function)

    def _used(self, operation: Any) -> bool:
        """Whether a gradient uses what an operation names, before it has its name."""
        # The ops after it use the name; so only the gradient of its own op uses the result.
        return len([*operation.operands[0].uses]) > 1

    def _uses_of_results(self) -> Iterator[tuple[int, int]]:
        """The uses of results of operations before these have the names of residuals."""
        if not self._results_used:
            return
        for use, (operation, index) in self._sites.items():
            # Of the operation that names it, no op is left.
            if operation.operands[index] in self._results_used:
                yield use

    def _decompose(self, signature: Signature, function: str) -> None:
        """Reads the decomposition of a composite, for the analysis."""
        if function not in self._bodies:
            self._bodies[function] = None
            reader = _Reader(self._module, self._origin, self._file, self._bodies)
            with contextlib.suppress(TargetError):  # only device-local programs need it
                read = reader.read(mlir.functions_of(self._module)[function], function, None)
                self._bodies[function] = dataclasses.replace(read, source=None)
        body = self._bodies[function]
        bodies = self._decompositions.setdefault(signature, [])
        if body is not None and not any(body.same_ops(other) for other in bodies):
            bodies.append(body)

    def _tuple(self, operation: Any, repeats: int) -> None:
        self._tuples[operation.results[0]] = list(operation.operands)
        if any(
            use.owner.name != "stablehlo.get_tuple_element" for use in operation.results[0].uses
        ):
            self._op(operation, repeats)

    def _element(self, operation: Any, repeats: int) -> None:
        parts = self._tuples.get(operation.operands[0])
        if parts is None:  # another op returns the tuple
            self._op(operation, repeats)
            return
        part, result = parts[operation.attributes["index"].value], operation.results[0]
        if part in self._tuples:
            self._tuples[result] = self._tuples[part]
        if part in self._numbers:
            self._numbers[result] = self._numbers[part]

    def _named(self, operation: Any, repeats: int) -> None:
        body = self._only_block(operation.regions[0])
        for argument, operand in zip(body.arguments, operation.operands, strict=True):
            self._numbers[argument] = self._numbers[operand]
        end = self._block(body, repeats)
        for result, value in zip(operation.results, end.operands, strict=True):
            self._numbers[result] = self._numbers[value]

    def _between_axes(
        self, operation: Any, attributes: tuple[tuple[str, Attribute], ...]
    ) -> tuple[tuple[str, Attribute], ...]:
        """The attributes of a collective in a region: its axes instead of numbers of devices."""
        try:
            axes = mlir.collective_axes(operation, self._regions[-1].mesh)
        except TargetError as error:
            raise TargetError(f"{self._at(operation)}: {error}") from None
        kept = [pair for pair in attributes if pair[0] not in mlir.DEVICES]
        return tuple(sorted((*kept, ("axes", axes))))

    def _manual(self, operation: Any, repeats: int) -> None:
        outer, outer_axes = self._regions, self._manual_axes
        try:
            region = mlir.read_region(operation, outer[-1].mesh if outer else None)
        except TargetError as error:
            raise TargetError(f"{self._at(operation)}: {error}") from None
        body = self._only_block(operation.regions[0])
        for index, (argument, operand, spec) in enumerate(
            zip(body.arguments, operation.operands, region.operands, strict=True)
        ):
            self._sites[self._builder.next_op, 0] = (operation, index)
            (self._numbers[argument],) = self._add(
                operation, "manual_entry", (self._numbers[operand],), (self._type(argument.type),),
                _boundary(region, spec), repeats,
            )  # fmt: skip
        self._regions = (*outer, region)
        self._manual_axes = (*outer_axes, *(name for name, _ in region.axes))
        end = self._block(body, repeats)
        self._regions, self._manual_axes = outer, outer_axes
        values: list[int] = []
        for index, (type_, spec) in enumerate(
            zip(self._types(operation), region.results, strict=True)
        ):
            self._sites[self._builder.next_op, 0] = (end, index)
            part = self._numbers[end.operands[index]]
            values += self._add(
                operation, "manual_exit", (part,), (type_,), _boundary(region, spec), repeats
            )
        self._define(operation, values)

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
        ends = [self._block(self._only_block(r), repeats) for r in operation.regions]
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
        body = self._only_block(operation.regions[1])
        end = list(body.operations)[-1].operation
        values = [self._numbers[value] for value in operation.operands]
        condition = self._only_block(operation.regions[0])
        read = [
            index for index, argument in enumerate(condition.arguments)
            if any(True for _ in argument.uses)
        ]  # fmt: skip
        carried = [
            index for index, argument in enumerate(body.arguments)
            if end.operands[index] != argument
        ] or [*range(len(values))][:1]  # fmt: skip
        captured = mlir.captured_operands(condition)
        if not values:
            for reader, place in captured:
                if self._type(reader.operands[place].type).shape:
                    raise TargetError(
                        f"{self._at(operation)}: a loop without values has a condition that reads "
                        f"an array ({self._type(reader.operands[place].type)}); remove the loop, "
                        "or make the array one of its values"
                    )
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
        if carries:
            first = min(carries.values())
            reads = [
                mlir.CapturedRead(first, self._numbers[value], reader, place)
                for reader, place in captured
                if (value := reader.operands[place]) in self._numbers
            ]
            read_values = [values[index] for index in read]
            read_values += dict.fromkeys(each.value for each in reads)
            self._condition_reads += [(value, first) for value in read_values]
            self._captured_reads += reads
        self._define(operation, values)


def _boundary(
    region: mlir.Region, spec: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, Attribute], ...]:
    """The attributes of an op at the boundary of a region; ``spec`` splits the value outside."""
    splits = [(axis, d) for d, axes in enumerate(spec) for axis in axes]
    return (
        ("manual_axes", tuple(name for name, _ in region.axes)),
        ("manual_sizes", tuple(size for _, size in region.axes)),
        ("split_axes", tuple(axis for axis, _ in splits)),
        ("split_dimensions", tuple(d for _, d in splits)),
    )
