"""What memory policies change of the price of a survey, by class of ops, values and uses.

Under a policy, some ops of a survey do not run (:mod:`toast.cost.residuals`).  Of a value class,
each member is then left whole, without its uses by ops that do not run, without its definition, or
not at all.  A residual that is kept stays in memory from its last use in the forward pass to its
last in the backward one.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
from collections.abc import Mapping

import numpy as np
from scipy import sparse

from toast.cost.entities import Bools, Floats, Ints
from toast.cost.overlap import bin_shares
from toast.cost.program_loops import LoopOps, loops_of
from toast.cost.residuals import Choices, Residuals, residuals_of
from toast.cost.tables import CopyPairs, Tables
from toast.program import Program, RunRange
from toast.space import Space

#: The kind of ops that give values their names.
_NAME = "sdy_sharding_constraint"


@dataclasses.dataclass(frozen=True)
class Leftover:
    """How much of each class is left under ``P`` policies."""

    #: ``[P, A]`` the share of value classes of which everything is left; of whose definitions, and
    #: of whose uses in the backward pass that is so, beside those.
    whole: Floats
    definition: Floats
    uses: Floats
    #: ``[P, O]`` the share of op classes that do not run.
    dead: Floats
    #: ``[P, B]`` the share of the work in each bin of products that is left.
    bins: Floats


@dataclasses.dataclass(frozen=True)
class PolicyTables:
    """The classes of a survey that policies concern.

    ``R`` residuals, ``N`` nodes, ``A`` value classes, ``V`` values in these (one of a loop over
    several ranges of runs is there for each range), ``O`` op classes.
    """

    residuals: Residuals
    #: ``[A]`` the value classes.
    classes: Ints
    #: ``[V]`` the values; the place of each one's class among these, and its share of the class;
    #: the node that computes it, and the residual that it is (-1 for none); whether the backward
    #: pass uses it, and whether a node does.
    values: Ints
    place: Ints
    share: Floats
    maker: Ints
    residual: Ints
    needed: Bools
    reused: Bools
    #: ``[X]`` the values that nodes use, as numbers among ``V``, and these nodes.
    used: Ints
    user: Ints
    #: ``[O]`` the op classes; ``[Y]`` the place among these of ops that are nodes, these nodes,
    #: and the share of each op in its class.
    op_classes: Ints
    op_place: Ints
    op_node: Ints
    op_share: Floats
    #: ``[products]`` the work of each product; and what of it is up to nodes: products, their nodes
    #: and the shares of the work.
    work: Floats
    working: tuple[Ints, Ints, Floats]
    #: The tables without the uses by nodes, and the rows of its uses and pairs in all tables.
    backward: Tables
    use_rows: Ints
    pair_rows: Ints
    #: ``[R]`` the places among ``A`` of the classes of a residual's values in both passes.
    residual_place: Ints
    forward_place: Ints
    #: ``[R]`` how often each value's bytes go through memory in a step if it is kept, beside the
    #: kernels that have it in memory anyway; the same in a program without blocks; and how often it
    #: is computed in a step.
    passes: Floats
    bare_passes: Floats
    runs: Floats
    #: ``[R]`` the share of its values that are in memory even if nothing asks to keep them: a
    #: program without blocks keeps these alone, in the element type of products if only these read
    #: them.
    stored: Floats
    #: ``[R, moments]`` how many of its values are in memory if it is kept, beside those of the
    #: forward pass that are there anyway, for each moment at which memory may peak; and how many
    #: are if they come back from the host before their first use.
    waiting: Floats
    fetched: Floats
    #: ``[R]`` whether its values stay on the device although they move to the host: XLA for TPUs
    #: moves those that are not in a loop just before it moves them back.
    stays: Bools
    #: ``[U]`` values without names that wait for the backward pass in a program without blocks: the
    #: places of their classes among ``A``, and a residual of the block of each.
    unnamed_place: Ints
    unnamed_like: Ints
    #: ``[U, moments]`` how many of them are in memory then.
    unnamed_waiting: Floats

    @functools.cached_property
    def is_input(self) -> Bools:
        """``[R]`` whether a residual is an argument of its block."""
        return np.array([r.is_input for r in self.residuals.named], dtype=bool)

    @functools.cached_property
    def sliced(self) -> Floats:
        """``[R]`` 1 for stacked arguments of the program of which each range has a slice, else 0.

        A loop is traced as one loop for each range.
        """
        some = [r.is_input and r.from_arguments and min(r.shares) < 1 for r in self.residuals.named]
        return np.array(some, dtype=np.float64)

    @functools.cached_property
    def slices(self) -> Floats:
        """``[R]`` how many slices add to the peak.

        Its moment is when the backward pass begins.  The gradients of the first range, which are as
        large as its slices, are not in memory then.
        """
        later = [RunRange.parse(r.block).first > 0 for r in self.residuals.named]
        return self.sliced * np.array(later, dtype=np.float64)

    @functools.cached_property
    def may_move(self) -> Bools:
        """``[R]`` whether moving a residual to the host frees memory of the device."""
        inside = np.array([r.from_arguments for r in self.residuals.named], dtype=bool)
        return ~inside & ~self.stays

    @functools.cached_property
    def may_share(self) -> Bools:
        """``[R]`` whether the backward pass can use the forward pass's copies of an argument."""
        return np.array([r.is_input and r.apart for r in self.residuals.named], dtype=bool)

    def leftover(self, choices: Choices) -> Leftover:
        """What is left under policies."""
        none = np.zeros((len(choices), 1), dtype=bool)
        runs = self.residuals.running(choices)
        made = np.concatenate([runs, ~none], axis=1)[:, self.maker]
        kept = ~made & np.concatenate([choices.present, none], axis=1)[:, self.residual]
        by_node = np.zeros(made.shape, dtype=bool)
        np.logical_or.at(by_node.T, self.used, runs[:, self.user].T)
        shared = np.concatenate([choices.shared, none], axis=1)[:, self.residual]
        whole = (by_node | (~self.reused & made)) & ~shared
        uses = ~whole & self.needed & (made | kept) & ~shared
        definition = (made & ~shared).astype(np.float64) - whole
        of_class = sparse.csr_array(
            (self.share, (np.arange(len(self.place)), self.place)),
            shape=(len(self.place), len(self.classes)),
        )
        of_op = sparse.csr_array(
            (self.op_share, (self.op_node, self.op_place)),
            shape=(self.residuals.graph.nodes, len(self.op_classes)),
        )
        left = [
            np.asarray(amount.astype(np.float64) @ of_class)
            for amount in (whole, definition, uses)
        ]  # fmt: skip
        dead = np.asarray((~runs).astype(np.float64) @ of_op)
        product, node, share = self.working
        spared = sparse.csr_array((share, (node, product)), shape=(runs.shape[1], len(self.work)))
        working = 1.0 - np.asarray((~runs).astype(np.float64) @ spared)
        return Leftover(left[0], left[1], left[2], dead, bin_shares(self.work, working))

    def held(self, choices: Choices) -> Floats:
        """``[P, R]`` how much of each residual waits in memory.

        What moves to the host leaves the memory of the device, but for what :attr:`stays`.
        """
        stored = np.where(choices.bare, self.stored, 1.0)
        waits = (choices.keep | (choices.move & self.stays & ~self.is_input)) * stored
        return waits - (choices.move & self.is_input & ~self.stays) + self.slices


def policy_tables(
    space: Space,
    tables: Tables,
    lanes: int,
    cuts: Mapping[str, tuple[int, ...]] | None = None,
) -> PolicyTables:
    """The tables of the policies of a survey; ``cuts`` as in :func:`residuals_of`.

    ``lanes`` are the elements of a row of the tiles of a device, 1 for none.
    """
    program, names = space.analysis.program, space.analysis.names
    found = residuals_of(program, cuts)
    is_node = np.zeros(len(program.ops), dtype=bool)
    is_node[found.ops] = True
    repeats = np.array(program.repeats, dtype=np.float64)
    maker_op = np.array([value.op for value in program.values], dtype=np.int64)
    # Value classes with values that nodes compute or use.
    by_node = is_node[names.use_op]
    concerned = is_node[maker_op]
    concerned[names.use_value[by_node]] = True
    for residual in found.named:
        concerned[list(residual.again)] = True
        concerned[residual.forward[-1]] = True
    classes = np.unique(tables.value_class[concerned])
    place_of = np.full(len(tables.values), -1, dtype=np.int64)
    place_of[classes] = np.arange(len(classes))
    parts = _ValueParts(program, found, np.flatnonzero(place_of[tables.value_class] >= 0))
    used, user = parts.uses(names.use_value[by_node], names.use_op[by_node])
    place = place_of[tables.value_class[parts.values]]
    weight = repeats[maker_op[parts.values]] * parts.shares
    share = weight / np.maximum(np.bincount(place, weight, len(classes)), 1e-300)[place]
    needed, reused = np.zeros((2, len(program.values)), dtype=bool)
    needed[names.use_value[~by_node]] = True
    reused[names.use_value[by_node]] = True
    op_classes, op_place = np.unique(space.classes.of_op[found.ops], return_inverse=True)
    count = np.maximum(space.classes.count[op_classes], 1)
    op_share = repeats[found.ops] * found.shares / count[op_place.reshape(-1)]
    backward, use_rows, pair_rows = _without_nodes(tables, tables.use_class[~by_node])
    products = np.flatnonzero((tables.ops.flops > 0)[space.classes.of_op])
    works = np.isin(found.ops, products)
    lives = _Lifetimes(space, tables)
    passes, bare_passes, stored, waiting, fetched = _kept_values(lives, tables, found, lanes)
    unnamed, unnamed_like, unnamed_waiting = _unnamed_values(lives, found)
    stays = np.array([lanes > 1 and r.apart for r in found.named], dtype=bool)
    fetched[stays] = 0.0
    return PolicyTables(
        residuals=found,
        classes=classes,
        values=parts.values,
        place=place,
        share=share,
        maker=parts.maker,
        residual=parts.residual,
        needed=needed[parts.values],
        reused=reused[parts.values],
        used=used,
        user=user,
        op_classes=op_classes,
        op_place=op_place.reshape(-1),
        op_node=found.nodes,
        op_share=op_share,
        work=tables.ops.flops[space.classes.of_op[products]] * repeats[products],
        working=(
            np.searchsorted(products, found.ops[works]), found.nodes[works], found.shares[works]
        ),
        backward=backward,
        use_rows=use_rows,
        pair_rows=pair_rows,
        residual_place=place_of[tables.value_class[[r.again[-1] for r in found.named]]],
        forward_place=place_of[tables.value_class[[r.forward[-1] for r in found.named]]],
        passes=passes,
        bare_passes=bare_passes,
        runs=np.array([
            repeats[maker_op[list(r.forward)]] @ np.array(r.shares) for r in found.named
        ], dtype=np.float64),
        stored=stored,
        waiting=waiting,
        fetched=fetched,
        stays=stays,
        unnamed_place=place_of[tables.value_class[unnamed]],
        unnamed_like=unnamed_like,
        unnamed_waiting=unnamed_waiting,
    )  # fmt: skip


class _ValueParts:
    """``[V]`` values of a survey, each as often as it has nodes or residuals of other ranges."""

    def __init__(self, program: Program, found: Residuals, values: Ints) -> None:
        self._nodes: dict[int, list[tuple[int, int, float]]] = collections.defaultdict(list)
        nodes = zip(found.ops.tolist(), found.nodes.tolist(), found.shares.tolist(), strict=True)
        for op, node, share in nodes:
            self._nodes[op].append((int(found.node_block[node]), node, share))
        kept: dict[int, list[tuple[int, int, float]]] = collections.defaultdict(list)
        for number, (residual, block) in enumerate(
            zip(found.named, found.residual_block.tolist(), strict=True)
        ):
            for value, share in zip(residual.again, residual.shares, strict=True):
                kept[value].append((block, number, share))
        rows: list[tuple[int, int, int, int, float]] = []
        #: The rows of each value, with their blocks.
        self._rows: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for value in values.tolist():
            made = self._nodes.get(program.values[value].op, [])
            if value in kept:
                here = [
                    (block, next((n for b, n, _ in made if b == block), made[0][1] if made else -1),
                     number, share)
                    for block, number, share in kept[value]
                ]  # fmt: skip
            else:
                here = [(block, node, -1, share) for block, node, share in made]
            for block, node, number, share in here or [(-1, -1, -1, 1.0)]:
                self._rows[value].append((len(rows), block))
                rows.append((value, block, node, number, share))
        columns = [np.array(column) for column in zip(*rows, strict=True)] or [np.zeros(0)] * 5
        self.values, _, self.maker, self.residual = (c.astype(np.int64) for c in columns[:4])
        self.shares: Floats = columns[4].astype(np.float64)

    def uses(self, values: Ints, ops: Ints) -> tuple[Ints, Ints]:
        """The rows of ``values``, each with a node of those of its use by the op of ``ops``."""
        found: list[tuple[int, int]] = []
        for value, op in zip(values.tolist(), ops.tolist(), strict=True):
            every = self._rows[value]
            for block, node, _ in self._nodes[op]:
                mine = [row for row, of in every if of == block] or [row for row, _ in every]
                found += [(row, node) for row in mine]
        used, user = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return used, user


def _without_nodes(tables: Tables, left: Ints) -> tuple[Tables, Ints, Ints]:
    """The tables with the use classes ``left`` alone, and the rows of its uses and pairs."""
    keeps = np.zeros(len(tables.uses), dtype=bool)
    keeps[left] = True
    use_rows, pairs = np.flatnonzero(keeps), tables.pairs
    pair_rows = np.flatnonzero(keeps[pairs.later] & keeps[pairs.earlier])
    number = np.cumsum(keeps) - 1
    fewer = dataclasses.replace(
        tables,
        uses=tables.uses.take(use_rows),
        pairs=CopyPairs(
            number[pairs.later[pair_rows]], number[pairs.earlier[pair_rows]],
            pairs.distance[pair_rows],
        ),
    )  # fmt: skip
    return fewer, use_rows, pair_rows


class _Lifetimes:
    """When the values of a survey are in memory, by op.

    ``end`` is the op at which a stored value is freed, -1 for others; ``last`` is after the last op
    that uses a value; ``moment_op`` is as in :func:`_moment_ops`.
    """

    def __init__(self, space: Space, tables: Tables) -> None:
        self.program, names = space.analysis.program, space.analysis.names
        program, events, block = self.program, tables.events, tables.columns["values"]
        freed = (events.column >= block.start) & (events.column < block.stop) & (events.sign < 0)
        self.end: Ints = np.full(len(program.values), -1, dtype=np.int64)
        self.end[events.value[freed]] = events.op[freed]
        for kind, op in zip(program.kinds, program.ops, strict=True):
            if kind == _NAME and op.results:  # a name is in the buffer of what it names
                value = op.results[0]
                self.end[[*op.results]] = max(self.end[value], self.end[op.operands[0]])
        self.last: Ints = np.array(program.makers, dtype=np.int64) + 1
        np.maximum.at(self.last, names.use_value, names.use_op + 1)  # operands come first
        self.moment_op = _moment_ops(tables)
        self.loops = _Loops(program)


def _kept_values(
    lives: _Lifetimes, tables: Tables, found: Residuals, lanes: int
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """The columns ``passes``, ``bare_passes``, ``stored``, ``waiting`` and ``fetched``."""
    program, end, last, moment_op = lives.program, lives.end, lives.last, lives.moment_op
    passes, bare, stored = np.zeros((3, len(found.named)))
    waiting, fetched = np.zeros((2, len(found.named), len(moment_op)))
    for number, residual in enumerate(found.named):
        pairs = zip(residual.forward, residual.again, residual.shares, strict=True)
        for before, after, part in pairs:
            one, two = program.values[before].op, program.values[after].op
            times = program.repeats[one] * part
            begin, stop, stacked = lives.loops.between(one, two)
            written, read = end[before] >= 0, end[after] >= 0
            share = part / sum(residual.shares)
            if not stacked:
                begin = end[before] if written else one
                stop = end[after] if read else last[after]
                share *= written or read
                # A program without blocks rounds what only products read.
                share *= tables.values.stored[tables.value_class[after]]
            # A kernel that the vector unit bounds has time to write and to read what is kept.  What
            # is stacked is copied by kernels of its own.
            write = 1.0 if written or stacked else 1.0 - tables.idle[before]
            fetch = 0.0 if read else 1.0 if stacked else 1.0 - tables.idle[after]
            fresh = (not written) * write + fetch
            # JAX rounds what it keeps, so that it is written once more, except in loops.
            passes[number] += (fresh if stacked else write + fetch) * times
            bare[number] += fresh * (share > 0) * times
            stored[number] += share
            fetch_ops = two, max(end[after], last[after])
            if stacked and lanes > 1:  # as in toast.cost.host_memory.moved_in_loops
                fetch_ops = begin, stop
            here = np.searchsorted(moment_op, [begin, stop, *fetch_ops])
            waiting[number, here[0] : here[1]] += (stacked or 1) * part
            fetched[number, here[2] : here[3]] += part
    return passes, bare, stored, waiting, fetched


def _unnamed_values(lives: _Lifetimes, found: Residuals) -> tuple[Ints, Ints, Floats]:
    """Values ``[U]`` of the columns ``unnamed_place``, and the other columns of these.

    A kernel of the backward pass reads such a value, but what follows from it has the name: scores
    of attention, beside their exponentials.  The survey computes them again; a program without
    blocks has them from the forward pass.
    """
    program = lives.program
    inside = {*found.ops.tolist()}
    named = {value for residual in found.named for value in residual.again}
    # The ops of named values of both passes, by block: what lies between them is in the same run.
    pairs: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for block, residual in zip(found.residual_block.tolist(), found.named, strict=True):
        pairs[block] += [
            (program.values[after].op, program.values[before].op)
            for before, after in zip(residual.forward, residual.again, strict=True)
            if not residual.is_input
        ]
    like = {block: number for number, block in enumerate(found.residual_block.tolist())}
    ends = {block: sorted(each) for block, each in pairs.items()}
    waits: list[tuple[int, int, Floats]] = []
    for op, node, share in zip(
        found.ops.tolist(), found.nodes.tolist(), found.shares.tolist(), strict=True
    ):  # fmt: skip
        block = int(found.node_block[node])
        for value in program.ops[op].results:
            end = int(lives.end[value])
            if end < 0 or end - 1 in inside or value in named or block not in ends:
                continue
            near = bisect.bisect_left(ends[block], (op, -1))
            forward = ends[block][min(near, len(ends[block]) - 1)][1]
            if lives.loops.between(forward, op)[2]:  # a loop only stacks what has a name
                continue
            here = np.searchsorted(lives.moment_op, [forward, op])
            waiting = np.zeros(len(lives.moment_op))
            waiting[here[0] : here[1]] = share
            waits.append((value, like[block], waiting))
    moments = np.array([waiting for *_, waiting in waits]).reshape(-1, len(lives.moment_op))
    values, residuals = np.array([each[:2] for each in waits], dtype=np.int64).reshape(-1, 2).T
    return values, residuals, moments


def _moment_ops(tables: Tables) -> Ints:
    """``[moments]`` the op of the last allocation before memory may peak, in order."""
    events = tables.events
    if not len(events):
        return np.zeros(0, dtype=np.int64)
    shrinks = np.zeros(len(events), dtype=bool)
    shrinks[1:] = (events.sign[1:] < 0) & (events.sign[:-1] > 0)
    ends = np.flatnonzero(np.append(shrinks[1:], True))
    return np.asarray(events.op[ends])


class _Loops:
    """The loops around ops."""

    def __init__(self, program: Program) -> None:
        self._loops, self._repeats = loops_of(program), program.repeats

    def _around(self, op: int) -> list[LoopOps]:
        """The loops around an op, the innermost first."""
        inside = [loop for loop in self._loops if loop.last_carry < op <= loop.end]
        return sorted(inside, key=lambda loop: loop.end - loop.begin)

    def between(self, one: int, other: int) -> tuple[int, int, int]:
        """The ops between which a stack of the values of ``one`` waits for ``other``; its length.

        A length of 0 is that of no stack.
        """
        mine, others = self._around(one), self._around(other)
        apart = [loop for loop in mine if loop not in others]
        later = [loop for loop in others if loop not in mine]
        if not apart or not later:
            return 0, 0, 0
        length = self._repeats[one] // max(1, self._repeats[apart[-1].begin])
        return apart[-1].begin, later[-1].end + 1, length


__all__ = ["Leftover", "PolicyTables", "policy_tables"]
