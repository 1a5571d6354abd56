"""Reads the kinds, types, attributes and source locations of ops."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from toast.boundary.printable import printable, shortened
from toast.errors import TargetError
from toast.frontend.mlir import kernel_calls
from toast.frontend.mlir.marks import mark
from toast.frontend.mlir.modules import clone, walk
from toast.program import Attribute, Location, TensorType

#: The dialect whose name kinds omit; kinds of other dialects include it, such as ``chlo_square``.
_BARE_DIALECT = "stablehlo."

#: Attributes that do not concern dimensions: precision, layout and so on.
_IGNORED = frozenset({
    "precision_config", "algorithm", "compare_type", "indices_are_sorted", "unique_indices",
    "value", "operand_layouts", "result_layouts", "api_version", "sdy.sharding", "mhlo.sharding",
    "result_accuracy", "decomposition", "version",
})  # fmt: skip

#: Shardy's rule for one op; those of ops other than custom calls are ignored.
SHARDING_RULE = "sdy.sharding_rule"

_STRUCTS: dict[str, tuple[Callable[[ir.Attribute], Any], tuple[str, ...]]] = {
    "#stablehlo.dot<": (stablehlo.DotDimensionNumbers, (
        "lhs_batching_dimensions", "rhs_batching_dimensions",
        "lhs_contracting_dimensions", "rhs_contracting_dimensions",
    )),
    "#stablehlo.gather<": (stablehlo.GatherDimensionNumbers, (
        "offset_dims", "collapsed_slice_dims", "operand_batching_dims",
        "start_indices_batching_dims", "start_index_map", "index_vector_dim",
    )),
    "#stablehlo.scatter<": (stablehlo.ScatterDimensionNumbers, (
        "update_window_dims", "inserted_window_dims", "input_batching_dims",
        "scatter_indices_batching_dims", "scattered_dims_to_operand_dims", "index_vector_dim",
    )),
    "#stablehlo.conv<": (stablehlo.ConvDimensionNumbers, (
        "input_batch_dimension", "input_feature_dimension", "input_spatial_dimensions",
        "kernel_input_feature_dimension", "kernel_output_feature_dimension",
        "kernel_spatial_dimensions", "output_batch_dimension", "output_feature_dimension",
        "output_spatial_dimensions",
    )),
    "#chlo.ragged_dot<": (chlo.RaggedDotDimensionNumbers, (
        "lhs_batching_dimensions", "rhs_batching_dimensions",
        "lhs_contracting_dimensions", "rhs_contracting_dimensions",
        "lhs_ragged_dimensions", "rhs_group_dimensions",
    )),
}  # fmt: skip

_COMBINERS = {
    "stablehlo.add": "add", "stablehlo.multiply": "multiply", "stablehlo.maximum": "maximum",
    "stablehlo.minimum": "minimum", "stablehlo.and": "and", "stablehlo.or": "or",
    "stablehlo.xor": "xor",
}  # fmt: skip


def kind(operation: Any) -> str:
    """The kind of an op: ``add`` for ``stablehlo.add``, ``chlo_square`` for ``chlo.square``.

    The kind of ``stablehlo.not`` is ``stablehlo_not``: ``not`` is a keyword of the rules.
    """
    return _kind_of(operation.name)


def _kind_of(name: str) -> str:
    bare = name.removeprefix(_BARE_DIALECT)
    return re.sub(r"[.-]", "_", name if bare == "not" else bare)


@functools.cache
def op_kinds() -> frozenset[str]:
    """The kinds of all ops of the dialects that a module may use."""
    names = {
        getattr(class_, "OPERATION_NAME", "")
        for dialect in (stablehlo, chlo, sdy)
        for class_ in vars(dialect).values()
        if isinstance(class_, type)
    }
    return frozenset(_kind_of(name) for name in names if name)


def call_target(operation: Any) -> str:
    """The target of a custom call; ``""`` for other ops."""
    if operation.name != "stablehlo.custom_call":
        return ""
    target: str = operation.attributes["call_target_name"].value
    return target


#: Constants of this number of elements and more are arrays that a function closes over.
_CAPTURED = 2**16


def captured(operation: Any) -> bool:
    """Whether an op is a large constant whose elements differ, and so is data in the program."""
    if operation.name != "stablehlo.constant":
        return False
    shape = operation.results[0].type.shape
    if math.prod(shape) < _CAPTURED:
        return False
    value = operation.attributes["value"]
    return not (isinstance(value, ir.DenseElementsAttr) and value.is_splat)


def is_tuple(value: Any) -> bool:
    """Whether an MLIR value is a tuple."""
    return str(value.type).startswith("tuple<")


class TypeReader:
    """Reads tensor types; each MLIR type is read once."""

    def __init__(self) -> None:
        self._types: dict[Any, TensorType] = {}

    def __call__(self, type_: Any) -> TensorType:
        """The shape and element type of an MLIR type; tokens and tuples have no dimensions.

        Raises :class:`TargetError` for dynamic shapes, other types, and too large tensors.
        """
        if type_ not in self._types:
            self._types[type_] = _read_type(type_)
        return self._types[type_]


def _read_type(type_: Any) -> TensorType:
    if not isinstance(type_, ir.RankedTensorType):
        return _other_type(type_)
    if not type_.has_static_shape:
        raise TargetError(
            f"dynamic shape {type_}: TOAST needs static shapes; "
            "lower the function with concrete sizes"
        )
    if type_.encoding is not None and "bounds" not in str(type_.encoding):
        raise TargetError(
            f"{shortened(str(type_))} has an encoding, which says how its elements are stored; "
            "export it as a plain tensor"
        )
    element = str(type_.element_type)
    for mlir_name, name in (("complex<f32>", "c64"), ("complex<f64>", "c128")):
        element = name if element == mlir_name else element
    if not _ELEMENT.fullmatch(element):
        raise TargetError(
            f"element type {shortened(element)} is not one of StableHLO's; lower the program "
            "further"
        )
    shape = tuple(type_.shape)
    if len(shape) > _LARGEST_RANK:
        raise TargetError(
            f"a tensor has {len(shape)} dimensions; the limit is {_LARGEST_RANK}; reshape it"
        )
    if math.prod(shape) > _LARGEST_SIZE:
        raise TargetError(
            f"{shortened(str(type_))} has more than {_LARGEST_SIZE} elements; split it"
        )
    return TensorType(shape, element.lower())


#: The most dimensions and the most elements of a tensor: prices are doubles.
_LARGEST_RANK, _LARGEST_SIZE = 64, 2**48


def _other_type(type_: Any) -> TensorType:
    """The type of a token or a tuple, which have no dimensions; other types are errors."""
    text = str(type_)
    if text == "!stablehlo.token" or text.startswith("tuple<"):
        return TensorType((), "token")
    kind = "unranked tensor" if text.startswith("tensor<*") else text.partition("<")[0]
    raise TargetError(
        f"{kind} {shortened(text, 60)} is not a tensor of static shape; lower the program further"
    )


#: Element types as MLIR writes them, after renaming complex types.
_ELEMENT = re.compile(r"[a-zA-Z][a-zA-Z0-9]*")


class AttributeReader:
    """Reads the attributes of ops as plain values; each unique MLIR attribute is read once."""

    def __init__(self) -> None:
        self._cache: dict[Any, tuple[tuple[str, Attribute], ...]] = {}

    def __call__(self, operation: Any) -> tuple[tuple[str, Attribute], ...]:
        """Sorted (name, value) pairs; structs are flattened into their fields."""
        entries: list[tuple[str, Attribute]] = []
        attributes = operation.attributes
        for name in attributes:
            if name in _IGNORED or (name == SHARDING_RULE and not call_target(operation)):
                continue
            attribute = attributes[name]
            pairs = self._cache.get((name, attribute))
            if pairs is None:
                pairs = self._cache[name, attribute] = tuple(_read_attribute(name, attribute))
            entries.extend(pairs)
        if operation.name == "stablehlo.select_and_scatter":
            select, scatter = operation.regions
            entries += [("selects", _comparison(select)), ("combiner", _combiner(scatter))]
        else:
            for region in operation.regions:
                entries.append(("combiner", _combiner(region)))
                break
        if operation.name == "stablehlo.concatenate" and _joins_slices(operation):
            entries.append(("of_slices", 1))
        if call_target(operation) == "X64Combine" and any(
            use.owner.name == "stablehlo.rng_bit_generator" for use in operation.results[0].uses
        ):
            entries.append(("seeds_random", 1))
        if "kernel_name" in attributes:
            entries.extend(kernel_calls.nonzero(operation))
        if call_target(operation) or operation.name == "stablehlo.composite":
            entries.extend(kernel_calls.first_operands(operation))
            entries.extend(kernel_calls.stem(dict(entries).get("kernel_name")))
        return tuple(sorted(dict(entries).items()))


def _joins_slices(concatenate: Any) -> bool:
    """Whether each piece is a slice, or all are slices of one tensor or that tensor.

    Shardy's condition for a concatenation (such as a roll) that devices run as an exchange.
    """
    cuts = [_defining(_unconstrained(operand)) for operand in concatenate.operands]
    sliced = [cut is not None and cut.name == "stablehlo.slice" for cut in cuts]
    tensors = {
        _unconstrained(cut.operands[0] if of_slice else operand)
        for cut, of_slice, operand in zip(cuts, sliced, concatenate.operands, strict=True)
    }
    return all(sliced) or (any(sliced) and len(tensors) == 1)


def _unconstrained(value: Any) -> Any:
    """The value before the sharding constraints on it, which move no elements."""
    while (defining := _defining(value)) and defining.name == "sdy.sharding_constraint":
        value = defining.operands[0]
    return value


def _read_attribute(name: str, attribute: Any) -> Iterator[tuple[str, Attribute]]:
    if name == "mhlo.frontend_attributes":
        # JAX states the number of leading batch dimensions of a custom call.
        if "num_batch_dims" in attribute:
            yield "num_batch_dims", int(attribute["num_batch_dims"].value)
        # The memory of a value, such as pinned_host.
        if "_xla_buffer_placement" in attribute:
            yield "memory", printable(attribute["_xla_buffer_placement"].value)
        if "kernel_metadata" in attribute:
            yield from kernel_calls.blocks(attribute["kernel_metadata"])
        return
    if name in ("backend_config", "mhlo.backend_config"):
        yield from kernel_calls.configured(attribute)
        return
    if name == SHARDING_RULE:
        yield from kernel_calls.stated_rule(attribute)
        return
    if name == "channel_handle":
        # Channel 0 is none (replicas communicate); other numbers do not matter.
        if not re.search(r"handle = 0\b", str(attribute)):
            yield "channel", 1
        return
    if name == "composite_attributes":
        for entry in attribute:
            yield from _read_attribute(printable(entry.name), entry.attr)
        return
    if name == "einsum_config":
        yield from _subscripts(attribute.value)
        return
    text = str(attribute)
    for prefix, (struct, fields) in _STRUCTS.items():
        if text.startswith(prefix):
            typed = struct(attribute)
            for field in fields:
                value = getattr(typed, field)
                yield field, value if isinstance(value, int) else tuple(value)
            return
    if isinstance(attribute, ir.DenseI64ArrayAttr):
        yield name, tuple(attribute)
    elif isinstance(attribute, ir.DenseBoolArrayAttr):
        yield name, tuple(int(flag) for flag in attribute)
    elif isinstance(attribute, ir.DenseIntElementsAttr):
        yield name, tuple(int(number) for number in attribute)
    elif isinstance(attribute, ir.BoolAttr | ir.IntegerAttr):
        yield name, int(attribute.value)
    elif isinstance(attribute, ir.StringAttr | ir.FlatSymbolRefAttr):
        yield name, printable(attribute.value)
    elif enum := re.fullmatch(r"#\w+<(\w+) (\w+)>", text):  # for example #stablehlo<x Y>
        yield name, enum.group(2).lower()


def _subscripts(config: str) -> Iterator[tuple[str, Attribute]]:
    """The letters of each tensor of an einsum, as tuples: rules cannot take substrings.

    Nothing for a configuration with an ellipsis: its dimensions have no letters.
    """
    if "." in config:
        return
    operands, _, result = config.partition("->")
    lhs, _, rhs = operands.partition(",")
    for name, letters in (("lhs", lhs), ("rhs", rhs), ("result", result)):
        yield f"{name}_subscripts", tuple(letters.strip())


def _combiner(region: Any) -> str:
    """The reduction that a region performs; ``other`` unless it is one known op for all values."""
    blocks = list(region.blocks)
    if len(blocks) != 1:
        return "other"
    *combine, finish = [op.operation for op in blocks[0].operations]
    arguments, returned = list(blocks[0].arguments), list(finish.operands)
    count = len(returned)
    if len(arguments) != 2 * count:
        return "other"
    if returned == arguments[count:]:
        return "replace"
    pairs = zip(arguments[:count], arguments[count:], strict=True)
    definitions = {
        result: (_COMBINERS.get(operation.name, "other"), list(operation.operands))
        for operation in combine
        for result in operation.results
    }
    names = set()
    for value, pair in zip(returned, pairs, strict=True):
        name, operands = definitions.get(value, ("other", []))
        names.add(name if operands in (list(pair), list(pair)[::-1]) else "other")
    return names.pop() if len(names) == 1 else "other"


def _comparison(region: Any) -> str:
    """The direction in which a region compares its two arguments; ``other`` for other regions."""
    blocks = list(region.blocks)
    if len(blocks) != 1:
        return "other"
    operations = [op.operation for op in blocks[0].operations]
    if len(operations) != 2 or operations[0].name != "stablehlo.compare":
        return "other"
    compare, finish = operations
    if list(compare.operands) != list(blocks[0].arguments):
        return "other"
    if list(finish.operands) != list(compare.results):
        return "other"
    return str(
        dict(_read_attribute("direction", compare.attributes["comparison_direction"]))["direction"]
    )


#: Kinds of locations and their predicates in jaxlib 0.10.0; in later versions they are classes.
_LOCATIONS = {
    "NameLoc": "is_a_name", "FileLineColLoc": "is_a_file", "CallSiteLoc": "is_a_callsite",
    "FusedLoc": "is_a_fused",
}  # fmt: skip

#: The parser's name for the file of text without locations.
_UNNAMED = "-"

#: The folder of the code that traces functions, which no user wrote.
_TRACING = str(pathlib.Path(__file__).parents[1]) + os.sep


def is_location(place: Any, kind: str) -> bool:
    """Whether a location has the kind ``kind``, such as ``NameLoc``."""
    if hasattr(ir, kind):
        return isinstance(place, getattr(ir, kind))
    return bool(getattr(place, _LOCATIONS[kind])())


def location(operation: Any, text: str = "") -> Location:
    """The primitive path and the innermost source line of an op.

    ``text`` is the file that the module was parsed from; it replaces the parser's name ``-``.
    """
    path, file, line, function = "", "", 0, ""
    here = operation.location
    while here is not None:
        if is_location(here, "NameLoc"):
            if is_location(here.child_loc, "FileLineColLoc"):
                function = here.name_str
            elif not path:
                path = here.name_str
            here = here.child_loc
        elif is_location(here, "CallSiteLoc"):
            here = here.callee
        elif is_location(here, "FusedLoc"):
            here = here.locations[0] if here.locations else None
        elif is_location(here, "FileLineColLoc"):
            file, line, here = here.filename, here.start_line, None
            file = text or file if file == _UNNAMED else file
            if file.startswith(_TRACING):  # the target itself is the primitive
                file, line, function = "", 0, ""
        else:
            here = None
    path, file, function = (printable(text, breaks=False) for text in (path, file, function))
    return Location(path, file, line, function)


class CapturedRead(NamedTuple):
    """A use, in the condition of a loop, of a value that is defined outside of the loop."""

    #: The first ``carry`` of the loop, and the value.
    carry: int
    value: int
    #: The MLIR operation in the condition, and the place of its operand.
    operation: Any
    place: int


@dataclasses.dataclass(frozen=True)
class ModuleSource:
    """An inlined module, and the places of the program's ops and values in it."""

    module: ir.Module
    #: The MLIR operation of each op; ``None`` for arguments and results of the function.
    operations: tuple[Any, ...]
    #: The place of an operand in the module: ``(op, operand) -> (operation, operand)``.
    operand_sites: Mapping[tuple[int, int], tuple[Any, int]]
    #: The values that each MLIR operation defines: ``(operation, values)``.
    results: tuple[tuple[Any, tuple[int, ...]], ...]
    #: The pytrees of a traced function, :class:`toast.frontend.jax.Calling`.
    calling: Any = None
    #: The file that the module was read from, if any.
    file: str = ""
    #: The program for this machine's platform, if the module is for another one.
    here: Any = None
    #: The source of the program without padding, if this one is padded.
    whole: ModuleSource | None = None
    #: What the conditions of loops use besides what the loops carry.
    captured_reads: tuple[CapturedRead, ...] = ()
    #: Operations of a survey that are no ops, because they only name a value: with the value, and
    #: the name.
    names: tuple[tuple[Any, int, str], ...] = ()

    def location(self, op: int) -> Location:
        """The source location of an op of the program."""
        if op not in self._of_ops:
            self._of_ops[op] = self._location(op)
        return self._of_ops[op]

    def _location(self, op: int) -> Location:
        operation = self.operations[op]
        if operation is None:
            return Location()
        # The ops of repeated layers have few places.
        place = operation.location.attr
        if place not in self._locations:
            self._locations[place] = location(operation, self.file)
        return self._locations[place]

    @functools.cached_property
    def _of_ops(self) -> dict[int, Location]:
        """The locations that were asked for: passes, notes and files ask for all of them."""
        return {}

    @functools.cached_property
    def _locations(self) -> dict[Any, Location]:
        """The locations of :attr:`_of_ops`, by the locations of MLIR operations."""
        return {}

    def copied(self) -> ModuleSource:
        """The same places in an independent copy of the module."""
        module = clone(self.module)
        copies = dict(zip(walk(self.module.body), walk(module.body), strict=True))
        return ModuleSource(
            module,
            tuple(
                None if operation is None else copies[operation] for operation in self.operations
            ),
            {
                site: (copies[operation], place)
                for site, (operation, place) in self.operand_sites.items()
            },
            tuple((copies[operation], values) for operation, values in self.results),
            captured_reads=tuple(
                read._replace(operation=copies[read.operation]) for read in self.captured_reads
            ),
            names=tuple((copies[operation], *named) for operation, *named in self.names),
        )

    def mark_names(self, labels: Mapping[int, str], makers: Sequence[int]) -> None:
        """Gives operations the names that the frontend took from them.

        ``labels`` are those of a program, by value, and ``makers`` the ops that define values.
        """
        for operation, _, name in self.names:
            mark(operation, name=name)
        named = {value for _, value, _ in self.names}
        for value, name in labels.items():
            if value not in named:
                mark(self.operations[makers[value]], name=name)

    def conditions(self) -> Iterator[tuple[Any, int, dict[int, list[CapturedRead]]]]:
        """The conditions of loops with captured reads.

        Each has its block, the first ``carry`` of the loop, and the reads by value.
        """
        for carry, reads in itertools.groupby(self.captured_reads, lambda read: read.carry):
            loop, _ = self.operand_sites[carry, 0]
            (block,) = loop.regions[0].blocks
            of_value: dict[int, list[CapturedRead]] = {}
            for read in reads:
                of_value.setdefault(read.value, []).append(read)
            yield block, carry, of_value


def captured_operands(block: Any) -> list[tuple[Any, int]]:
    """The operands in a block, and in the regions of its operations, that are defined outside."""
    inside: set[Any] = set(block.arguments)
    found: list[tuple[Any, int]] = []
    for operation in walk(block):
        found += [
            (operation, place) for place, value in enumerate(operation.operands)
            if value not in inside
        ]  # fmt: skip
        inside.update(operation.results)
        for region in operation.regions:
            for inner in region.blocks:
                inside.update(inner.arguments)
    return found


def trip_count(loop: Any) -> int | None:
    """The number of iterations of a ``stablehlo.while``; ``None`` if it is not constant.

    The loops of ``jax.lax.scan`` and ``fori_loop`` have a constant number: the condition is that a
    carried counter is less than a constant, and the counter starts at a constant and increases by a
    constant.
    """
    condition, body = loop.regions[0].blocks[0], loop.regions[1].blocks[0]
    compare = _defining(list(condition.operations)[-1].operation.operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    counter = _position(condition.arguments, compare.operands[0])
    bound = _integer(compare.operands[1])
    if counter is None or bound is None:
        return None
    first = _integer(loop.operands[counter])
    step = _defining(list(body.operations)[-1].operation.operands[counter])
    if first is None or step is None or step.name != "stablehlo.add":
        return None
    by = [_integer(o) for o in step.operands if o != body.arguments[counter]]
    if len(by) != 1 or not by[0] or by[0] < 0:
        return None
    return max(0, -(-(bound - first) // by[0]))


def _position(values: Any, value: Any) -> int | None:
    return next((index for index, other in enumerate(values) if other == value), None)


def _defining(value: Any) -> Any:
    """The operation that defines a value, ``None`` for block arguments."""
    owner = value.owner
    return owner.operation if hasattr(owner, "operation") else None


def _integer(value: Any) -> int | None:
    """The value of an integer constant, ``None`` for anything else."""
    constant = _defining(value)
    if constant is None or constant.name != "stablehlo.constant":
        return None
    attribute = constant.attributes["value"]
    if not isinstance(attribute, ir.DenseIntElementsAttr) or len(attribute) != 1:
        return None
    return int(attribute[0])
