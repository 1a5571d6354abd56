"""Arguments that a step returns without donating them, and the cost of the resulting reshard.

A train step that takes and returns its parameters is called with its own results.  Without
donation, a result can have another sharding than the argument that it becomes in the next step.
The reshard between two steps is not part of the program or of its price.
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

#: A path: the name of an argument or of the result, and the keys of the leaf.
_PATH = re.compile(r"([^\[.]*)(.*)", re.DOTALL)

#: Minimum share of the arrays of a tree that must be updates of their arguments.  Gradients have
#: the tree of the parameters, too, but are not arguments of the next step.
_UPDATES = 0.5


@dataclasses.dataclass(frozen=True)
class ReturnedTree:
    """An argument that a program returns as a tree without donating it."""

    #: The argument, such as ``params``, and the result, such as ``result[0]``.
    argument: str
    result: str
    #: The position of the argument, as in ``donate``; -1 for a keyword argument.
    position: int
    #: For each leaf, the numbers of its argument and of its result.
    pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class StepReshard:
    """The reshard of a returned tree between two steps."""

    tree: ReturnedTree
    #: The number of arrays whose sharding differs between argument and result.
    arrays: int
    #: The seconds of the collectives, and the bytes that a device receives.
    seconds: float
    bytes: float

    @property
    def text(self) -> str:
        """A note in one line: the problem, its cost and the remedy."""
        tree = self.tree
        remedy = f"donate=({tree.position},), or --donate {tree.position}"
        if tree.position < 0:
            remedy = f"jax.jit(donate_argnames={tree.argument!r})"
        return donation_text([self], remedy)


def jit_text(reshards: Sequence[StepReshard]) -> str:
    """A note in one line on all reshards, with the remedy in the words of ``jax.jit``."""
    places = [r.tree.position for r in reshards if r.tree.position >= 0]
    names = [r.tree.argument for r in reshards if r.tree.position < 0]
    remedies = []
    if places:
        shown = ", ".join(map(str, places)) + "," * (len(places) == 1)
        remedies.append(f"donate_argnums=({shown})")
    if names:
        remedies.append(f"donate_argnames={names[0] if len(names) == 1 else tuple(names)!r}")
    return donation_text(reshards, " and ".join(remedies))


def donation_text(reshards: Sequence[StepReshard], remedy: str) -> str:
    """A note in one line: what is returned without donation, its cost and the remedy."""
    several = len(reshards) > 1
    arguments = " and ".join(reshard.tree.argument for reshard in reshards)
    results = " and ".join(reshard.tree.result for reshard in reshards)
    done = "updated in place" if arguments == results else f"returned as {results}"
    returned = f"{arguments} {'are' if several else 'is'} {done} but not donated"
    arrays = sum(reshard.arrays for reshard in reshards)
    if not arrays:
        return (
            f"{returned}, so old and new values need memory at the same time; if the results are "
            f"the next step's arguments, use {remedy}"
        )
    return (
        f"{returned}: {arrays} of {sum(len(reshard.tree.pairs) for reshard in reshards)} arrays "
        "have different shardings as argument and as result, and the step time does not include "
        f"{time_text(sum(reshard.seconds for reshard in reshards))} to reshard "
        f"{size_text(sum(reshard.bytes for reshard in reshards))} between steps; if the results "
        f"are the next step's arguments, use {remedy}"
    )


def step_reshards(
    model: CostModel, argument_spec: Callable[[int], Spec], result_specs: Sequence[Spec]
) -> tuple[StepReshard, ...]:
    """The reshards between two steps of a program, one for each tree that it returns.

    ``argument_spec`` returns the sharding of an argument by its number; ``result_specs`` are the
    shardings of the results.
    """
    program, sharding = model.space.analysis.program, model.space.full_mesh.sharding
    reshards = []
    for tree in returned_trees(model.space.analysis):
        arrays, seconds, size = 0, 0.0, 0.0
        for argument, result in tree.pairs:
            type_ = program.values[program.argument_values[argument]].type
            before, after = map(sharding, (result_specs[result], argument_spec(argument)))
            if before != after:
                whole = element_bytes(type_.dtype) * math.prod(type_.shape)
                taken, received = _reshard(model, whole, before, after)
                arrays, seconds, size = arrays + 1, seconds + taken, size + received
        reshards.append(StepReshard(tree, arrays, seconds, size))
    return tuple(reshards)


def _reshard(model: CostModel, size: float, before: Spec, after: Spec) -> tuple[float, float]:
    """Seconds to reshard an array of ``size`` bytes, and the bytes that a device receives."""
    names = model.space.mesh.names
    was, now = (
        {axis: dimension for dimension, axes in enumerate(spec) for axis in axes}
        for spec in (before, after)
    )
    gathered = [axis for axis in names if axis in was and axis not in now]
    moved = [axis for axis in names if axis in was and axis in now and was[axis] != now[axis]]
    # Remaining axes may change their order within a dimension.
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
    """The arguments that a program returns as one tree and does not donate.

    These are modules that ``nnx.jit`` updates in place, and trees with equal paths, shapes and
    element types of which at least half of the results are computed from their arguments dimension
    by dimension, like the updates of an optimiser.  A single array counts only in a program with a
    backward pass: others return what they compute from it.  Counters, which are scalars, do not.
    """
    program = analysis.program
    leaves: dict[str, dict[str, int]] = collections.defaultdict(dict)
    for number, path in enumerate(program.arguments):
        name, keys = _split(path)
        leaves[name][keys] = number
    trees: dict[str, ReturnedTree] = {}
    candidates: dict[tuple[int, str], dict[str, tuple[tuple[int, int], ...]]] = {}
    updated = _updated_in_place(program)
    for position, (name, tree) in enumerate(leaves.items()):
        if name in updated and program.donated.isdisjoint(tree.values()):
            pairs = updated[name]
            trees[name] = ReturnedTree(name, name, _position(program, pairs[0][0], position), pairs)
        elif _may_be_updated(program, tree) and program.donated.isdisjoint(tree.values()):
            fitting = {
                prefix: pairs
                for prefix, pairs in _same_trees(program, tree)
                if sum(_updates(analysis, *pair) for pair in pairs) >= _UPDATES * len(pairs)
            }
            candidates[position, name] = fitting
    # New parameters also depend on new moments, so trees with a single candidate come first.
    for (position, name), fitting in sorted(candidates.items(), key=lambda item: len(item[1])):
        for prefix, pairs in fitting.items():
            if prefix not in trees:
                at = _position(program, pairs[0][0], position)
                trees[prefix] = ReturnedTree(name, prefix, at, pairs)
                break
    return tuple(sorted(trees.values(), key=lambda tree: tree.pairs))


def _may_be_updated(program: Program, tree: Mapping[str, int]) -> bool:
    if "" not in tree:
        return True
    shape = program.values[program.argument_values[tree[""]]].type.shape
    return any(program.passes) and len(shape) > 0


def _updated_in_place(program: Program) -> dict[str, tuple[tuple[int, int], ...]]:
    """Arguments that ``nnx.jit`` updates, by name: pairs of a leaf and the result it becomes."""
    calling = getattr(program.source, "calling", None)
    if calling is None or not calling.updates:
        return {}
    leaves = calling.updates
    numbers = {leaf: number for number, leaf in enumerate(calling.arguments)}
    pairs: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for result, leaf in enumerate(leaves, len(program.results) - len(leaves)):
        name, _ = _split(program.arguments[numbers[leaf]])
        if _same(program, numbers[leaf], result):
            pairs[name].append((numbers[leaf], result))
    return {name: tuple(of) for name, of in pairs.items()}


def _same_trees(
    program: Program, tree: Mapping[str, int]
) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
    """The results that form a tree with the keys and types of an argument, and pairs of leaves."""
    places = {path: number for number, path in enumerate(program.results)}
    if [*tree] == [""]:
        for path, result in places.items():
            if _same(program, tree[""], result):
                yield path, ((tree[""], result),)
        return
    first = next(iter(tree))
    for path in program.results:
        prefix = path.removesuffix(first)
        if path.endswith(first) and sum(_below(p, prefix) for p in places) == len(tree):
            pairs = tuple((number, places.get(prefix + keys, -1)) for keys, number in tree.items())
            if all(_same(program, *pair) for pair in pairs):
                yield prefix, pairs


def _split(path: str) -> tuple[str, str]:
    """The argument and the keys of a path; each element of ``*args`` is an argument."""
    name, keys = _PATH.fullmatch(path).groups()  # type: ignore[union-attr]
    if name == "args" and (element := re.match(r"\[\d+\]", keys)):
        return name + element[0], keys[element.end() :]
    return name, keys


def _below(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in ("[", ".")


def _same(program: Program, argument: int, result: int) -> bool:
    """Whether a result exists, has the type of an argument and overwrites no argument."""
    if result < 0 or program.aliases[result] >= 0:
        return False
    values = program.argument_values[argument], program.result_values[result]
    return program.values[values[0]].type == program.values[values[1]].type


def _updates(analysis: Analysis, argument: int, result: int) -> bool:
    """Whether a result depends on an argument through ops that keep every dimension."""
    program = analysis.program
    wanted, open_ = program.argument_values[argument], [program.result_values[result]]
    seen = set(open_)
    while open_:
        value = open_.pop()
        if value == wanted:
            return True
        definition = program.values[value]
        op = program.ops[definition.op]
        rule = analysis.rules[op.signature]
        for index, operand in enumerate(op.operands):
            same = program.values[operand].type.shape == definition.type.shape
            if (
                same
                and rule.operands[index] == rule.results[definition.result]
                and operand not in seen
            ):
                seen.add(operand)
                open_.append(operand)
    return False


def _position(program: Program, argument: int, otherwise: int) -> int:
    """The position of an argument; -1 for a keyword argument.

    If the signature of the function is unknown, the result is ``otherwise``.
    """
    calling = getattr(program.source, "calling", None)
    if calling is None:
        return otherwise
    argument = calling.arguments[argument]
    positional, _ = calling.in_tree.children()
    for position, child in enumerate(positional.children()):
        argument -= child.num_leaves
        if argument < 0:
            return position
    return -1
