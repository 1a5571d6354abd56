"""The one module that touches jaxlib's MLIR bindings and JAX's private context.

It parses modules, inlines ``func.call`` per call site, reads attributes and locations, and runs
pass pipelines.  Everything else in TOAST sees :class:`toast.frontend.Program`.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax._src.ad_checkpoint import name_p
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import _jax as jax_extension
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import chlo, sdy, stablehlo

from toast.errors import TargetError
from toast.frontend.program import Attribute, Location, TensorType

#: StableHLO ops drop their dialect's name; others keep it, as ``chlo_square``.
_BARE_DIALECT = "stablehlo."

#: Attributes that say nothing about dimensions: precision, layout and bookkeeping.
_IGNORED = frozenset({
    "precision_config", "algorithm", "compare_type", "indices_are_sorted", "unique_indices",
    "value", "backend_config", "operand_layouts", "result_layouts", "api_version",
    "sdy.sharding", "sdy.sharding_rule", "mhlo.sharding",
    "result_accuracy",
})  # fmt: skip

#: Mesh axes of each dimension, major to minor.
Spec = tuple[tuple[str, ...], ...]

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


@functools.cache
def context() -> ir.Context:
    """One MLIR context with JAX's dialects and Shardy registered, kept for the process."""
    made: ir.Context = jax_mlir.make_ir_context()
    made.allow_unregistered_dialects = False
    return made


def parse(data: bytes | str, origin: str) -> ir.Module:
    """Parse StableHLO text, bytecode or a portable artifact; ``origin`` names it in errors.

    Raises :class:`TargetError` with the parser's first message and its place.
    """
    with context() as ctx:
        try:
            if isinstance(data, bytes) and data.startswith(b"ML\xefR"):
                try:
                    return stablehlo.deserialize_portable_artifact(ctx, data)
                except Exception:  # plain bytecode is no portable artifact
                    return ir.Module.parse(data)
            text = data.decode() if isinstance(data, bytes) else data
            return ir.Module.parse(text)
        except UnicodeDecodeError:
            raise TargetError(
                f"{origin}: not StableHLO: neither MLIR text nor MLIR bytecode; "
                "export it with jax.export or .as_text()"
            ) from None
        except Exception as error:
            raise TargetError(f"{origin}{_first_diagnostic(error)}") from None


def _first_diagnostic(error: Exception) -> str:
    """``:LINE:COLUMN: message`` of the first MLIR diagnostic, on one line."""
    text = str(error)
    found = re.search(r'"?-"?:(\d+):(\d+)\)?:?\s*(?:error:)?\s*([^\n]+)', text)
    if found:
        line, column, message = found.groups()
        return f":{line}:{column}: not StableHLO: {message.strip()}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = next((line for line in lines if "error:" in line), lines[-1] if lines else "")
    return f": not StableHLO: {detail.split('error:')[-1].strip()}"


def run_passes(module: ir.Module, pipeline: str) -> None:
    """Run a textual pass pipeline, such as Shardy's, on ``module`` in place."""
    with module.context:
        passmanager.PassManager.parse(pipeline).run(module.operation)


def clone(module: ir.Module) -> ir.Module:
    """An independent copy of ``module``."""
    with module.context:
        return ir.Module.parse(bytecode(module))


def bytecode(module: ir.Module) -> bytes:
    """MLIR bytecode of ``module``, with locations."""
    import io

    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()


def text_without_locations(module: ir.Module) -> str:
    """The module as text that does not change when lines move in the user's source."""
    return str(module.operation.get_asm(enable_debug_info=False))


# -- inlining ------------------------------------------------------------------------------------


def main_function(module: ir.Module, origin: str) -> Any:
    """The entry: the public function called ``main``, or else the only public one."""
    functions = [f for f in module.body.operations if f.operation.name == "func.func"]
    public = [f for f in functions if not _is_private(f)]
    named = [f for f in public if ir.StringAttr(f.attributes["sym_name"]).value == "main"]
    found = named or public
    if len(found) != 1:
        raise TargetError(
            f"{origin}: expected one public function (or one called main), found {len(public)}; "
            "name the entry function main"
        )
    return found[0]


def _is_private(function: Any) -> bool:
    attributes = function.operation.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


def inline_calls(module: ir.Module, origin: str) -> None:
    """Replace every ``func.call`` reachable from main by a copy of its callee's body.

    Each copy keeps its own location below that of its call site.  Raises :class:`TargetError`
    for recursive calls and calls to functions without a body.
    """
    functions = {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    main = main_function(module, origin)
    with module.context:
        _inline_region(main.operation.regions[0], functions, (), origin)
        for function in functions.values():
            if function != main:
                function.operation.erase()


#: Ops that stand for a function's body, and the attribute that names the function.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}


def _inline_region(
    region: Any, functions: dict[str, Any], stack: tuple[str, ...], origin: str
) -> None:
    for block in region.blocks:
        for op in list(block.operations):
            operation = op.operation
            symbol = _CALLS.get(operation.name)
            if symbol is None:
                for inner in operation.regions:
                    _inline_region(inner, functions, stack, origin)
                continue
            name = ir.FlatSymbolRefAttr(operation.attributes[symbol]).value
            if name in stack:
                raise TargetError(f"{origin}: function @{name} calls itself; unroll the recursion")
            callee = functions.get(name)
            if callee is None or not callee.operation.regions[0].blocks:
                raise TargetError(
                    f"{origin}: call of @{name}, which the module does not define; "
                    "link its definition into the file"
                )
            body = callee.operation.regions[0]
            _inline_region(body, functions, (*stack, name), origin)
            _inline_call(operation, body.blocks[0])


def _inline_call(call: Any, body: Any) -> None:
    """Copy the ops of ``body`` before ``call``, rewire, and erase the call."""
    mapping = dict(zip(body.arguments, call.operands, strict=True))
    insertion = ir.InsertionPoint(call)
    for op in body.operations:
        source = op.operation
        if source.name == "func.return":
            for old, new in zip(call.results, source.operands, strict=True):
                old.replace_all_uses_with(mapping.get(new, new))
            break
        copy = source.clone(insertion).operation
        copy.location = ir.Location.callsite(source.location, [call.location])
        _remap(copy, mapping)
        mapping.update(zip(source.results, copy.results, strict=True))
    call.erase()


def _remap(operation: Any, mapping: dict[Any, Any]) -> None:
    """Point operands, also those captured inside regions, at the caller's values."""
    for index, operand in enumerate(operation.operands):
        if operand in mapping:
            operation.operands[index] = mapping[operand]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _remap(inner.operation, mapping)


#: Ops that may do something besides defining their results.
_EFFECTS = frozenset({
    "stablehlo.custom_call", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send",
    "stablehlo.recv", "stablehlo.while", "stablehlo.case", "stablehlo.if", "func.return",
})  # fmt: skip


def drop_dead_ops(function: Any) -> None:
    """Erase ops whose results nobody uses: XLA never runs them, so they must not be priced."""
    for op in reversed(list(function.operation.regions[0].blocks[0].operations)):
        operation = op.operation
        if operation.name.startswith("sdy.") or operation.name in _EFFECTS:
            continue
        if not any(True for result in operation.results for _ in result.uses):
            operation.erase()


# -- reading ops ---------------------------------------------------------------------------------


def kind(operation: Any) -> str:
    """``stablehlo.add`` is ``add``; ``chlo.square`` is ``chlo_square``.

    ``stablehlo.not`` keeps its dialect (``stablehlo_not``): ``not`` is a keyword of the rules.
    """
    return _kind_of(operation.name)


def _kind_of(name: str) -> str:
    bare = name.removeprefix(_BARE_DIALECT)
    return re.sub(r"[.-]", "_", name if bare == "not" else bare)


@functools.cache
def op_kinds() -> frozenset[str]:
    """The kinds of all ops of the dialects that a module may use."""
    names = {
        getattr(made, "OPERATION_NAME", "")
        for dialect in (stablehlo, chlo, sdy)
        for made in vars(dialect).values()
        if isinstance(made, type)
    }
    return frozenset(_kind_of(name) for name in names if name)


def call_target(operation: Any) -> str:
    """The target of a custom call; ``""`` for other ops."""
    if operation.name != "stablehlo.custom_call":
        return ""
    target: str = operation.attributes["call_target_name"].value
    return target


def is_tuple(value: Any) -> bool:
    """Whether an MLIR value is a tuple."""
    return str(value.type).startswith("tuple<")


class TypeReader:
    """Reads and interns tensor types; a type is seen once, whatever the number of values."""

    def __init__(self) -> None:
        self._seen: dict[Any, TensorType] = {}

    def __call__(self, type_: Any) -> TensorType:
        """The shape and element type of an MLIR type; tokens and tuples have no dimensions.

        Raises :class:`TargetError` for dynamic shapes.
        """
        found = self._seen.get(type_)
        if found is None:
            found = self._seen[type_] = _read_type(type_)
        return found


def _read_type(type_: Any) -> TensorType:
    if not isinstance(type_, ir.RankedTensorType):
        return TensorType((), "token")
    if not type_.has_static_shape:
        raise TargetError(
            f"dynamic shape {type_}: TOAST needs static shapes; "
            "lower the function with concrete sizes"
        )
    element = str(type_.element_type)
    for mlir_name, name in (("complex<f32>", "c64"), ("complex<f64>", "c128")):
        element = name if element == mlir_name else element
    return TensorType(tuple(type_.shape), element.lower())


class AttributeReader:
    """Reads the attributes of ops as plain terms; MLIR uniques attributes, so each once."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[tuple[str, Attribute], ...]] = {}

    def __call__(self, operation: Any) -> tuple[tuple[str, Attribute], ...]:
        """Sorted (name, value) pairs; structs are flattened into their fields."""
        found: list[tuple[str, Attribute]] = []
        attributes = operation.attributes
        for name in attributes:
            if name in _IGNORED:
                continue
            attribute = attributes[name]
            pairs = self._seen.get((name, attribute))
            if pairs is None:
                pairs = self._seen[name, attribute] = tuple(_read_attribute(name, attribute))
            found.extend(pairs)
        for region in operation.regions:
            found.append(("combiner", _combiner(region)))
            break
        return tuple(sorted(found))


def _read_attribute(name: str, attribute: Any) -> Iterator[tuple[str, Attribute]]:
    if name == "mhlo.frontend_attributes":
        # What JAX says of a custom call: how many leading dimensions are a batch.
        if "num_batch_dims" in attribute:
            yield "num_batch_dims", int(attribute["num_batch_dims"].value)
        return
    if name == "channel_handle":  # which channel does not matter
        yield "channel", 1
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
        yield name, attribute.value
    elif found := re.fullmatch(r"#\w+<(\w+) (\w+)>", text):  # an enum: #stablehlo<x Y>
        yield name, found.group(2).lower()


def _subscripts(config: str) -> Iterator[tuple[str, Attribute]]:
    """The letters of each tensor of an einsum, as lists: the rules know no substrings.

    None where an ellipsis stands for dimensions without letters.
    """
    if "." in config:
        return
    operands, _, result = config.partition("->")
    lhs, _, rhs = operands.partition(",")
    for name, letters in (("lhs", lhs), ("rhs", rhs), ("result", result)):
        yield f"{name}_subscripts", tuple(letters.strip())


def _combiner(region: Any) -> str:
    """The reduction a region performs, ``other`` if it is not one known op for all its values."""
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
    made = {
        result: (_COMBINERS.get(operation.name, "other"), list(operation.operands))
        for operation in combine
        for result in operation.results
    }
    names = set()
    for value, pair in zip(returned, pairs, strict=True):
        name, operands = made.get(value, ("other", []))
        names.add(name if operands in (list(pair), list(pair)[::-1]) else "other")
    return names.pop() if len(names) == 1 else "other"


#: Kinds of locations, and how jaxlib 0.10.0 asks for them; in later ones they are classes.
_LOCATIONS = {
    "NameLoc": "is_a_name", "FileLineColLoc": "is_a_file", "CallSiteLoc": "is_a_callsite",
    "FusedLoc": "is_a_fused",
}  # fmt: skip


#: The file of an op that stands in text, whose own locations were left out.
_UNNAMED = "-"


def is_location(place: Any, kind: str) -> bool:
    """Whether a location is of a kind, such as ``NameLoc``."""
    if hasattr(ir, kind):
        return isinstance(place, getattr(ir, kind))
    return bool(getattr(place, _LOCATIONS[kind])())


def location(operation: Any, text: str = "") -> Location:
    """The primitive path and the innermost source line of an op.

    ``text`` is the file that the parser read the module from; the parser calls it ``-``.
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
        else:
            here = None
    return Location(path, file, line, function)


@dataclasses.dataclass(frozen=True)
class Source:
    """An inlined module, and where in it the program's ops and values stand."""

    module: ir.Module
    #: MLIR operation of each program op; ``None`` for arguments and results of the function.
    operations: tuple[Any, ...]
    #: Where an op's operand stands in the module: ``(op, operand) -> (operation, operand)``.
    operand_sites: Mapping[tuple[int, int], tuple[Any, int]]
    #: The values that each MLIR operation defines: ``(operation, values)``.
    results: tuple[tuple[Any, tuple[int, ...]], ...]
    #: How to call it; set by the frontend that made it.
    calling: Any = None
    #: The file that it was read from, if any.
    file: str = ""

    def location(self, op: int) -> Location:
        """Source location of a program op."""
        operation = self.operations[op]
        return Location() if operation is None else location(operation, self.file)


def trip_count(loop: Any) -> int | None:
    """How often a ``stablehlo.while`` runs, for the counted loops that JAX emits.

    Such a loop compares a carried counter, LT, with a constant; the counter begins at a constant
    and grows by a constant.  ``None`` for any other loop.
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
    found = [index for index, other in enumerate(values) if other == value]
    return found[0] if found else None


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


# -- constraints -------------------------------------------------------------------------------

#: Ops whose own attribute says how their result is sharded.
_CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})

#: The attribute that carries what ``checkpoint_name`` calls a value.
_NAME = "toast_name"


def keeping_names() -> Any:
    """How JAX lowers what ``checkpoint_name`` names: to an op that can be pinned, not to nothing.

    The op is a sharding constraint that demands nothing.
    """

    def rule(_context: Any, value: Any, *, name: str) -> list[Any]:
        anything = sdy.DimensionShardingAttr.get([], is_closed=False)
        rank = ir.RankedTensorType(value.type).rank
        sharding = sdy.TensorShardingAttr.get(sdy.MeshAttr.get([]), [anything] * rank)
        made = sdy.ShardingConstraintOp(value, sharding)
        made.operation.attributes[_NAME] = ir.StringAttr.get(name)
        return [made.result]

    return jax_mlir.LoweringParameters(override_lowering_rules=((name_p, rule),))


def take_name(operation: Any) -> str:
    """The name that :func:`keeping_names` wrote, taken off the op; empty for none."""
    if _NAME not in operation.attributes:
        return ""
    name = str(operation.attributes[_NAME].value)
    del operation.attributes[_NAME]
    return name


def constraint(operation: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    """What a sharding constraint demands: axes per dimension, ``None`` for an open one.

    ``None`` for other ops, for constraints that demand nothing, and for parts of axes.
    """
    if operation.name not in _CONSTRAINTS:
        return None
    return _demanded(operation.attributes["sharding"])


def argument_constraint(attributes: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    """The same of an argument, by the dictionary of its attributes."""
    return _demanded(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None


def _demanded(sharding: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    found: list[tuple[str, ...] | None] = []
    for dimension in sdy.TensorShardingAttr(sharding).dimension_shardings:
        here = sdy.DimensionShardingAttr(dimension)
        axes = [sdy.AxisRefAttr(axis) for axis in here.axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        names = tuple(str(axis.name) for axis in axes)
        found.append(names if here.is_closed or names else None)
    return None if all(axes is None for axes in found) else tuple(found)


# -- writing Shardy ------------------------------------------------------------------------------

_MESH = "toast_mesh"

#: Ops whose results the values inside their regions decide.
_REGIONS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})

#: Ops that every use may make anew.
_SOURCES = frozenset({"stablehlo.constant", "stablehlo.iota", "sdy.constant"})


#: Where modules say how values are sharded, in Shardy's words and in GSPMD's.
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")


def _forget_shardings(module: ir.Module) -> list[Any]:
    """Drop meshes and shardings, also inside regions; returns the constraints, to be dealt with.

    One ``mhlo.sharding`` is enough for XLA to turn Shardy, and with it a plan, off.
    """
    constraints = []
    for operation in list(_walk(module.body)):
        if operation.name in ("sdy.mesh", "sdy.sharding_group"):
            operation.erase()
            continue
        if operation.name in _CONSTRAINTS:
            constraints.append(operation)
        attributes = operation.attributes
        for name in _SHARDINGS:
            if name in attributes:
                del attributes[name]
        for key in {"arg_attrs", "res_attrs"} & set(attributes):
            attributes[key] = ir.ArrayAttr.get([
                ir.DictAttr.get({n.name: n.attr for n in entry if n.name not in _SHARDINGS})
                for entry in attributes[key]
            ])  # fmt: skip
    return constraints


def without_shardings(module: ir.Module) -> ir.Module:
    """A copy of ``module`` with no mesh, sharding or constraint: the program alone."""
    copy = clone(module)
    with copy.context:
        for operation in _forget_shardings(copy):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
    return copy


class ShardyWriter:
    """Writes shardings (mesh axes per dimension) into a module as Shardy attributes."""

    def __init__(self, module: ir.Module, axes: tuple[tuple[str, int], ...]) -> None:
        """Replace the module's meshes by one with ``axes``, and forget all that used them."""
        self._function = main_function(module, "module")
        with module.context as self._context, ir.Location.unknown():
            for operation in _forget_shardings(module):
                rank = ir.RankedTensorType(operation.results[0].type).rank
                operation.attributes["sharding"] = self._sharding(((),) * rank)
            mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(name, size) for name, size in axes])
            sdy.MeshOp(_MESH, mesh, ip=ir.InsertionPoint.at_block_begin(module.body))

    def set_function(self, arguments: list[Spec], results: list[Spec]) -> None:
        """Shardings of the entry function's arguments and results."""
        attributes = self._function.operation.attributes
        with self._context:
            for key, specs in (("arg_attrs", arguments), ("res_attrs", results)):
                old = attributes[key] if key in attributes else [() for _ in specs]
                attributes[key] = ir.ArrayAttr.get([
                    self._with_sharding(entry, spec)
                    for entry, spec in zip(old, specs, strict=True)
                ])  # fmt: skip

    def _with_sharding(self, entry: Any, spec: Spec) -> Any:
        kept = {named.name: named.attr for named in entry}
        return ir.DictAttr.get({**kept, "sdy.sharding": self._sharding(spec)})

    def _sharding(self, spec: Spec) -> Any:
        dims = [
            sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes], is_closed=True)
            for axes in spec
        ]
        return sdy.TensorShardingAttr.get(_MESH, dims)

    def set_results(self, operation: Any, specs: list[Spec], made: list[Spec]) -> None:
        """The shardings of an op's results; those that are no tensors are left alone.

        Each is written twice: as the op makes it, as the op's attribute, for Shardy; and as it is
        kept, as a constraint behind the op, for XLA, which forgets such attributes on its way to
        its partitioner. (Loops and branches have no attribute: XLA prunes their results, which it
        would not survive.)
        """
        if operation.name in _CONSTRAINTS:
            with self._context:
                operation.attributes["sharding"] = self._sharding(specs[0])
            return
        tensors = [isinstance(r.type, ir.RankedTensorType) for r in operation.results]
        with self._context, operation.location:
            if specs and all(tensors) and operation.name not in _REGIONS:
                operation.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get(
                    [self._sharding(spec) for spec in made]
                )
            if operation.name in _SOURCES:
                return
            after = ir.InsertionPoint.after(operation)
            for result, spec, tensor in zip(operation.results, specs, tensors, strict=True):
                if tensor and spec:
                    kept = sdy.ShardingConstraintOp(result, self._sharding(spec), ip=after)
                    result.replace_all_uses_except(kept.result, kept.operation)

    def constrain(self, operation: Any, index: int, spec: Spec) -> Any:
        """A resharded copy of operand ``index``, made just before ``operation``."""
        with self._context, operation.location:
            made = sdy.ShardingConstraintOp(
                operation.operands[index], self._sharding(spec), ip=ir.InsertionPoint(operation)
            )
        return made.result

    def constrain_reshards(self) -> None:
        """Turn ``sdy.reshard`` ops, which XLA does not take as input, into constraints."""
        for operation in list(_walk(self._function.operation.regions[0].blocks[0])):
            if operation.name == "sdy.reshard":
                with self._context, operation.location:
                    made = sdy.ShardingConstraintOp(
                        operation.operands[0],
                        operation.attributes["sharding"],
                        ip=ir.InsertionPoint(operation),
                    )
                operation.results[0].replace_all_uses_with(made.result)
                operation.erase()


def portable_artifact(module: ir.Module) -> bytes:
    """``module`` in the serialized form that ``jax.export.Exported`` holds, its entry ``main``."""
    if ir.StringAttr(main_function(module, "module").attributes["sym_name"]).value != "main":
        module = clone(module)
        with module.context:
            main_function(module, "module").attributes["sym_name"] = ir.StringAttr.get("main")
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    return bytes(jax_extension.mlir.serialize_portable_artifact(bytecode(module), version, True))


def forget_shardings_of_ops(module: ir.Module) -> None:
    """Keep the shardings of arguments and results only, for Shardy to propagate."""
    for op in main_function(module, "module").operation.regions[0].blocks[0].operations:
        if "sdy.sharding" in op.operation.attributes:
            del op.operation.attributes["sdy.sharding"]


# -- propagating ---------------------------------------------------------------------------------

#: The file of the locations that number operations.
_NUMBERED = "operation"

_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"


@dataclasses.dataclass(frozen=True)
class Propagated:
    """What Shardy's propagation made of a module's shardings."""

    #: Shardings of the entry function's arguments and results; ``None`` is unsharded.
    arguments: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    #: For each operation left its number, and which of ``kinds`` it has; -1 is unsharded.
    #: Shardy copies and merges operations on constants, so a number may be there twice, or not.
    numbers: array.array[int]
    kind_of: array.array[int]
    #: Distinct shardings: one spec per result of the operation.
    kinds: tuple[tuple[Spec, ...], ...]


class Propagation:
    """Shardy's propagation of one program, again and again from other shardings of arguments.

    The module is written once; every run reads a fresh copy.  Operations carry their number in
    place of their location, which passes keep.
    """

    def __init__(
        self, module: ir.Module, axes: tuple[tuple[str, int], ...], operations: Sequence[Any]
    ) -> None:
        """Take over ``module``; operation ``i`` of ``operations`` (or ``None``) is number ``i``."""
        ShardyWriter(module, axes)
        with module.context:
            for number, operation in enumerate(operations):
                if operation is not None:
                    operation.location = ir.Location.file(_NUMBERED, number, 0)
            for operation in _walk(module.body):
                if operation.name in _CONSTRAINTS:  # no say of the program's own
                    rank = ir.RankedTensorType(operation.results[0].type).rank
                    operation.attributes["sharding"] = _open_sharding(((),) * rank)
        self._bytecode = bytecode(module)
        #: Shardings as attributes, which live as long as the one context.
        self._open: dict[tuple[Spec, ...], Any] = {}

    def run(
        self,
        arguments: Sequence[Spec],
        results: Sequence[Spec],
        before: Propagated | None = None,
    ) -> Propagated:
        """Propagate shardings of arguments and results, ``()`` where there is none.

        All dimensions are open: propagation may add axes to them.  What an earlier run found for
        operations stays, with ``before``.
        """
        with context():
            module = ir.Module.parse(self._bytecode)
            function = main_function(module, "module").operation
            attributes = function.attributes
            for key, specs in (("arg_attrs", arguments), ("res_attrs", results)):
                old = attributes[key] if key in attributes else [() for _ in specs]
                attributes[key] = ir.ArrayAttr.get([
                    ir.DictAttr.get({
                        **{named.name: named.attr for named in entry},
                        **({"sdy.sharding": _open_sharding(spec)} if any(spec) else {}),
                    })
                    for entry, spec in zip(old, specs, strict=True)
                ])  # fmt: skip
            if before is not None:
                self._keep(function, before)
            passmanager.PassManager.parse(_PROPAGATION).run(module.operation)
            return self._read(function, len(arguments), len(results))

    def _keep(self, function: Any, before: Propagated) -> None:
        """Start from the shardings of ``before`` where they belong to one operation."""
        times = collections.Counter(before.numbers)
        kinds = []
        for specs in before.kinds:
            if specs not in self._open:
                shardings = [_open_sharding(spec) for spec in specs]
                self._open[specs] = sdy.TensorShardingPerValueAttr.get(shardings)
            kinds.append(self._open[specs])
        found = {
            number: kinds[kind]
            for number, kind in zip(before.numbers, before.kind_of, strict=True)
            if kind >= 0 and times[number] == 1
        }
        for operation in _walk(function.regions[0].blocks[0]):
            number = _number(operation)
            if number in found and operation.name not in _CONSTRAINTS:
                operation.attributes["sdy.sharding"] = found[number]

    def _read(self, function: Any, arguments: int, results: int) -> Propagated:
        seen: dict[Any, int] = {}
        numbers, kind_of = array.array("i"), array.array("i")
        for operation in _walk(function.regions[0].blocks[0]):
            number = _number(operation)
            if number < 0:
                continue
            attributes = operation.attributes
            for name in ("sdy.sharding", "sharding"):
                if name in attributes:
                    kind = seen.setdefault(attributes[name], len(seen))
                    break
            else:
                kind = -1
            numbers.append(number)
            kind_of.append(kind)
        kinds = [
            tuple(map(_spec, sdy.TensorShardingPerValueAttr(attribute).shardings))
            if sdy.TensorShardingPerValueAttr.isinstance(attribute)
            else (_spec(attribute),)
            for attribute in seen
        ]
        sides: list[tuple[Spec | None, ...]] = []
        for key, count in (("arg_attrs", arguments), ("res_attrs", results)):
            old = function.attributes[key] if key in function.attributes else [{}] * count
            sides.append(tuple(
                _spec(entry["sdy.sharding"]) if "sdy.sharding" in entry else None for entry in old
            ))  # fmt: skip
        return Propagated(sides[0], sides[1], numbers, kind_of, tuple(kinds))


def _number(operation: Any) -> int:
    """What :class:`Propagation` numbers an operation; -1 inside reductions and the like."""
    here = operation.location
    while isinstance(here, ir.CallSiteLoc):  # of an inlined computation
        here = here.callee
    if not isinstance(here, ir.FileLineColLoc) or here.filename != _NUMBERED:
        return -1
    number: int = here.start_line
    return number


def _open_sharding(spec: Spec) -> Any:
    dims = [
        sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes], is_closed=False)
        for axes in spec
    ]
    return sdy.TensorShardingAttr.get(_MESH, dims)


def _spec(sharding: Any) -> Spec:
    """Mesh axes per dimension, without parts of axes, which TOAST does not use."""
    return tuple(
        tuple(
            axis.name
            for axis in map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(dim).axes)
            if axis.sub_axis_info is None
        )
        for dim in sdy.TensorShardingAttr(sharding).dimension_shardings
    )


# -- attributes by place -------------------------------------------------------------------------


def _walk(block: Any) -> Iterator[Any]:
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from _walk(inner)


def walk_order(module: ir.Module) -> dict[Any, int]:
    """The number of each operation in a walk over the module; the same for a clone of it."""
    return {operation: number for number, operation in enumerate(_walk(module.body))}


def attribute_texts(module: ir.Module, name: str) -> dict[int, str]:
    """The attribute called ``name`` of each operation that has it, by number in the walk."""
    return {
        number: str(operation.attributes[name])
        for operation, number in walk_order(module).items()
        if name in operation.attributes
    }


def set_attributes(module: ir.Module, name: str, texts: Mapping[int, str]) -> None:
    """Set the attribute called ``name``, given as text, by number in the walk."""
    with module.context:
        for operation, number in walk_order(module).items():
            if number in texts:
                operation.attributes[name] = ir.Attribute.parse(texts[number])
    module.operation.verify()


# -- single ops ----------------------------------------------------------------------------------


def generic_text(operation: Any) -> str:
    """An operation in MLIR's generic form, without locations."""
    return str(operation.get_asm(print_generic_op_form=True, use_local_scope=True))


def type_text(type_: TensorType) -> str:
    """A tensor type as MLIR writes it."""
    element = {"c64": "complex<f32>", "c128": "complex<f64>"}.get(type_.dtype, type_.dtype)
    if found := re.fullmatch(r"f8e(\w+)", element):
        element = "f8E" + found[1].replace("m", "M").replace("fn", "FN")
    return f"tensor<{''.join(f'{size}x' for size in type_.shape)}{element}>"


def module_of_ops(
    ops: Sequence[tuple[str, Sequence[TensorType], Sequence[TensorType]]],
) -> ir.Module:
    """A module whose main function runs ops side by side, each on arguments of its own.

    An op is given in generic form, with the types that its operands and results shall have.  Raises
    :class:`TargetError` when one does not verify at these types.
    """
    parameters: list[str] = []
    lines: list[str] = []
    values: list[str] = []
    types: list[str] = []
    for number, (text, operands, results) in enumerate(ops):
        start = text.index('"')
        opened = text.index("(", start)
        closed = text.index(")", opened)
        end = text.rindex(" : (")
        ins, outs = ([type_text(t) for t in side] for side in (operands, results))
        used = ", ".join(f"%p{len(parameters) + i}" for i in range(len(ins)))
        lines.append(
            f"%r{number}:{len(outs)} = {text[start : opened + 1]}{used}{text[closed:end]}"
            f" : ({', '.join(ins)}) -> ({', '.join(outs)})"
        )
        values += [f"%r{number}#{i}" for i in range(len(outs))]
        parameters, types = parameters + ins, types + outs
    signature = ", ".join(f"%p{i}: {type_}" for i, type_ in enumerate(parameters))
    return parse(
        f"func.func public @main({signature}) -> ({', '.join(types)}) {{\n"
        + "\n".join(lines)
        + f"\nfunc.return {', '.join(values)} : {', '.join(types)}\n}}\n",
        "op",
    )
