"""Arguments that a step returns without donating them, and the reshard that this costs.

A train step that takes and returns its parameters is called with its own results.  Where they are
not donated, nothing makes a result have the sharding of the argument that it becomes: the reshard
between two steps is no part of the program, nor of its price.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from toast.analysis import Analysis
from toast.cost import CostModel
from toast.program import Program, Spec, element_bytes
from toast.units import size_text, time_text

#: A path: the name of an argument, or of the result, and its keys.
_PATH = re.compile(r"([^\[.]*)(.*)", re.DOTALL)

#: Share of the arrays of a tree that must be updates of their arguments: gradients have the tree of
#: the parameters too, but nobody calls a step with them.
_UPDATES = 0.5


@dataclasses.dataclass(frozen=True)
class ReturnedTree:
    """An argument whose tree a program returns, without donating it."""

    #: ``params``, and where it is returned: ``result[0]``.
    argument: str
    result: str
    #: Its place among the positional arguments, as ``donate`` names it; -1 for a keyword argument.
    position: int
    #: Arguments and results of the program, by number, that are the same leaf of the tree.
    pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class StepReshard:
    """What it takes to call a step again with the results of the last one."""

    tree: ReturnedTree
    #: Arrays that leave with another sharding than they come in with.
    arrays: int
    #: Seconds of their collectives, and bytes per device that they receive.
    seconds: float
    bytes: float

    @property
    def text(self) -> str:
        """One line: what happens, what it costs, and what to do."""
        tree = self.tree
        remedy = f"donate=({tree.position},), or --donate {tree.position}"
        if tree.position < 0:
            remedy = f"jax.jit(donate_argnames={tree.argument!r})"
        if not self.arrays:
            return (
                f"{tree.argument} is returned as {tree.result} but not donated, so that old and "
                f"new values need memory at once; if the results are the next step's arguments, "
                f"give {remedy}"
            )
        return (
            f"{tree.argument} is returned as {tree.result} but not donated: {self.arrays} of "
            f"{len(tree.pairs)} arrays leave with another sharding than they come in with, and "
            f"the step time leaves out {time_text(self.seconds)} to reshard "
            f"{size_text(self.bytes)} between steps; if the results are the next step's "
            f"arguments, give {remedy}"
        )


def step_reshards(
    model: CostModel, argument_spec: Callable[[int], Spec], result_specs: Sequence[Spec]
) -> tuple[StepReshard, ...]:
    """The reshards between two steps of a program, one for each tree that it returns.

    ``argument_spec`` is the sharding of an argument, by number; ``result_specs`` are those of the
    results.
    """
    program = model.space.analysis.program
    found = []
    for tree in returned_trees(model.space.analysis):
        arrays, seconds, size = 0, 0.0, 0.0
        for argument, result in tree.pairs:
            type_ = program.values[program.argument_values[argument]].type
            before, after = result_specs[result], argument_spec(argument)
            if before != after:
                whole = element_bytes(type_.dtype) * math.prod(type_.shape)
                taken, received = _reshard(model, whole, before, after)
                arrays, seconds, size = arrays + 1, seconds + taken, size + received
        found.append(StepReshard(tree, arrays, seconds, size))
    return tuple(found)


def _reshard(model: CostModel, size: float, before: Spec, after: Spec) -> tuple[float, float]:
    """Seconds to reshard an array of ``size`` bytes, and bytes of the collectives' results."""
    names = model.space.mesh.names
    was, now = (
        {axis: dimension for dimension, axes in enumerate(spec) for axis in axes}
        for spec in (before, after)
    )
    gathered = [axis for axis in names if axis in was and axis not in now]
    moved = [axis for axis in names if axis in was and axis in now and was[axis] != now[axis]]
    # Axes that stay may change places within a dimension.
    order = [[axis for axis in axes if axis in was and axis in now] for axes in after]
    swapped = [
        axis for axes, earlier in zip(order, before, strict=True) for axis in axes
        if axes != [a for a in earlier if a in now] and axis not in moved
    ]  # fmt: skip
    sizes = dict(model.space.mesh.axes)
    local = size / math.prod(sizes[axis] for axis in {*was, *now})
    seconds, received = 0.0, 0.0
    larger = math.prod(sizes[axis] for axis in gathered)
    steps = ("all_to_all", moved, 1), ("collective_permute", swapped, 1), (
        "all_gather", gathered, larger,
    )  # fmt: skip
    for kind, axes, times in steps:
        if axes:
            links = model.machine.collectives
            seconds += links.cheapest(kind, local * times, axes).seconds(local * times)
            received += local * times
    return seconds, received


def returned_trees(analysis: Analysis) -> tuple[ReturnedTree, ...]:
    """The arguments, of several arrays, that a program returns as one tree and does not donate.

    Paths, shapes and element types of the leaves are the same, and half of the results at least
    are made of their arguments dimension by dimension, as an optimiser's updates are.
    """
    program = analysis.program
    leaves: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for number, path in enumerate(program.arguments):
        name, keys = _split(path)
        leaves[name][keys] = number
    candidates: dict[tuple[int, str], dict[str, tuple[tuple[int, int], ...]]] = {}
    for position, (name, tree) in enumerate(leaves.items()):
        if "" not in tree and program.donated.isdisjoint(tree.values()):
            fitting = {
                prefix: pairs
                for prefix, pairs in _same_trees(program, tree)
                if sum(_updates(analysis, *pair) for pair in pairs) >= _UPDATES * len(pairs)
            }
            candidates[position, name] = fitting
    found: dict[str, ReturnedTree] = {}
    # New parameters are made of new moments too: those with one way to leave go first.
    for (position, name), fitting in sorted(candidates.items(), key=lambda item: len(item[1])):
        for prefix, pairs in fitting.items():
            if prefix not in found:
                at = _position(program, pairs[0][0], position)
                found[prefix] = ReturnedTree(name, prefix, at, pairs)
                break
    return tuple(sorted(found.values(), key=lambda tree: tree.pairs))


def _same_trees(
    program: Program, tree: Mapping[str, int]
) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
    """Where results are a tree with the keys and types of an argument, and the leaves in pairs."""
    places = {path: number for number, path in enumerate(program.results)}
    first = next(iter(tree))
    for path in program.results:
        prefix = path.removesuffix(first)
        if path.endswith(first) and sum(_below(p, prefix) for p in places) == len(tree):
            pairs = tuple((number, places.get(prefix + keys, -1)) for keys, number in tree.items())
            if all(_same(program, *pair) for pair in pairs):
                yield prefix, pairs


def _split(path: str) -> tuple[str, str]:
    """The argument that a path is of, and its keys: those of ``*args`` are arguments each."""
    name, keys = _PATH.fullmatch(path).groups()  # type: ignore[union-attr]
    if name == "args" and (found := re.match(r"\[\d+\]", keys)):
        return name + found[0], keys[found.end() :]
    return name, keys


def _below(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("[", ".")


def _same(program: Program, argument: int, result: int) -> bool:
    """Whether a result is there, of an argument's type, and overwrites no other one."""
    if result < 0 or program.aliases[result] >= 0:
        return False
    values = program.argument_values[argument], program.result_values[result]
    return program.values[values[0]].type == program.values[values[1]].type


def _updates(analysis: Analysis, argument: int, result: int) -> bool:
    """Whether a result is made of an argument by ops that keep every dimension where it is."""
    program = analysis.program
    wanted, open_ = program.argument_values[argument], [program.result_values[result]]
    seen = set(open_)
    while open_:
        value = open_.pop()
        if value == wanted:
            return True
        made = program.values[value]
        op = program.ops[made.op]
        rule = analysis.rules[op.signature]
        for index, operand in enumerate(op.operands):
            same = program.values[operand].type.shape == made.type.shape
            if same and rule.operands[index] == rule.results[made.result] and operand not in seen:
                seen.add(operand)
                open_.append(operand)
    return False


def _position(program: Program, argument: int, otherwise: int) -> int:
    """The place of an argument among the positional ones; -1 for a keyword argument.

    Where the function is not known any more, ``otherwise``.
    """
    calling = getattr(program.source, "calling", None)
    if calling is None:
        return otherwise
    positional, _ = calling.in_tree.children()
    for position, child in enumerate(positional.children()):
        argument -= child.num_leaves
        if argument < 0:
            return position
    return -1
