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
    return TorchShardings(
        mesh=plan.mesh,
        axes=_best_axes(plan.mesh, specs.values()),
        specs=specs | {name: specs[first] for name, first in tied.items()},
        inputs=getattr(calling, "batch", ()),
        owners=getattr(calling, "owners", {}),
        state_specs=own,
        pairs=frozenset(_Flow(plan, getattr(calling, "owners", {})).pairs()),
    )


def _best_axes(mesh: Mesh, specs: Iterable[Spec]) -> tuple[str, ...]:
    """The order of axes that agrees with most dimensions which several axes shard."""
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

    def pairs(self) -> Iterator[tuple[str, str, str]]:
        """An axis, and two modules: one is column-wise, and one takes its shards row-wise.

        Every value between the two is sharded on the axis, so that nothing is sent between them.
        """
        products = dict(self._products())
        for axis in self._plan.mesh.names:
            sides: dict[str, dict[str, list[str]]] = {}
            for path in products:
                side = side_of("Linear", self._plan.arguments[f"{path}.weight"], axis)
                siblings = sides.setdefault(path.rpartition(".")[0], {"column": [], "row": []})
                siblings.get(side, []).append(path)
            for siblings in sides.values():
                for column, row in itertools.product(siblings["column"], siblings["row"]):
                    if self._is_sharded_between(axis, products[column], products[row]):
                        yield axis, column, row

    def _products(self) -> Iterator[tuple[str, int]]:
        """The product of each linear module in the forward pass, by the path of the module."""
        values = dict(zip(self._program.arguments, self._program.argument_values, strict=True))
        for name, kind in self._owners.items():
            path, _, key = name.rpartition(".")
            if kind != "Linear" or key != "weight" or name not in values:
                continue
            value: int | None = values[name]
            while value is not None:
                op = min(self._users[value], default=0)
                kind_of_op = self._program.kind(op)
                if kind_of_op == "dot_general":
                    yield path, op
                is_view = kind_of_op in _VIEWS
                value = self._program.ops[op].results[0] if is_view else None

    def _is_sharded_between(self, axis: str, column: int, row: int) -> bool:
        """Whether values flow from one product to another, all of them sharded on an axis."""
        ops = self._program.ops
        reached = {column}
        for number in range(column + 1, row + 1):
            operands = ops[number].operands
            if any(self._program.values[value].op in reached for value in operands):
                reached.add(number)
        if column >= row or row not in reached:
            return False
        waiting, between = [row], set[int]()
        while waiting:
            for value in ops[waiting.pop()].operands:
                origin = self._program.values[value].op
                if origin in reached and value not in between:
                    between.add(value)
                    waiting += [origin] if origin != column else []
        specs = map(self._plan.value_spec, between)
        return all(any(axis in axes for axes in spec) for spec in specs)
