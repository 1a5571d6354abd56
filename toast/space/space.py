"""The decision space: op classes, states and actions (paper, sections 4.2 to 4.4).

A mesh axis shards the iteration space of an op at most once.  The state of an op is therefore, for
each axis, the factor that holds the axis, or none.  It determines the sharding of every name and of
every dimension of every value.  Two ops with the same signature whose factors are changed by the
same actions always have the same state.  They form an **op class**, and there is one state per
class, not per op.  Repeated layers collapse, so search and pricing do not grow with depth.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import typing
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from toast.distinct import distinct_rows
from toast.errors import PinError, PlanError, SearchError
from toast.hardware import Mesh
from toast.space.actions import NONE, Action, Pairs, Refinements, Scope, pairs_of
from toast.space.classes import PRODUCTS, behaviours, classes_of
from toast.space.constraints import Constraints, Resolved, resolve
from toast.space.manual_axes import FREE
from toast.space.restrictions import Restrictions

if TYPE_CHECKING:
    from toast.analysis import Analysis, Orders, Resolution

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
#: A batch of states: ``[states, classes, axes]``, the factor that holds each axis.
States = npt.NDArray[np.int8]

#: Colors with fewer dimensions have no action (section 4.2).  In a small program every color
#: matters: its limit is a fiftieth of the number of its dimensions, if that is less.
MIN_DIMENSIONS = 10
_PROGRAM_SHARE = 50

#: Whether compatible conflicts are resolved together (section 3.5) or one by one.
Resolving = Literal["compatible", "independent"]


@dataclasses.dataclass(frozen=True)
class ColorGroup:
    """A color and its mirror images in argument groups (section 4.4)."""

    #: The colors, as in ``Analysis.color``.
    colors: tuple[int, ...]
    #: The number of dimensions of definitions and uses with these colors.
    dimensions: int
    #: The resolution groups of its conflicts; bit ``i`` of an action's resolution is for
    #: ``bits[i]``.
    bits: tuple[int, ...]
    #: The resolutions for which there are actions (``rules/orders.lp``).
    orders: tuple[tuple[int, ...], ...]


class Space:
    """All states and actions of an analysed program on a mesh."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        *,
        constraints: Constraints | None = None,
        resolution: Resolving = "compatible",
        min_dimensions: int | None = None,
        collapse: bool = True,
        apart: npt.NDArray[np.int8] | None = None,
    ) -> None:
        """Builds the space.

        :param analysis: the analysis of the program.
        :param mesh: the mesh; its axes of one device are left out of states and actions.
        :param constraints: the constraints of the user.
        :param resolution: ``"independent"`` makes every conflict a resolution group; those of
            repeated layers are still resolved together (section 3.6).  ``rules/orders.lp`` lists
            the ways to resolve conflicts.
        :param min_dimensions: colors with fewer dimensions have no action; by default
            :data:`MIN_DIMENSIONS`, or less in small programs.
        :param collapse: if false, every op has its own class.
        :param apart: ``[ops, axes]``; ops with different rows have different classes.
        :raises toast.errors.PinError: if a constraint cannot hold.
        :raises toast.errors.SearchError: for an unknown ``resolution``.
        """
        self.analysis = analysis
        if resolution not in typing.get_args(Resolving):
            raise SearchError(
                f"resolution {resolution!r}: use {' or '.join(typing.get_args(Resolving))}"
            )
        if not isinstance(constraints, Constraints | None):
            raise PinError(
                f"constraints: use toast.Constraints(...), not {type(constraints).__name__}"
            )
        self.constraints = constraints or Constraints()
        self.resolved: Resolved = resolve(analysis, mesh, self.constraints)
        #: Actions that precede all others (:meth:`begin_with`).
        self.first_actions: tuple[Action, ...] = ()
        #: The mesh as given; plans have its axes.
        self.full_mesh = mesh
        #: The mesh of states and actions.
        self.mesh = mesh = mesh.real
        self.axis_sizes: Ints = np.array(mesh.sizes, dtype=np.int64)
        resolutions, orders = (
            analysis.independent
            if resolution == "independent"
            else (analysis.resolutions, analysis.orders)
        )
        group_of_color, self.color_groups = color_groups(analysis, orders)
        names = analysis.names
        if min_dimensions is None:
            annotated = len(names.def_name) + len(names.use_name)
            min_dimensions = min(MIN_DIMENSIONS, 1 + annotated // _PROGRAM_SHARE)
        #: The least number of dimensions of a color group with actions.
        self.min_dimensions = min_dimensions
        self._group_of_name: Ints = group_of_color[analysis.color]
        wanted = _requirements(resolutions)
        # Names that no action changes behave alike, whatever their color.
        active = np.array([
            group.dimensions >= min_dimensions and self._divisible(names.divisor[self.names_of(g)])
            for g, group in enumerate(self.color_groups)
        ], dtype=bool)  # fmt: skip
        order = self.resolved.order
        #: ``[axes]`` the rank of each axis in the order of the pins, the largest is the major one;
        #: ``None`` if pins have no order.
        self.major = np.array([-order.index(name) for name in mesh.names]) if order else None
        self._open = ~self.resolved.closed
        touched = names.shardable & self._open & active[self._group_of_name]
        behaviour = behaviours(self._group_of_name, wanted, touched)
        holders = self.resolved.holders
        self.classes = classes_of(analysis, behaviour, holders, collapse=collapse, apart=apart)
        rules = [analysis.rules[s] for s in analysis.names.signature[self.classes.representative]]
        #: Factors of an op that are not sharded together.
        self.restrictions = Restrictions.of(rules, self.classes.divisor.shape[1])
        #: The factors that pins and manual regions fix, or :data:`FREE`.
        self._pins: States = holders[self.classes.representative]
        #: ``[classes, axes]`` those that manual regions fix.
        self.regions: States = self.resolved.regions.holders[self.classes.representative]
        #: Pins, and the factors that :meth:`hold` fixes.
        self._fixed = self._pins
        self._targets = self._action_targets(wanted, np.flatnonzero(active))
        self.actions: tuple[Action, ...] = tuple(self._targets)
        self._initial = self.pinned

    def for_search(self) -> Space:
        """A copy without the analysis and the constraints, small enough to send to a process.

        It has the states and actions, but not the program.
        """
        for needed in ("alike", "_shut", "links", "products", "arguments"):
            getattr(self, needed)  # computed now, because it needs the analysis
        slim = copy.copy(self)
        for large in ("refinements", "_parts", "_divides"):
            slim.__dict__.pop(large, None)  # computing it again is faster than sending it
        del slim.analysis, slim.constraints, slim.resolved
        return slim

    def same_classes(self, other: Space) -> bool:
        """Whether another space has the same program and op classes; divisors may differ."""
        one, two = self.analysis, other.analysis
        mine, others = self.classes, other.classes
        return (
            one.program is two.program
            and one.rules is two.rules
            and mine.divisor.shape == others.divisor.shape
            and np.array_equal(mine.of_op, others.of_op)
            and np.array_equal(mine.representative, others.representative)
        )

    # -- states ------------------------------------------------------------------------------

    @functools.cached_property
    def unsharded(self) -> States:
        """The state without any sharding but that of manual regions, ``[classes, axes]``."""
        return np.maximum(self.regions, NONE)

    @property
    def initial(self) -> States:
        """The state in which every search begins: pins, and the actions of :meth:`begin_with`."""
        return self._initial

    def begin_with(self, actions: Sequence[Action]) -> None:
        """Makes every search begin after ``actions``."""
        self.first_actions = tuple(actions)
        self._initial = self.pinned
        for action in actions:
            self._initial = self.apply(self._initial, action)

    def hold(self, op_class: int, axis: int) -> None:
        """Fixes the factor of op class ``op_class`` that holds ``axis`` in the initial state."""
        self._fixed = self._fixed.copy()
        self._fixed[op_class, axis] = self._initial[op_class, axis]
        self.__dict__.pop("choices", None)  # they depend on what is fixed

    def within(self, state: States) -> States:
        """``state``, changed where pins, :meth:`hold` and restrictions do not allow it."""
        allowed = np.where(self._fixed == FREE, state, self._fixed)
        k, axis = np.nonzero((self._fixed == FREE) & (allowed != NONE))
        shut = self._shut[k, allowed[k, axis]]
        allowed[k[shut], axis[shut]] = NONE
        wrong = ~self.restrictions.allow(allowed, np.arange(len(allowed)))
        allowed[wrong] = np.where(self._fixed[wrong] == FREE, NONE, self._fixed[wrong])
        return np.asarray(allowed)

    @property
    def fixed(self) -> States:
        """``[classes, axes]`` the factors that pins and :meth:`hold` fix, or :data:`FREE`."""
        return self._fixed

    @functools.cached_property
    def pinned(self) -> States:
        """The state with pins only, ``[classes, axes]``."""
        return np.where(self._pins == FREE, NONE, self._pins).astype(np.int8)

    def apply(self, state: States, action: Action) -> States:
        """The state after ``action``; ``state`` itself if the action shards nothing.

        If several factors of one op compete for the axis, the first one gets it.  A factor whose
        remaining size the axis does not divide stays as it is.
        """
        return np.asarray(self.apply_all(state[None], action)[0])

    def apply_all(self, states: States, action: Action) -> States:
        """``states`` (``[states, classes, axes]``), each after ``action``."""
        after, axis = states.copy(), action.axis
        if action.part:
            pairs = pairs_of([action])
            after[:, pairs.op_class, axis] = self._after_pairs(states, pairs)
            return after
        for classes, factors in self._targets[action]:
            held = after[:, classes]
            here = held[..., axis]
            fits = self._fits(held, classes, factors, axis) & (here == NONE)
            fits &= self._may_hold(held, classes, factors, axis)
            after[:, classes, axis] = np.where(fits, factors, here)
        return after

    def _fits(self, held: States, classes: Ints, factors: Ints, axis: int | Ints) -> Bools:
        """Whether ``axis`` and the axes that a factor holds together divide the factor.

        ``held`` is ``[..., pairs, axes]``, the factor that holds each axis.  ``axis`` is one axis
        for all pairs, or one for each.  The result for factor -1 has no meaning.
        """
        # One bit per axis: a mesh has at most eight axes.
        together = np.left_shift(1, axis).astype(np.uint8)
        for a in range(held.shape[-1]):
            together = together | ((held[..., a] == factors).view(np.uint8) << np.uint8(a))
        # One flat index is several times faster than three.
        sets, pairs = self._divides.shape[0], classes * self._divides.shape[2] + factors
        rows = together.astype(np.int64) * (self._divides.size // sets)
        return np.asarray(self._divides.ravel().take(rows + pairs))

    def _may_hold(self, held: States, classes: Ints, factors: Ints, axis: int | Ints) -> Bools:
        """Whether restrictions allow classes to have ``held`` with ``axis`` on ``factors``."""
        allowed = np.ones(held.shape[:-1], dtype=bool)
        if not self._any_restricted:
            return allowed
        chosen = np.flatnonzero(self.restrictions.restricted[classes])
        if len(chosen):
            after = held[..., chosen, :].copy()
            moved = axis if isinstance(axis, int) else axis[chosen]
            after[..., np.arange(len(chosen)), moved] = factors[chosen]
            allowed[..., chosen] = self.restrictions.allow(after, classes[chosen])
        return allowed

    @functools.cached_property
    def _any_restricted(self) -> bool:
        return bool(self.restrictions.restricted.any())

    @functools.cached_property
    def _divides(self) -> Bools:
        """``[sets of axes, K, F]`` whether the devices of a set of axes divide a factor."""
        sets = np.arange(1 << len(self.axis_sizes))[:, None] >> np.arange(len(self.axis_sizes)) & 1
        devices = np.where(sets, self.axis_sizes, 1).prod(axis=1)
        return np.asarray(self.classes.divisor % devices[:, None, None] == 0)

    # -- refinements -------------------------------------------------------------------------

    @functools.cached_property
    def _class_colors(self) -> Ints:
        """``[K, F]`` the color group of each factor of each op class; -1 for none."""
        names, ops = self.analysis.names, self.classes.representative
        table = np.full(self.classes.divisor.shape, -1, dtype=np.int64)
        for k, op in enumerate(ops.tolist()):
            first, last = names.first_name[op], names.first_name[op + 1]
            table[k, : last - first] = self._group_of_name[first:last]
        return table

    @functools.cached_property
    def _shut(self) -> Bools:
        """``[K, F]`` whether a factor takes no axis other than those of its pins."""
        names, ops = self.analysis.names, self.classes.representative
        table = np.zeros(self.classes.divisor.shape, dtype=bool)
        for k, op in enumerate(ops.tolist()):
            first, last = names.first_name[op], names.first_name[op + 1]
            table[k, : last - first] = ~self._open[first:last]
        return table

    @functools.cached_property
    def links(self) -> Ints:
        """``[links, 2]`` pairs of op classes; the second uses a value of the first."""
        names, of_op = self.analysis.names, self.classes.of_op
        pairs = np.stack([of_op[names.value_op[names.use_value]], of_op[names.use_op]], axis=1)
        return distinct_rows(pairs).rows

    @functools.cached_property
    def products(self) -> Bools:
        """``[K]`` whether the ops of a class are matrix products or convolutions."""
        kinds = [self.analysis.program.kind(op) for op in self.classes.representative.tolist()]
        return np.array([kind in PRODUCTS for kind in kinds], dtype=bool)

    @functools.cached_property
    def arguments(self) -> Ints:
        """The op classes of arguments, in ascending order."""
        return np.unique(self.classes.of_op[: len(self.analysis.program.arguments)])

    def color_of(self, op_class: int, factor: int) -> int:
        """The color group of a factor of an op class; -1 for none."""
        return int(self._class_colors[op_class, factor]) if factor >= 0 else -1

    @functools.cached_property
    def refinements(self) -> Refinements:
        """All actions on parts of colors."""
        classes, colors = self.classes, self._class_colors
        real = np.flatnonzero(self.axis_sizes > 1)
        shardable = classes.divisor > 1
        several = np.bincount(self.alike)[self.alike] > 1
        every = np.arange(len(colors))
        return Refinements.joined([
            Refinements.of_labels(Scope.FAMILY, classes.family, shardable, colors, real),
            Refinements.of_labels(Scope.CLASS, every, shardable & ~self._shut, colors, real),
            Refinements.of_labels(
                Scope.ALIKE, np.where(several, self.alike, -1), shardable, colors, real
            ),
            self._parts_of_colors(real),
        ])  # fmt: skip

    def _parts_of_colors(self, axes: Ints) -> Refinements:
        parts: list[tuple[int, Ints, Ints]] = []
        known: set[tuple[bytes, bytes]] = set()
        colors = self._class_colors
        shardable = (self.classes.divisor > 1) & (colors >= 0)
        for color in dict.fromkeys(action.color for action in self.actions):
            has = (colors == color) & shardable
            classes = np.flatnonzero(has.any(axis=1))
            factors = has[classes].argmax(axis=1)
            beside = np.unique(colors[classes])
            for other in beside[(beside >= 0) & (beside != color)].tolist():
                inside = (colors[classes] == other).any(axis=1)
                for chosen in (inside, ~inside):
                    part = classes[chosen], factors[chosen]
                    key = part[0].tobytes(), part[1].tobytes()
                    if len(part[0]) and key not in known:
                        known.add(key)
                        parts.append((color, *part))
        sizes = np.array([len(classes) for _, classes, _ in parts], dtype=np.int64)
        none = np.empty(0, dtype=np.int64)
        return Refinements.table(
            Scope.COLOR, np.arange(len(parts)), np.array([c for c, *_ in parts], dtype=np.int64),
            np.cumsum(sizes) - sizes, np.concatenate([none, *(k for _, k, _ in parts)]),
            np.concatenate([none, *(f for *_, f in parts)]), axes,
        )  # fmt: skip

    def parts_by(self, seconds: Floats) -> Ints:
        """The rows of :attr:`refinements` for parts of colors, in order of decreasing seconds.

        ``seconds`` are those of each op class, ``[K]``; those of a part are summed.
        """
        pairs = self._parts
        # Summed in a fixed order, so that equal parts have equal sums.
        worth = np.bincount(pairs.action, seconds[pairs.op_class])
        return self.refinements.rows(Scope.COLOR, np.argsort(-worth, kind="stable"))

    @functools.cached_property
    def _parts(self) -> Pairs:
        """The pairs of every part of a color, for the first axis."""
        rows = np.flatnonzero(self.refinements.scope == Scope.COLOR)
        return self.refinements.pairs(rows[np.diff(self.refinements.number[rows], prepend=-1) > 0])

    @functools.cached_property
    def alike(self) -> Ints:
        """``[K]`` a number; it is equal for op classes of one kind with factors of equal colors.

        Such classes differ in sizes only, for example in layers of different widths.
        """
        kinds = [self.analysis.program.kind(op) for op in self.classes.representative.tolist()]
        keys: dict[object, int] = {}
        numbers = [
            keys.setdefault((kind, *row), len(keys))
            for kind, row in zip(kinds, self._class_colors.tolist(), strict=True)
        ]
        return np.array(numbers, dtype=np.int64)

    # -- batches -----------------------------------------------------------------------------

    def apply_each(self, state: States, actions: Sequence[int]) -> States:
        """``[actions, classes, axes]`` ``state`` after each of ``actions`` (by number)."""
        after = np.repeat(state[None], len(actions), axis=0)
        place = np.full(len(self.actions), -1)
        place[list(actions)] = np.arange(len(actions))
        for action, classes, factors, axes in self._layers_of_all:
            row = place[action]
            chosen = row >= 0
            row, k, f, a = row[chosen], classes[chosen], factors[chosen], axes[chosen]
            here = after[row, k, a]
            fits = self._fits(state[k], k, f, a) & (here == NONE)
            fits &= self._may_hold(state[k], k, f, a)
            after[row, k, a] = np.where(fits, f, here)
        return after

    def refine(self, state: States, rows: Ints) -> tuple[Ints, States]:
        """Applies refinements to ``state``.

        A refinement moves the axis to its factors from any other factor; pinned and held factors
        stay.

        :param rows: rows of :attr:`refinements`.
        :returns: those of ``rows`` that change the state, and the new states, ``[rows, classes,
            axes]``.
        """
        pairs = self.refinements.pairs(rows)
        factors = self._after_pairs(state[None], pairs)[0]
        changes = factors != state[pairs.op_class, pairs.axis]
        number, k, axis = pairs.action[changes], pairs.op_class[changes], pairs.axis[changes]
        effective, place = np.unique(number, return_inverse=True)
        after = np.repeat(state[None], len(effective), axis=0)
        after[place, k, axis] = factors[changes]
        return rows[effective], after

    def _after_pairs(self, states: States, pairs: Pairs) -> States:
        """``[states, pairs]`` the factor that holds the axis of each pair after a refinement.

        It is the factor of the pair.  If that factor does not fit or is not allowed, or the axis is
        pinned or held, it is the previous factor.
        """
        _, k, f, axis = pairs
        held = states[:, k]  # [S, pairs, A]
        before = held[:, np.arange(len(k)), axis]
        fits = self._fits(held, k, f, axis) & ~self._shut[k, f]
        free = (self._fixed[k, axis] == FREE) & self._may_hold(held, k, f, axis)
        return np.where(free & (fits | (f == NONE)), f, before).astype(np.int8)

    @functools.cached_property
    def _layers_of_all(self) -> list[tuple[Ints, Ints, Ints, Ints]]:
        """The targets of all actions by layer: arrays of actions, classes, factors and axes."""
        layers: list[list[tuple[Ints, Ints, Ints, Ints]]] = []
        for number, (action, targets) in enumerate(self._targets.items()):
            for depth, (classes, factors) in enumerate(targets):
                if depth == len(layers):
                    layers.append([])
                ones = np.ones_like(classes)
                layers[depth].append((number * ones, classes, factors, action.axis * ones))
        return [
            (np.concatenate(a), np.concatenate(k), np.concatenate(f), np.concatenate(x))
            for a, k, f, x in (zip(*layer, strict=True) for layer in layers)
        ]

    @functools.cached_property
    def choices(self) -> tuple[States, ...]:
        """The legal states of each op class, ``[choices, axes]``; the unsharded state comes first.

        In a legal state, each axis has one factor or none, the axes of a factor together divide its
        size, and pins and restrictions hold.  It may not be reachable by actions.  The arrays are
        read-only, because op classes share them.
        """
        return tuple(self.choices_of(k) for k in range(len(self.classes.representative)))

    def choices_of(self, op_class: int) -> States:
        """The legal states of one op class; see :attr:`choices`."""
        op = self.classes.representative[op_class]
        first, last = self.analysis.names.first_name[op : op + 2]
        divisor = np.where(
            self._open[first:last], self.classes.divisor[op_class, : last - first], 1
        )
        rows = _legal(
            tuple(divisor.tolist()), tuple(self._fixed[op_class].tolist()), self.mesh.sizes
        )
        if not self.restrictions.restricted[op_class]:
            return rows
        return rows[self.restrictions.allow(rows, np.full(len(rows), op_class))]

    @functools.cached_property
    def tied(self) -> tuple[tuple[int, int, States], ...]:
        """Op classes that are sharded like another one: class, other class, and factors.

        Factor ``f`` of the other class is factor ``factors[f]`` of the class; the last entry is for
        no factor.
        """
        names, rules = self.analysis.names, self.analysis.rules
        factors_of: dict[tuple[int, int], States] = {}
        for op, other in self.analysis.program.ties:
            own, theirs = (
                [f.label for f in rules[names.signature[o]].factors] for o in (op, other)
            )
            same = [own.index(label) if label in own else NONE for label in theirs]
            classes = (int(self.classes.of_op[op]), int(self.classes.of_op[other]))
            factors_of[classes] = np.array([*same, NONE], dtype=np.int8)
        return tuple((k, other, factors) for (k, other), factors in factors_of.items())

    def checked(self, state: Any) -> States:
        """``state``, an array of integers of the shape of a state: ``[classes, axes]``.

        Raises :class:`toast.errors.PlanError` for anything else.
        """
        given, wanted = np.asarray(state, dtype=object), self.unsharded.shape
        if given.shape != wanted:
            raise PlanError(
                f"{self.analysis.program.name}: a state has shape {wanted}, not {given.shape}; use "
                "plan.state, or a state of this program and mesh"
            )
        numbers = np.asarray(state)
        if numbers.dtype.kind not in "iu" or numbers.min(initial=-1) < -1:
            raise PlanError(
                f"{self.analysis.program.name}: a state has the number of a factor for each op "
                "class and axis, or -1; use plan.state, or a state of this program and mesh"
            )
        return numbers.astype(self.unsharded.dtype)

    def of_ops(self, state: States) -> npt.NDArray[np.int8]:
        """``[ops, axes]`` the state of each op in a state of classes."""
        return state[self.classes.of_op]

    # -- actions -----------------------------------------------------------------------------

    def names_of(self, group: int) -> Ints:
        """The shardable names of a color group."""
        chosen = (self._group_of_name == group) & self.analysis.names.shardable
        return np.flatnonzero(chosen)

    def color_group_of(self, name: Any) -> Any:
        """The color group of a name, or of an array of names."""
        return self._group_of_name[name]

    def _action_targets(
        self, wanted: dict[int, frozenset[tuple[int, int]]], active: Ints
    ) -> dict[Action, list[tuple[Ints, Ints]]]:
        """The (classes, factors) that each action shards, in layers of descending priority."""
        targets: dict[Action, list[tuple[Ints, Ints]]] = {}
        names = self.analysis.names
        for number in active.tolist():
            group, members = self.color_groups[number], self.names_of(number)
            divisors = names.divisor[members]
            in_conflict = [(i, wanted[n]) for i, n in enumerate(members.tolist()) if n in wanted]
            for bits in group.orders:
                picked = dict(zip(group.bits, bits, strict=True))
                allowed = np.ones(len(members), dtype=bool)
                for place, pairs in in_conflict:
                    allowed[place] = all(picked[g] == bit for g, bit in pairs)
                layers = self._layers(members[allowed & self._open[members]])
                for axis, size in enumerate(self.axis_sizes.tolist()):
                    if size > 1 and (divisors % size == 0).any():
                        targets[Action(number, bits, axis)] = self._not_pinned(layers, axis)
        return targets

    def _not_pinned(self, layers: list[tuple[Ints, Ints]], axis: int) -> list[tuple[Ints, Ints]]:
        """The targets of an action that are not pinned on ``axis``."""
        free = self._pins[:, axis] == FREE
        return [(classes[free[classes]], factors[free[classes]]) for classes, factors in layers]

    def _divisible(self, divisors: Ints) -> bool:
        """Whether an axis of more than one device divides one of the divisors."""
        sizes = self.axis_sizes[self.axis_sizes > 1]
        return bool((divisors[:, None] % sizes == 0).any())

    def _layers(self, members: Ints) -> list[tuple[Ints, Ints]]:
        """Names as unique (class, factor) pairs; layer ``i`` has factor ``i`` of each class."""
        names = self.analysis.names
        ops = names.name_op[members]
        factor = members - names.first_name[ops]
        pairs = distinct_rows(np.stack([self.classes.of_op[ops], factor], axis=1)).rows
        classes, factors = pairs[:, 0], pairs[:, 1]
        starts = np.flatnonzero(np.r_[True, classes[1:] != classes[:-1]])
        rank = np.arange(len(classes)) - np.repeat(starts, np.diff(np.r_[starts, len(classes)]))
        depth = int(rank.max(initial=-1)) + 1
        return [(classes[rank == layer], factors[rank == layer]) for layer in range(depth)]


@functools.lru_cache(maxsize=4096)
def _legal(divisor: tuple[int, ...], fixed: tuple[int, ...], sizes: tuple[int, ...]) -> States:
    """The legal states of an op; ``divisor`` per factor, ``fixed`` and ``sizes`` per axis."""
    options = [
        [NONE, *(f for f, most in enumerate(divisor) if most % size == 0)]
        if here == FREE and size > 1 else [max(here, NONE)]
        for size, here in zip(sizes, fixed, strict=True)
    ]  # fmt: skip
    rows = np.array(list(itertools.product(*options)), dtype=np.int8)
    fits = np.ones(len(rows), dtype=bool)
    free = np.array(fixed) == FREE
    for f, most in enumerate(divisor):
        here = rows == f
        shards = np.where(here, sizes, 1).prod(axis=1)
        fits &= ~(here & free).any(axis=1) | (most % shards == 0)
    legal: States = rows[fits]
    legal.flags.writeable = False  # several op classes share it
    return legal


def color_groups(analysis: Analysis, orders: Orders) -> tuple[Ints, tuple[ColorGroup, ...]]:
    """The groups of colors and their mirror images (section 4.4).

    :param analysis: the analysis of the program.
    :param orders: the resolution groups and resolutions of each group (``rules/orders.lp``).
    :returns: ``[names]`` the group of each color, indexed by color; and the groups.
    """
    names = analysis.names
    colors = np.unique(analysis.color)
    leaders, index = np.unique(analysis.color_group[colors], return_inverse=True)
    group_of_color = np.zeros(names.count, dtype=np.int64)
    group_of_color[colors] = index
    group_of_name = group_of_color[analysis.color]
    dimensions = np.bincount(
        np.concatenate([group_of_name[names.def_name], group_of_name[names.use_name]]),
        minlength=len(leaders),
    )
    members: dict[int, list[int]] = defaultdict(list)
    for color, group in zip(colors.tolist(), index.tolist(), strict=True):
        members[group].append(color)
    return group_of_color, tuple(
        ColorGroup(tuple(members[g]), int(dimensions[g]), *orders.get(leader, ((), ((),))))
        for g, leader in enumerate(leaders.tolist())
    )


def _requirements(
    resolutions: tuple[Resolution, ...],
) -> dict[int, frozenset[tuple[int, int]]]:
    """The (resolution group, bit) pairs that pick each name in conflict."""
    pairs_of_name: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for resolution in resolutions:
        for bit, name in enumerate(resolution.names):
            pairs_of_name[name].add((resolution.group, bit))
    return {name: frozenset(pairs) for name, pairs in pairs_of_name.items()}
