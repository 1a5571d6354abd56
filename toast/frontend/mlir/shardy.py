"""Shardy's attributes and ops: read, forgotten and written."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from toast.boundary.printable import printable
from toast.frontend.mlir.modules import clone, main_function, walk

#: Mesh axes of each dimension, major to minor.
Spec = tuple[tuple[str, ...], ...]

#: Ops whose own attribute says how their result is sharded.
CONSTRAINTS = frozenset({"sdy.sharding_constraint", "sdy.reshard"})

#: The attribute that carries what ``checkpoint_name`` calls a value.
_NAME = "toast_name"


def keeping_names() -> Any:
    """How JAX lowers what ``checkpoint_name`` names: to an op that can be pinned, not to nothing.

    The op is a sharding constraint that demands nothing.
    """
    from jax._src.ad_checkpoint import name_p
    from jax._src.interpreters import mlir as jax_mlir

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
    name = printable(str(operation.attributes[_NAME].value), breaks=False)
    del operation.attributes[_NAME]
    return name


def constraint(operation: Any) -> tuple[tuple[str, ...] | None, ...] | None:
    """What a sharding constraint demands: axes per dimension, ``None`` for an open one.

    ``None`` for other ops, for constraints that demand nothing, and for parts of axes.
    """
    if operation.name not in CONSTRAINTS:
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


MESH = "toast_mesh"

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
    for operation in list(walk(module.body)):
        if operation.name in ("sdy.mesh", "sdy.sharding_group"):
            operation.erase()
            continue
        if operation.name in CONSTRAINTS:
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
            sdy.MeshOp(MESH, mesh, ip=ir.InsertionPoint.at_block_begin(module.body))

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
        return sdy.TensorShardingAttr.get(MESH, dims)

    def set_results(self, operation: Any, specs: list[Spec], made: list[Spec]) -> None:
        """The shardings of an op's results; those that are no tensors are left alone.

        Each is written twice: as the op makes it, as the op's attribute, for Shardy; and as it is
        kept, as a constraint behind the op, for XLA, which forgets such attributes on its way to
        its partitioner. (Loops and branches have no attribute: XLA prunes their results, which it
        would not survive.)
        """
        if operation.name in CONSTRAINTS:
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
        for operation in list(walk(self._function.operation.regions[0].blocks[0])):
            if operation.name == "sdy.reshard":
                with self._context, operation.location:
                    made = sdy.ShardingConstraintOp(
                        operation.operands[0],
                        operation.attributes["sharding"],
                        ip=ir.InsertionPoint(operation),
                    )
                operation.results[0].replace_all_uses_with(made.result)
                operation.erase()


def forget_shardings_of_ops(module: ir.Module) -> None:
    """Keep the shardings of arguments and results only, for Shardy to propagate."""
    for op in main_function(module, "module").operation.regions[0].blocks[0].operations:
        if "sdy.sharding" in op.operation.attributes:
            del op.operation.attributes["sdy.sharding"]
