"""Prices of the states of a survey, each with its best memory policy.

The price of a state under a policy is that of the survey, which recomputes everything, less what
does not run (:mod:`toast.cost.policy_tables`).  For ``P`` policies and a batch of states, that is a
product of matrices.  The policies are a family that grows during a search
(:mod:`toast.search.policies`).  Memory is compared at a few moments of the step, at which it may
peak.

These prices are estimates.  The program that a policy makes is traced and priced again in the end.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from scipy import sparse

from toast.cost.cut import Members, Neighbourhoods
from toast.cost.entities import OP_SCOPES, Entity, Floats, Ints
from toast.cost.layout import Layout, held_by
from toast.cost.memo import GrowingArray, Memo, Numbers, rows_chosen
from toast.cost.model import CostModel
from toast.cost.policy_tables import policy_tables
from toast.cost.prices import Prices, Worth
from toast.cost.residuals import Choices, Recomputation
from toast.cost.terms import StepPart
from toast.program import MemoryPolicy
from toast.space import States

#: Parts of the step in each of which memory is compared at its highest moment, and the share of the
#: peak below which a moment is left out.
_PARTS, _LOW = 24, 0.5

#: States that are priced at once, and the most states that tell the moments of a step.
_BLOCK, _SAMPLES = 32, 12

#: The most policies of a family; later ones replace those that were best least often.
_FAMILY = 32

#: The share of the seconds with everything recomputed that is added to the price of a state: ops
#: that do not run under its best policy shall have useful shardings as well.
_AGAIN = 0.02

#: How often slices of stacked weights go through memory: they and their gradients are read and
#: written once.
_SLICED = 4

#: Added to the cost of states that do not fit, to rank them after those that do.
_OVER = 1e3


@dataclasses.dataclass(frozen=True)
class PolicyCosts:
    """What the residuals and the nodes of a survey cost under one state.

    ``R`` residuals, ``N`` nodes, ``M`` moments.  Residuals that are kept or offloaded add to the
    price of the survey; nodes that do not run are taken from it.
    """

    #: ``[N]`` seconds of a step for each node, infinite for what cannot run again; and ``[N, M]``
    #: the bytes of its values.
    node_seconds: Floats
    node_bytes: Floats
    #: ``[R]`` seconds to keep each residual, and to move it to the host and back; and seconds that
    #: are spared if the copies of an argument are used again, 0 if that is impossible.
    keep_seconds: Floats
    move_seconds: Floats
    share_seconds: Floats
    #: ``[R, M]`` bytes that a residual takes if it is kept; those that it frees if it is moved,
    #: negative where it comes back; and those that the copies of an argument take.
    kept_bytes: Floats
    freed_bytes: Floats
    shared_bytes: Floats
    #: ``[M]`` bytes of the survey; and the seconds in which it is busy.
    bytes: Floats
    busy_seconds: float


@dataclasses.dataclass(frozen=True)
class PricedPolicy:
    """A policy under one state, and its estimated price."""

    #: One policy.
    choices: Choices
    step_seconds: float
    peak_bytes: float
    argument_bytes: float


@dataclasses.dataclass(frozen=True)
class _Weighed:
    """``P`` policies as what they add to the price of a survey."""

    parts: npt.NDArray[np.float32]  # [P, A * 3] of the parts of value classes
    dead: Floats  # [P, O] share of op classes that does not run
    bins: Floats  # [P, B] share of the work of each bin of products that is left
    held: Floats  # [P, R] share of residuals that waits in memory
    copied: Floats  # [P, R] share of the copies of arguments that does
    passes: Floats  # [P, R] how often values of residuals go through memory
    moved: Floats  # [P, R] share of residuals that moves to the host
    unnamed: Floats  # [P, U] whether values without names wait


class PolicyModel(CostModel):
    """A cost model of a survey that prices each state with its best memory policy."""

    #: Small batches are not priced without a memo.
    priced_alone = False

    def __init__(
        self,
        plain: CostModel,
        memory_bytes: float,
        policies: Sequence[MemoryPolicy],
        state: States | None = None,
    ):
        """Prices for a limit of ``memory_bytes``; ``policies`` have the names of residuals.

        ``plain`` prices the survey as it is.  Memory is compared at moments at which it may peak in
        states that begin searches, and at those of ``state``.
        """
        _ = plain.policies  # once for all models of the plain one
        self.__dict__.update(plain.__dict__)
        self.__dict__.pop("quick_bound", None)
        #: The prices of the survey as it is.
        self.plain: CostModel | None = plain
        self.memory_bytes = memory_bytes
        self.first: Choices = self.policies.residuals.choices(policies)
        self._samples = _samples(plain)
        if state is not None:
            self._samples.append(plain.moments(state))

    def cut(self, cuts: Mapping[str, tuple[int, ...]], policies: Sequence[MemoryPolicy]) -> Self:
        """The same prices, with ranges of runs that decide on their own, between ``cuts``."""
        other = copy.copy(self)
        other.__dict__.pop("quick_bound", None)
        other.policies = policy_tables(self.space, self.tables, self.hardware.lanes, cuts)
        other.first = other.policies.residuals.choices(policies)
        return other

    def for_search(self) -> Self:
        """As :meth:`CostModel.for_search`."""
        slim = super().for_search()
        slim.plain = None
        return slim

    def memo(self, memory_bytes: float) -> PolicyMemo:
        """A memo with a family of its own."""
        return PolicyMemo(self, memory_bytes)

    @functools.cached_property
    def quick_bound(self) -> float:
        """The lower bound, without what policies may spare."""
        if (self.space.axis_sizes > 1).sum() > 3:
            return 0.0
        choices = self.policies.residuals.everything
        left = np.ones(len(self.tables.ops))
        left[self.policies.op_classes] -= self.policies.leftover(choices).dead[0]
        return float(sum(
            float(seconds.min()) * share
            for seconds, share in zip(self.class_seconds(), left.tolist(), strict=True)
        ))  # fmt: skip

    def price(self, states: States) -> Prices:
        """The prices of the survey, with the seconds and the peak of the best policy."""
        assert self.plain is not None
        prices, worth = self.plain.price(states), self.memo(self.memory_bytes).price(states)
        return dataclasses.replace(prices, seconds=worth.seconds, peak_bytes=worth.peak_bytes)


def _samples(model: CostModel) -> list[Floats]:
    """``[moments]`` memory over a step, for states that begin searches."""
    space = model.space
    states = [space.initial]
    if space.actions:
        places = np.linspace(0, len(space.actions) - 1, min(_SAMPLES, len(space.actions)))
        states += [*space.apply_each(space.initial, sorted({*places.astype(int).tolist()}))]
    return [model.moments(state) for state in states]


class PolicyMemo(Memo):
    """Prices states of a survey with the best policy of a family that grows."""

    def __init__(self, model: PolicyModel, memory_bytes: float) -> None:
        self._policies, self._memory = model.policies, memory_bytes
        self._behind = Neighbourhoods(self._policies.backward)
        #: The family; the first policy recomputes everything.
        none = np.zeros((1, len(model.policies.may_share)), dtype=bool)
        full = Choices(none, none, none, none)
        self.choices = Choices.joined([full, model.first])
        self._best_for = np.zeros(len(self.choices), dtype=np.int64)
        self._policy_model = model
        self._moments = self._highest(model)
        tables = model.tables
        #: ``[columns, M]`` how often each column is in memory, in the order that products need.
        self._live = np.ascontiguousarray(_up_to(tables.growth, self._moments).T)
        self._waiting = self._policies.waiting[:, self._moments]
        self._fetched = self._policies.fetched[:, self._moments]
        self._unnamed = self._policies.unnamed_waiting[:, self._moments]
        self._rows_of = np.full(len(tables.values), -1, dtype=np.int64)
        self._rows_of[self._policies.classes] = np.arange(len(self._policies.classes))
        self._op_rows = {
            term.name: _places(self._policies.op_classes, tables.op_class(term.scope))
            for term in model.terms if term.scope in OP_SCOPES
        }  # fmt: skip
        super().__init__(model)
        self._reweigh()

    def _highest(self, model: PolicyModel) -> Ints:
        """Moments at which memory may peak, with everything recomputed or with everything kept."""
        t = self._policies
        moments = t.waiting.shape[1]
        if not moments:
            return np.zeros(0, dtype=np.int64)
        size = model.tables.values.bytes[t.classes[t.residual_place]]
        kept = (size * ~t.is_input) @ t.waiting / max(1, model.machine.devices[-1])
        part = np.minimum(np.arange(moments) * _PARTS // moments, _PARTS - 1)
        found: set[int] = set()
        for curve in model._samples:
            for live in (curve, curve + kept, curve + kept * model.machine.devices[-1]):
                for number in range(_PARTS):
                    here = np.flatnonzero(part == number)
                    if len(here):
                        top = int(here[np.argmax(live[here])])
                        if live[top] >= _LOW * live.max():
                            found.add(top)
        return np.array(sorted(found), dtype=np.int64)

    def _forget(self) -> None:
        super()._forget()
        width = self._width = len(StepPart) + 1 + len(self._tables.windows.room)
        self._memory_at = GrowingArray((len(self._moments),))
        #: The row of a neighbourhood in the arrays below; 0 is that of no price.
        self._row = GrowingArray((), np.int32)
        wide = width + 1 + len(self._moments)
        # Everything, the definition, the uses in the backward pass; and the bytes of a value.
        self._parts = GrowingArray((3, wide), np.float32)
        self._parts.append(np.zeros((1, 3, wide), dtype=np.float32))
        self._size = GrowingArray((2,))
        self._size.append(np.zeros((1, 2)))

    def _reweigh(self) -> None:
        self._weighed = self._weigh(self.choices)

    def _weigh(self, choices: Choices) -> _Weighed:
        t, left = self._policies, self._policies.leftover(choices)
        some = np.stack([left.whole - 1.0, left.definition, left.uses], axis=2)
        passes = np.where(choices.bare, t.bare_passes, t.passes) * choices.present
        passes += _SLICED * t.runs * t.sliced
        parts = np.asarray(some.reshape(len(some), 3 * len(t.classes)), dtype=np.float32)
        shared, moved = (each.astype(np.float64) for each in (choices.shared, choices.move))
        unnamed = choices.bare[:, t.unnamed_like].astype(np.float64)
        return _Weighed(
            parts, left.dead, left.bins, t.held(choices), shared, passes, moved, unnamed
        )

    # -- the family --------------------------------------------------------------------------

    @property
    def recomputation(self) -> Recomputation:
        """What can run again."""
        return self._policies.residuals.graph

    def within(self, memory_bytes: float) -> PolicyMemo:
        """The same prices for another limit."""
        other = copy.copy(self)
        other._memory = memory_bytes
        return other

    def most_bytes(self, state: States) -> float:
        """The highest peak of a state that is within the limit, with the odds of the model."""
        _, survey = self._survey(state[None])
        resident = float(survey[0, self._width])
        least = self._model.needed_bytes(resident, resident)
        more = self._model.needed_bytes(resident, resident + self._memory) - least
        return resident + (self._memory - least) * self._memory / max(more, 1.0)

    def add(self, choices: Choices) -> int:
        """Adds policies that the family does not have; returns how many are new."""
        known, new = {*self.choices.keys()}, []
        for number, key in enumerate(choices.keys()):
            if key not in known:
                known.add(key)
                new.append(number)
        if not new:
            return 0
        often = np.argsort(-self._best_for[1:], kind="stable")[: max(1, _FAMILY - 1 - len(new))]
        stay = np.concatenate([[0], 1 + np.sort(often)])
        self.choices = Choices.joined([self.choices.take(stay), choices.take(np.array(new))])
        self._best_for = np.concatenate([self._best_for[stay], np.zeros(len(new), dtype=np.int64)])
        self._reweigh()
        return len(new)

    # -- prices ------------------------------------------------------------------------------

    def price(self, states: States) -> Worth:
        """Step time and peak of ``states`` (``[S, classes, axes]``) with the best policies."""
        parts = [self._best(states[n : n + _BLOCK]) for n in range(0, len(states), _BLOCK)]
        return Worth(*(np.concatenate(of_all) for of_all in zip(*parts, strict=True)))

    def _best(self, states: States) -> Worth:
        priced = self._priced(states, self._weighed)
        rank = self._rank(priced).reshape(len(states), -1)
        best = np.argmin(rank, axis=1)
        self._best_for += np.bincount(best, minlength=len(self._best_for))
        at = np.arange(len(states)) * rank.shape[1] + best
        again = priced.seconds.reshape(rank.shape)[:, 0]
        chosen = Worth(*(amount[at] for amount in priced))
        return chosen._replace(seconds=chosen.seconds + _AGAIN * again)

    def _rank(self, priced: Worth) -> Floats:
        over = ~self._model.fits(priced, self._memory)
        return np.asarray(self._model.cost(priced, self._memory) + _OVER * over)

    def best_of(self, state: States, others: Choices | None = None) -> PricedPolicy:
        """The best policy of the family, or of others, for a state, with its price."""
        choices = self.choices if others is None else Choices.joined([self.choices, others])
        priced = self._priced(
            state[None], self._weighed if others is None else self._weigh(choices)
        )
        best = int(np.argmin(self._rank(priced)))
        return _one(priced, best, choices.take(slice(best, best + 1)))

    def front(self, state: States) -> Choices:
        """The policies of the family with the shortest step in their memory, the least first."""
        priced = self._priced(state[None], self._weighed)
        order = np.lexsort([priced.seconds, priced.peak_bytes])
        least = np.minimum.accumulate(np.append(np.inf, priced.seconds[order]))
        return self.choices.take(order[priced.seconds[order] < least[:-1]])

    def policy(self, state: States, choices: Choices) -> PricedPolicy:
        """The price of a state under one policy."""
        return _one(self._priced(state[None], self._weigh(choices)), 0, choices)

    def _priced(self, states: States, policies: _Weighed) -> Worth:
        """``[S * P]`` the prices of states (``[S, classes, axes]``) under ``P`` policies."""
        t, hardware = self._policies, self._model.hardware
        numbers, survey = self._survey(states)
        count, many = len(states), len(policies.dead)
        rows = self._row.array[numbers[:, t.classes]]
        shape = (count, policies.parts.shape[1], self._parts.array.shape[-1])
        parts = self._parts.array[rows].reshape(shape)
        every = survey[:, None] + np.matmul(policies.parts, parts).astype(np.float64)
        products = survey[:, StepPart.PRODUCTS].copy()  # those of the survey
        for term, seconds in self._model.op_work(held_by(self._tables, states)):
            place = self._op_rows[term.name]
            here = np.flatnonzero(place >= 0)
            products += seconds.sum(axis=1) * (term.part is StepPart.PRODUCTS)
            spared = seconds[:, here] @ policies.dead[:, place[here]].T
            every[..., term.part] += seconds.sum(axis=1)[:, None] - spared
        size, copied = np.moveaxis(self._size_of(numbers), 2, 0)  # [S, R]
        every[..., StepPart.MEMORY] += size @ policies.passes.T / hardware.memory_bytes_per_s
        if policies.moved.any():
            moved = 2.0 * (size * t.runs) @ policies.moved.T
            every[..., StepPart.HOST] += moved / hardware.host_bytes_per_s
        width = self._width
        live = every[..., width + 1 :]
        live += (size[:, None] * policies.held + copied[:, None] * policies.copied) @ self._waiting
        live += (size[:, None] * policies.moved) @ self._fetched
        if policies.unnamed.any():
            rows = self._row.array[numbers[:, t.classes[t.unnamed_place]]]
            live += (self._size.array[rows][:, None, :, 0] * policies.unnamed) @ self._unnamed
        resident = np.repeat(every[:, 0, width], many)
        flat = every.reshape(count * many, -1)
        step, spent = flat[:, : len(StepPart)].T, flat[:, len(StepPart) : width]
        hidden = self._model.hidden(
            np.repeat(products, many), spent[:, 0], spent[:, 1:], np.tile(policies.bins, (count, 1))
        )
        hidden = np.minimum(hidden, step[StepPart.PRODUCTS])
        busy, waiting = self._model.step_seconds(step, spent[:, 0], hidden)
        highest = live.reshape(count * many, -1).max(axis=1, initial=0.0)
        peak = resident + self._model.machine.in_memory(highest)
        return Worth(busy + waiting, peak, resident)

    def _size_of(self, numbers: Numbers) -> Floats:
        """``[S, R, 2]`` bytes of a value of each residual, and of its copies.

        What is kept has the sharding of the pass in which it is smaller.
        """
        t = self._policies
        again, forward = (
            self._size.array[self._row.array[numbers[:, t.classes[place]]]]
            for place in (t.residual_place, t.forward_place)
        )
        least = np.minimum(again[..., 0], forward[..., 0])
        return np.stack([least, again[..., 1]], axis=2)

    def _survey(self, states: States) -> tuple[Numbers, Floats]:
        """The neighbourhoods of states, and the prices of the survey without the work of ops.

        ``[S, C]``; and ``[S, columns]``: seconds by part of the step, of collectives, and of those
        in each window; resident bytes; and the bytes at each moment.
        """
        numbers = self._lookup(states)
        first = np.arange(len(states) + 1) * numbers.shape[1]
        chosen = rows_chosen(numbers.reshape(-1), first, len(self._sums.array))
        sums, steps = np.asarray(chosen @ self._sums.array), len(StepPart)
        spent = sums[:, self._spending :]
        spent = spent + self._traded(states, numbers, sums[:, steps + 1 : self._spending])
        resident = sums[:, steps] + self._model.captured_bytes
        live = np.asarray(chosen @ self._memory_at.array)
        return numbers, np.concatenate([sums[:, :steps], spent, resident[:, None], live], axis=1)

    def costs(self, state: States) -> PolicyCosts:
        """What residuals and nodes cost under a state (``[classes, axes]``)."""
        t, hardware = self._policies, self._model.hardware
        numbers, survey = self._survey(state[None])
        parts = self._parts.array[self._row.array[numbers[0, t.classes]]].astype(np.float64)
        width, steps, nodes = self._width, len(StepPart), t.residuals.graph.nodes
        step, seconds = survey[0, :steps].copy(), np.zeros(nodes)
        for term, work in self._model.op_work(held_by(self._tables, state[None])):
            step[term.part] += work.sum()
            place = self._op_rows[term.name]
            here = np.flatnonzero(place >= 0)
            of_class = np.bincount(place[here], work[0, here], minlength=len(t.op_classes))
            seconds += np.bincount(t.op_node, of_class[t.op_place] * t.op_share, minlength=nodes)
        spent = survey[:, steps:width]
        hidden = self._model.hidden(step[None, StepPart.PRODUCTS], spent[:, 0], spent[:, 1:])
        busy, _ = self._model.step_seconds(step[:, None], spent[:, 0], hidden)
        seen = 1.0 - float(hidden[0]) / max(float(spent[0, 0]), 1e-300)
        amount = parts[..., : StepPart.HOST].sum(axis=2) + seen * parts[..., steps]  # [A, 3]
        live = parts[..., width + 1 :]
        made = np.flatnonzero(t.maker >= 0)
        # What a value costs beside its definition and the backward pass is up to the nodes.
        rest = amount[:, 0] - amount[:, 1:].sum(axis=1)
        rest_live = live[:, 0] - live[:, 1:].sum(axis=1)
        users = np.bincount(t.used, minlength=len(t.place))[t.used]
        share, place = t.share[t.used] / np.maximum(users, 1), t.place[t.used]
        seconds += np.bincount(
            t.maker[made], t.share[made] * amount[t.place[made], 1], minlength=nodes
        )
        seconds += np.bincount(t.user, share * rest[place], minlength=nodes)
        of_node = np.concatenate([t.maker[made], t.user])
        added = sparse.csr_array(
            (np.ones(len(of_node)), (of_node, np.arange(len(of_node)))), shape=(nodes, len(of_node))
        )
        node_live = added @ np.concatenate([
            t.share[made, None] * live[t.place[made], 1], share[:, None] * rest_live[place],
        ])  # fmt: skip
        again = np.flatnonzero(t.residual >= 0)
        spared = np.bincount(
            t.residual[again], t.share[again] * amount[t.place[again], 1:].sum(axis=1),
            minlength=len(t.may_share),
        )  # fmt: skip
        size, copied = self._size_of(numbers)[0].T[..., None]
        live_at = survey[0, width + 1 :] + (size[:, 0] * t.slices) @ self._waiting
        return PolicyCosts(
            node_seconds=np.maximum(seconds, 0.0),
            node_bytes=node_live,
            keep_seconds=size[:, 0] * t.passes / hardware.memory_bytes_per_s,
            move_seconds=np.where(
                t.may_move & hardware.has_host_link,
                2.0 * size[:, 0] * t.runs / hardware.host_bytes_per_s,
                np.inf,
            ),
            share_seconds=np.where(t.may_share & (copied[:, 0] > 0), spared, 0.0),
            kept_bytes=size * self._waiting * ~t.is_input[:, None],
            freed_bytes=size * (self._waiting * t.is_input[:, None] - self._fetched),
            shared_bytes=copied * self._waiting * t.may_share[:, None],
            bytes=survey[0, width] + live_at,
            busy_seconds=float(busy[0]),
        )

    # -- neighbourhoods ----------------------------------------------------------------------

    def _remember(self, states: States, rows: Ints, values: Ints, held: sparse.csr_array) -> None:
        concerned = np.flatnonzero(self._rows_of[values] >= 0)
        row = np.zeros(len(values), dtype=np.int32)
        row[concerned] = len(self._parts.array) + np.arange(len(concerned))
        live = np.asarray(held @ self._live)
        if len(concerned):
            self._remember_parts(states, rows[concerned], values[concerned], live[concerned])
        self._memory_at.append(live)
        self._row.append(row)

    def _remember_parts(self, states: States, rows: Ints, values: Ints, live: Floats) -> None:
        """The parts of neighbourhoods that policies may leave."""
        model, steps, width = self._model, len(StepPart), self._width
        parts = np.zeros((len(values), 3, width + 1 + len(self._moments)))
        piece, layout = self._cut(states, rows, values)
        behind = self._behind.cut(values)
        t = self._policies
        rows_of = {Entity.USE_CLASS: t.use_rows, Entity.COPY_PAIR: t.pair_rows}
        members = {
            entity: Members(own.owner, rows_of[entity][own.row] if entity in rows_of else own.row)
            for entity, own in behind.members.items()
        }
        held = held_by(self._tables, states[rows[behind.ops.owner], behind.ops.row][None])
        later = (
            dataclasses.replace(behind, members=members),
            Layout(behind.tables, model.machine, held, None),
        )
        both = frozenset({Entity.VALUE_CLASS, Entity.USE_CLASS, Entity.COPY_PAIR})
        uses = both - {Entity.VALUE_CLASS}
        for number, ((cut, at), scopes) in enumerate([
            ((piece, layout), both), ((piece, layout), both - uses), (later, uses),
        ]):  # fmt: skip
            for term, seconds in model.work(at):
                if term.scope in scopes:
                    parts[:, number, term.part] += cut.total(term.scope, seconds)
            moved = (m for m in model.traffic(at, ordered=False) if m.term.scope in scopes)
            parts[:, number, steps:width] = self._spent(cut, moved)
            if number:
                some = self._held(cut, at, scopes)
                parts[:, number, width + 1 :] = np.asarray(some @ self._live)
        parts[:, 0, width + 1 :] = live
        self._parts.append(parts.astype(np.float32))
        cut, at = later
        copies = np.where(at.shared, 0.0, at.copies)
        self._size.append(
            np.stack([
                # What is kept is not rounded, whoever reads it.
                piece.total(Entity.VALUE_CLASS, layout.unrounded_memory),
                cut.total(Entity.USE_CLASS, copies),
            ], axis=1)
        )  # fmt: skip


def _one(priced: Worth, row: int, choices: Choices) -> PricedPolicy:
    return PricedPolicy(choices, *(float(amount[row]) for amount in priced))


def _up_to(growth: sparse.csr_array, moments: Ints) -> Floats:
    """``[M, columns]`` how often each column is in memory at each of some moments."""
    if not len(moments):
        return np.zeros((0, growth.shape[1]))
    block = np.searchsorted(moments, np.arange(growth.shape[0]))
    here = np.flatnonzero(block < len(moments))
    blocks = sparse.csr_array(
        (np.ones(len(here)), (block[here], here)), shape=(len(moments), growth.shape[0])
    )
    return np.asarray(np.cumsum((blocks @ growth).toarray(), axis=0))


def _places(some: Ints, of: Ints) -> Ints:
    """The place of each number of ``of`` in ``some``, which is sorted; -1 if it is not there."""
    if not len(some):
        return np.full(len(of), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(some, of), len(some) - 1)
    return np.where(some[place] == of, place, -1)


__all__ = ["PolicyCosts", "PolicyMemo", "PolicyModel", "PricedPolicy"]
