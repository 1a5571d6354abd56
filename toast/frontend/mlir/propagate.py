"""Runs Shardy's propagation repeatedly on one program."""

from __future__ import annotations

import array
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from toast.frontend.mlir.modules import bytecode, context, main_function, walk
from toast.frontend.mlir.ops import is_location
from toast.frontend.mlir.shardy import CONSTRAINTS, MESH, ShardyWriter, Spec

#: The file of the locations that number operations.
_NUMBERED = "operation"

_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"


@dataclasses.dataclass(frozen=True)
class Propagated:
    """The shardings of a module after Shardy's propagation."""

    #: Shardings of the entry function's arguments and results; ``None`` is unsharded.
    arguments: tuple[Spec | None, ...]
    results: tuple[Spec | None, ...]
    #: The number of each remaining operation.  Shardy copies and merges operations on constants, so
    #: a number may occur several times, or not at all.
    numbers: array.array[int]
    #: The sharding of each remaining operation, as an index into ``kinds``; -1 is unsharded.
    kind_of: array.array[int]
    #: Distinct shardings: one spec per result of an operation.
    kinds: tuple[tuple[Spec, ...], ...]


class Propagation:
    """Shardy's propagation on one program, from any shardings of arguments.

    The module is serialized once, and every run parses a copy.  The location of an operation holds
    its number, because passes preserve locations.
    """

    def __init__(
        self,
        module: ir.Module,
        axes: tuple[tuple[str, int], ...],
        operations: Sequence[Any],
        manual_axes: Mapping[str, str],
    ) -> None:
        """Prepares ``module``, which is changed.

        :param axes: names and sizes of the mesh axes.
        :param operations: the operations to number; ``None`` for an op without an operation.
        :param manual_axes: the axis of the mesh for each axis of manual regions.
        """
        ShardyWriter(module, axes).move_regions(manual_axes)
        with module.context:
            for number, operation in enumerate(operations):
                if operation is not None:
                    operation.location = ir.Location.file(_NUMBERED, number, 0)
            for operation in walk(module.body):
                if operation.name in CONSTRAINTS:  # the program's own constraints do not count
                    rank = ir.RankedTensorType(operation.results[0].type).rank
                    operation.attributes["sharding"] = _open_sharding(((),) * rank)
        self._bytecode = bytecode(module)
        #: Shardings as attributes of the process's context.
        self._open: dict[tuple[Spec, ...], Any] = {}

    def run(
        self,
        arguments: Sequence[Spec],
        results: Sequence[Spec],
        before: Propagated | None = None,
    ) -> Propagated:
        """Propagates shardings of arguments and results; ``()`` for an unsharded one.

        All dimensions are open: propagation may add axes to them.  With ``before``, operations
        start with their shardings in that earlier result.
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
        """Sets the shardings of ``before`` on operations whose number is unique there."""
        times = collections.Counter(before.numbers)
        kinds = []
        for specs in before.kinds:
            if specs not in self._open:
                shardings = [_open_sharding(spec) for spec in specs]
                self._open[specs] = sdy.TensorShardingPerValueAttr.get(shardings)
            kinds.append(self._open[specs])
        shardings_of = {
            number: kinds[kind]
            for number, kind in zip(before.numbers, before.kind_of, strict=True)
            if kind >= 0 and times[number] == 1
        }
        for operation in walk(function.regions[0].blocks[0]):
            number = _number(operation)
            if number in shardings_of and operation.name not in CONSTRAINTS:
                operation.attributes["sdy.sharding"] = shardings_of[number]

    def _read(self, function: Any, arguments: int, results: int) -> Propagated:
        kind_numbers: dict[Any, int] = {}
        numbers, kind_of = array.array("i"), array.array("i")
        for operation in walk(function.regions[0].blocks[0]):
            number = _number(operation)
            if number < 0:
                continue
            attributes = operation.attributes
            for name in ("sdy.sharding", "sharding"):
                if name in attributes:
                    kind = kind_numbers.setdefault(attributes[name], len(kind_numbers))
                    break
            else:
                kind = -1
            numbers.append(number)
            kind_of.append(kind)
        kinds = [
            tuple(map(_spec, sdy.TensorShardingPerValueAttr(attribute).shardings))
            if sdy.TensorShardingPerValueAttr.isinstance(attribute)
            else (_spec(attribute),)
            for attribute in kind_numbers
        ]
        sides: list[tuple[Spec | None, ...]] = []
        for key, count in (("arg_attrs", arguments), ("res_attrs", results)):
            old = function.attributes[key] if key in function.attributes else [{}] * count
            sides.append(tuple(
                _spec(entry["sdy.sharding"]) if "sdy.sharding" in entry else None for entry in old
            ))  # fmt: skip
        return Propagated(sides[0], sides[1], numbers, kind_of, tuple(kinds))


def _number(operation: Any) -> int:
    """The number of an operation in :class:`Propagation`; -1 inside reductions, for example."""
    here = operation.location
    while is_location(here, "CallSiteLoc"):  # of an inlined computation
        here = here.callee
    if not is_location(here, "FileLineColLoc") or here.filename != _NUMBERED:
        return -1
    number: int = here.start_line
    return number


def _open_sharding(spec: Spec) -> Any:
    dims = [
        sdy.DimensionShardingAttr.get([sdy.AxisRefAttr.get(a) for a in axes], is_closed=False)
        for axes in spec
    ]
    return sdy.TensorShardingAttr.get(MESH, dims)


def _spec(sharding: Any) -> Spec:
    """The mesh axes of each dimension, without sub-axes, which TOAST does not use."""
    return tuple(
        tuple(
            axis.name
            for axis in map(sdy.AxisRefAttr, sdy.DimensionShardingAttr(dim).axes)
            if axis.sub_axis_info is None
        )
        for dim in sdy.TensorShardingAttr(sharding).dimension_shardings
    )
