"""The shardings of a plan in PyTorch's words."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Set

from toast.hardware import Mesh
from toast.plan.plan import Plan
from toast.plan.torch_shardings import Layout, TorchShardings, side_of
from toast.program import Program, Spec, TensorType

#: Ops between a weight and the op that it is for.
_VIEWS = frozenset({"transpose", "convert", "reshape", "broadcast_in_dim"})

#: Ops with which a norm, a mask or an angle is applied to each element.
_ELEMENTWISE = frozenset({"add", "divide", "multiply", "select", "subtract"})


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
        layouts=dict(flow.layouts()),
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
        self._values = dict(
            zip(self._program.arguments, self._program.argument_values, strict=True)
        )
        self._users: dict[int, list[int]] = collections.defaultdict(list)
        for number, op in enumerate(self._program.ops):
            for value in op.operands:
                self._users[value].append(number)

    def gathered(self) -> Iterator[tuple[str, str]]:
        """An axis, and a module whose weight it shards and whose product needs all of it."""
        for path, (op, operand) in self._products.items():
            weight = self._plan.arguments[_weight(path)]
            used = self._plan.shardings.at(self._program, op, operand)
            at_use = {axis for axes in used for axis in axes}
            yield from ((axis, path) for axes in weight for axis in axes if axis not in at_use)

    def pairs(self) -> Iterator[tuple[str, str, str]]:
        """An axis, and two modules: one is column-wise, and one takes its shards row-wise.

        Every value between the two is sharded on the axis, so that nothing is sent between them.
        """
        products, gathered = self._products, {*self.gathered()}
        for axis in self._plan.mesh.names:
            sides: dict[str, dict[str, list[str]]] = {}
            for path in products:
                if (axis, path) in gathered:
                    continue
                side = side_of("Linear", self._plan.arguments[_weight(path)], axis)
                siblings = sides.setdefault(path.rpartition(".")[0], {"column": [], "row": []})
                siblings.get(side, []).append(path)
            for siblings in sides.values():
                for column, row in itertools.product(siblings["column"], siblings["row"]):
                    if self._is_sharded_between(axis, products[column][0], products[row][0]):
                        yield axis, column, row

    def layouts(self) -> Iterator[tuple[tuple[str, str], Layout]]:
        """The dimensions of the inputs and outputs of modules that an axis shards.

        In a Megatron style, these are the sequence between the layers, and the heads in norms
        between column-wise and row-wise layers.  See :attr:`TorchShardings.layouts`.
        """
        pairs = [*self.pairs()]
        for axis in self._plan.mesh.names:
            columns, rows = ({pair[side] for pair in pairs if pair[0] == axis} for side in (1, 2))
            inside = dict(self._norms_after(axis, columns))
            between = self._between(axis, columns, rows, inside) if columns else {}
            yield from (((axis, path), own) for path, own in {**between, **inside}.items())

    def _norms_after(self, axis: str, columns: Set[str]) -> Iterator[tuple[str, Layout]]:
        """Norms of the shards of a column-wise layer beside them, such as those of queries."""
        products = self._products
        for path in self._norms():
            beside = [c for c in columns if c.rpartition(".")[0] == path.rpartition(".")[0]]
            use = self._first_use(_weight(path)) if beside else None
            if use is None or self._program.kind(use[0]) not in _ELEMENTWISE:
                continue
            spec = self._plan.value_spec(self._program.ops[use[0]].results[0])
            dimension = _sharded_dimension(spec, axis)
            if dimension is not None and any(
                self._is_sharded_between(axis, products[column][0], use[0]) for column in beside
            ):
                yield path, (dimension, dimension)

    def _between(
        self, axis: str, columns: Set[str], rows: Set[str], inside: Mapping[str, Layout]
    ) -> dict[str, Layout]:
        """The layouts of all modules if an axis shards what flows between pairs of layers.

        Empty if it does so between some of them only, or if another module is between them whose
        layouts PyTorch's styles cannot change.
        """
        products, ops = self._products, self._program.ops
        ends = [ops[op].operands[1 - k] for op, k in (products[path] for path in columns)]
        ends += [ops[products[path][0]].results[0] for path in rows]
        types = {self._program.values[value].type for value in ends}
        places = {_sharded_dimension(self._plan.value_spec(value), axis) for value in ends}
        type_, place = next(iter(types)), next(iter(places))
        if len(types) > 1 or len(places) > 1 or place is None:
            return {}
        last = max(products, key=lambda path: products[path])
        norms, layouts = {*self._norms()}, dict[str, Layout]()
        for name, kind in self._owners.items():
            path = name.rpartition(".")[0]
            if path in columns:
                layouts[path] = place, None
            elif path in rows:
                layouts[path] = None, place
            elif path in norms:
                layouts[path] = place, place
            elif kind == "Linear" and path == last:
                layouts[path] = place, None
            elif kind == "Embedding" and (use := self._first_use(name)) is not None:
                rank = len(self._result_type(use[0]).shape)
                own = place + rank - len(type_.shape)  # a table of positions has no batch
                layouts[path] = None, own if own >= 0 else None
            elif kind == "Linear" or (path not in inside and self._makes(name, type_)):
                return {}
        return layouts

    def _norms(self) -> Iterator[str]:
        """The modules that normalize the last dimension, and whose weight can be replicated."""
        for name, kind in self._owners.items():
            path, _, key = name.rpartition(".")
            if key == "weight" and kind.endswith(("LayerNorm", "RMSNorm")):
                yield path

    def _makes(self, name: str, type_: TensorType) -> bool:
        """Whether a tensor of a module makes a value of a type, or is not used elementwise."""
        use = self._first_use(name)
        if use is None:
            return False
        kind = self._program.kind(use[0])
        return kind not in _ELEMENTWISE or self._result_type(use[0]).shape == type_.shape

    def _result_type(self, op: int) -> TensorType:
        return self._program.values[self._program.ops[op].results[0]].type

    def _first_use(self, name: str) -> tuple[int, int] | None:
        """The first op that uses an argument, apart from views of it, and which operand it is."""
        value: int | None = self._values.get(name)
        while value is not None and self._users[value]:
            number = min(self._users[value])
            op = self._program.ops[number]
            if self._program.kind(number) not in _VIEWS:
                return number, op.operands.index(value)
            value = op.results[0]
        return None

    @functools.cached_property
    def _products(self) -> dict[str, tuple[int, int]]:
        """The product of each linear module in the forward pass, and the operand of its weight."""
        products = {}
        for name, kind in self._owners.items():
            path, _, key = name.rpartition(".")
            use = self._first_use(name) if (kind, key) == ("Linear", "weight") else None
            if use is not None and self._program.kind(use[0]) == "dot_general":
                products[path] = use
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


def _sharded_dimension(spec: Spec, axis: str) -> int | None:
    """The dimension that an axis shards, other than the last one."""
    return next((d for d, axes in enumerate(spec[:-1]) if axis in axes), None)


def _weight(path: str) -> str:
    """The name of the weight of a module; that of the model itself has no path."""
    return f"{path}.weight" if path else "weight"
