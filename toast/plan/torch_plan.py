"""The shardings of a plan in PyTorch's words."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping

from toast.hardware import Mesh
from toast.plan.plan import Plan
from toast.plan.torch_shardings import TorchShardings, side_of
from toast.program import Program, Spec

#: Ops between a weight and the product that it is for.
_VIEWS = frozenset({"transpose", "convert", "reshape", "broadcast_in_dim"})


def torch_shardings(plan: Plan) -> TorchShardings:
    """The implementation of :meth:`toast.Plan.to_torch`."""
    calling = getattr(plan.analysis.program.source, "calling", None)
    states: Mapping[str, str] = getattr(calling, "states", {})
    tied: Mapping[str, str] = getattr(calling, "tied", {})
    specs = {name: spec for name, spec in plan.arguments.items() if name not in states}
    own = {
        path: plan.arguments[path] for path, parameter in states.items()
        if plan.arguments[path] and plan.arguments[path] != specs[parameter]
    }  # fmt: skip
    flow = _Flow(plan, getattr(calling, "owners", {}))
    return TorchShardings(
        mesh=plan.mesh,
        axes=_best_axes(plan.mesh, specs.values()),
        specs=specs | {name: specs[first] for name, first in tied.items()},
        owners=getattr(calling, "owners", {}),
        tied=tied,
        state_specs=own,
        pairs=frozenset(flow.pairs()),
        gathered=frozenset(flow.gathered()),
    )


def _best_axes(mesh: Mesh, specs: Iterable[Spec]) -> tuple[str, ...]:
    """The order of axes, major to minor, of the dimensions that several axes shard."""
    orders = [axes for spec in specs for axes in spec if len(axes) > 1]
    pairs = [pair for axes in orders for pair in itertools.combinations(axes, 2)]

    def wrong(names: tuple[str, ...]) -> int:
        place = {name: number for number, name in enumerate(names)}
        return sum(place[major] > place[minor] for major, minor in pairs)

    return min(itertools.permutations(mesh.names), key=wrong)


class _Flow:
    """How activations flow between the linear modules of a plan."""

    def __init__(self, plan: Plan, owners: Mapping[str, str]) -> None:
        self._plan, self._owners = plan, owners
        self._program: Program = plan.analysis.program
        self._users: dict[int, list[int]] = collections.defaultdict(list)
        for number, op in enumerate(self._program.ops):
            for value in op.operands:
                self._users[value].append(number)

    def gathered(self) -> Iterator[tuple[str, str]]:
        """An axis, and a module whose weight it shards and whose product needs all of it."""
        for path, (op, operand) in self._products().items():
            weight = self._plan.arguments[f"{path}.weight"]
            used = self._plan.shardings.at(self._program, op, operand)
            at_use = {axis for axes in used for axis in axes}
            yield from ((axis, path) for axes in weight for axis in axes if axis not in at_use)

    def pairs(self) -> Iterator[tuple[str, str, str]]:
        """An axis, and two modules: one is column-wise, and one takes its shards row-wise.

        Every value between the two is sharded on the axis, so that nothing is sent between them.
        """
        products, gathered = self._products(), {*self.gathered()}
        for axis in self._plan.mesh.names:
            sides: dict[str, dict[str, list[str]]] = {}
            for path in products:
                if (axis, path) in gathered:
                    continue
                side = side_of("Linear", self._plan.arguments[f"{path}.weight"], axis)
                siblings = sides.setdefault(path.rpartition(".")[0], {"column": [], "row": []})
                siblings.get(side, []).append(path)
            for siblings in sides.values():
                for column, row in itertools.product(siblings["column"], siblings["row"]):
                    if self._is_sharded_between(axis, products[column][0], products[row][0]):
                        yield axis, column, row

    def _products(self) -> dict[str, tuple[int, int]]:
        """The product of each linear module in the forward pass, and the operand of its weight."""
        values = dict(zip(self._program.arguments, self._program.argument_values, strict=True))
        products = {}
        for name, kind in self._owners.items():
            path, _, key = name.rpartition(".")
            value = values.get(name) if (kind, key) == ("Linear", "weight") else None
            while value is not None and self._users[value]:
                number = min(self._users[value])
                op = self._program.ops[number]
                if self._program.kind(number) == "dot_general":
                    products[path] = number, op.operands.index(value)
                value = op.results[0] if self._program.kind(number) in _VIEWS else None
        return products

    def _is_sharded_between(self, axis: str, column: int, row: int) -> bool:
        """Whether values flow from one product to another, in shards of an axis all the way."""
        ops, values = self._program.ops, self._program.values
        reached = {column}
        for number in range(column + 1, row + 1):
            if any(values[value].op in reached for value in ops[number].operands):
                reached.add(number)
        if row not in reached:
            return False
        waiting, seen = [row], set[int]()
        while waiting:
            number = waiting.pop()
            for operand, value in enumerate(ops[number].operands):
                origin = values[value].op
                if origin not in reached:
                    continue
                if not self._stays(axis, value, number, operand):
                    return False
                if value not in seen and origin != column:
                    waiting.append(origin)
                seen.add(value)
        return True

    def _stays(self, axis: str, value: int, op: int, operand: int) -> bool:
        """Whether a value is in shards of an axis, and an op uses them as they are."""
        shardings = self._plan.shardings
        shards, used = (
            [axis in axes for axes in spec]
            for spec in (
                self._plan.value_spec(value), shardings.at(self._program, op, operand)
            )
        )  # fmt: skip
        return any(shards) and shards == used and value not in shardings.sums
