"""Prices of states that differ from a priced one in few op classes.

A price is a few sums over classes (:class:`toast.cost.prices.Parts`) and what follows from them.
Another state touches some op classes, and so the values that they make or use.  States that touch
about the same classes are priced together: the tables are cut down to these, the sums are taken of
the states and of the one that they are near, and what they differ in is put on its whole sums.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from toast.cost.prices import Parts, Prices, joined
from toast.cost.tables import Tables
from toast.space import States

if TYPE_CHECKING:
    from toast.cost.layout import Layout
    from toast.cost.model import CostModel

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: What another batch costs, beside its states: as much as so many op classes of one state.
_OPENING = 1500

#: Op classes whose price depends on one that is touched, itself included: about.
_NEIGHBOURS = 1.5


class Near:
    """Prices states by what differs from one of them, ``state`` (``[classes, axes]``)."""

    def __init__(self, model: CostModel, state: States) -> None:
        self._model = model
        self._state = state[None]
        self._whole: dict[bytes, Parts] = {}

    def price(self, states: States) -> Prices:
        """Prices of ``states`` (``[S, classes, axes]``).

        They are those of :meth:`CostModel.price`, but for rounding, on any number of threads.
        """
        model = self._model
        touched = (states != self._state).any(axis=2)
        batches, rest = _batches(touched)
        if not batches:
            return model.price(states)
        jobs: list[tuple[Ints, Ints]] = []
        total = 0.0
        for rows in batches:
            classes = np.flatnonzero(touched[rows].any(axis=0))
            share = min(1.0, len(classes) * _NEIGHBOURS / touched.shape[1])
            work = len(rows) * share * len(model.tables.value_slot)
            jobs += [(part, classes) for part in np.array_split(rows, model.threads_for(work))]
            total += work
        found = model.on_threads(lambda job: self._changed(states[job[0]], job[1]), jobs, total)
        order = [rows for rows, _ in jobs]
        if len(rest):
            found.append(model.price(states[rest]))
            order.append(rest)
        return joined(found).of(np.argsort(np.concatenate(order)))

    @functools.cached_property
    def _layout(self) -> Layout:
        return self._model.layout(self._state)

    def _changed(self, states: States, classes: Ints) -> Prices:
        """Prices of states that touch ``classes`` only."""
        tables, ops, values, moments = cut(self._model.tables, classes)
        small = self._model.with_tables(tables, ops, values)
        layout = small.layout(np.concatenate([self._state, states])[:, ops])
        major = self._layout.major + (layout.major - layout.major[:1])
        # Another order of the axes changes what shards do everywhere: each has its own base.
        stand = np.sign(major[:, :, None] - major[:, None, :])[1:].reshape(len(states), -1)
        _, first, base = np.unique(stand, axis=0, return_index=True, return_inverse=True)
        base = base.ravel()
        rows = np.concatenate([np.zeros(len(first), dtype=np.int64), np.arange(len(states)) + 1])
        major = np.concatenate([major[first + 1], major[1:]])
        part = small.parts(dataclasses.replace(layout.of(rows), major=major))
        whole = [self._parts(stand[i], major[p]) for p, i in enumerate(first.tolist())]
        changed = []
        for name, sums in zip(Parts._fields, part, strict=True):
            total = np.concatenate([getattr(parts, name) for parts in whole])
            if name == "growth" and total.shape[1]:
                # Between moments that what is touched changes, memory is highest where it was.
                highest = np.maximum.reduceat(np.cumsum(total, axis=1), moments, axis=1)
                total = np.diff(highest, prepend=0.0)
            changed.append(total[base] + (sums[len(first) :] - sums[base]))
        return self._model.prices(Parts(*changed))

    def _parts(self, stand: Ints, major: Ints) -> Parts:
        """The parts of the state if axes stand to each other like this."""
        key = stand.tobytes()
        if key not in self._whole:
            layout = dataclasses.replace(self._layout, major=major[None])
            self._whole[key] = self._model.parts(layout)
        return self._whole[key]


def _batches(touched: Bools) -> tuple[list[Ints], Ints]:
    """States (``[S, K]``: the classes that each touches) in batches, and those that are left.

    States that touch the same go together, and others as long as a batch of their own costs more.
    """
    number, classes = touched.shape
    packed = np.packbits(touched, axis=1)
    alike = np.unique(packed, axis=0, return_inverse=True)[1].ravel()
    order = np.argsort(alike, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(alike[order])) + 1) if number else []
    open_: list[Ints] = []
    union = np.zeros(classes, dtype=bool)
    found: list[tuple[Ints, int]] = []

    def close() -> None:
        if open_:
            found.append((np.concatenate(open_), int(union.sum())))

    for group in groups:
        here = touched[group[0]]
        states = sum(map(len, open_))
        wider = union | here
        apart = states * int(union.sum()) + len(group) * int(here.sum())
        together = (states + len(group)) * int(wider.sum())
        if open_ and (together - apart) * _NEIGHBOURS > _OPENING:
            close()
            open_, wider = [], here
        open_.append(group)
        union = wider
    close()
    worth = [
        _OPENING + len(rows) * size * _NEIGHBOURS < len(rows) * classes for rows, size in found
    ]
    batches = [rows for (rows, _), good in zip(found, worth, strict=True) if good]
    rest = [rows for (rows, _), good in zip(found, worth, strict=True) if not good]
    return batches, np.concatenate([*rest, np.zeros(0, dtype=np.int64)])


def cut(tables: Tables, classes: Ints) -> tuple[Tables, Ints, Ints, Ints]:
    """Tables of what depends on op ``classes`` only.

    Returns them, the op and the value classes that they speak of, and the moments at which memory
    changes by what they speak of, with the first.
    """
    t = tables
    touched = np.zeros(len(t.count), dtype=bool)
    touched[classes] = True
    # Values that they make or use, and those whose sums or buffers depend on these.
    changed = touched[t.slot_class[t.value_slot]]
    changed[t.use_value[touched[t.slot_class[t.use_slot]]]] = True
    depends = np.concatenate([t.merge_class, t.product_operand])
    on = np.concatenate([t.merge_with, t.product_result])
    changed[depends[changed[on]]] = True
    needed = changed.copy()
    needed[on[changed[depends]]] = True
    value, new_value = _kept(needed)
    use, new_use = _kept(needed[t.use_value])
    of_classes = touched.copy()
    of_classes[t.slot_class[t.value_slot[value]]] = True
    of_classes[t.slot_class[t.use_slot[use]]] = True
    op, new_op = _kept(of_classes)
    tensor = np.flatnonzero(touched[t.tensor_class])
    product = np.flatnonzero(touched[t.product_class])
    slots = np.zeros(len(t.slot_class), dtype=bool)
    slots[t.value_slot[value]] = slots[t.use_slot[use]] = slots[t.tensor_slot[tensor]] = True
    slot, new_slot = _kept(slots)
    use_value = new_value[t.use_value[use]]
    first = np.flatnonzero(np.diff(use_value, prepend=-1))
    merge = np.flatnonzero(needed[t.merge_class] & needed[t.merge_with])
    taken = np.flatnonzero(needed[t.product_operand] & needed[t.product_result])
    pairs, columns = [], [value, len(t.value_slot) + use]
    offset = len(t.value_slot) + len(t.use_slot)
    for later, earlier in t.pairs:
        here = np.flatnonzero(needed[t.use_value[later]])
        pairs.append((new_use[later[here]], new_use[earlier[here]]))
        columns.append(offset + here)
        offset += len(later)
    columns += [offset + number * len(t.value_slot) + value for number in range(3)]
    growth = t.growth_by_column[:, np.concatenate(columns)]
    moments = np.unique(np.append(growth.indices, 0))[: growth.shape[0]]
    arguments, results = t.argument_columns, t.result_columns
    return dataclasses.replace(
        t,
        slot_class=new_op[t.slot_class[slot]], slot_dim=t.slot_dim[slot],
        count=t.count[op], flops=t.flops[op], matmul=t.matmul[op], halo=t.halo[op],
        tensor_slot=new_slot[t.tensor_slot[tensor]], tensor_class=new_op[t.tensor_class[tensor]],
        tensor_bytes=t.tensor_bytes[tensor],
        product_class=new_op[t.product_class[product]], product_size=t.product_size[product],
        product_group=t.product_group[product],
        value_slot=new_slot[t.value_slot[value]], value_count=t.value_count[value],
        value_bytes=t.value_bytes[value], value_sizes=t.value_sizes[value],
        value_written=t.value_written[value], value_merged=t.value_merged[value],
        value_transcendentals=t.value_transcendentals[value], summed_whole=t.summed_whole[value],
        reduces=t.reduces[value],
        product_operand=new_value[t.product_operand[taken]],
        product_result=new_value[t.product_result[taken]], product_along=t.product_along[taken],
        use_value=use_value, use_slot=new_slot[t.use_slot[use]],
        use_first=first, used_value=use_value[first],
        use_count=t.use_count[use], use_number=t.use_number[use], use_reads=t.use_reads[use],
        use_constant=t.use_constant[use], use_share=t.use_share[use],
        merge_class=new_value[t.merge_class[merge]], merge_with=new_value[t.merge_with[merge]],
        merge_share=t.merge_share[merge],
        windows=t.windows.of_classes(value, use),
        pairs=tuple(pairs), growth=growth.tocsr()[moments],
        argument_columns=new_value[arguments[needed[arguments]]],
        result_columns=new_use[results[needed[t.use_value[results]]]],
    ), op, value, moments  # fmt: skip


def _kept(needed: Bools) -> tuple[Ints, Ints]:
    """Places that are needed, and the new number of each (of others: no place)."""
    places = np.flatnonzero(needed)
    numbers = np.full(len(needed), -1, dtype=np.int64)
    numbers[places] = np.arange(len(places))
    return places, numbers
