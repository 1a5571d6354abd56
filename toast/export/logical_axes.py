"""The logical axes of a plan: named dimensions of arguments, and what shards them.

A logical axis is a color of the analysis with its mirror images (paper, sections 3.2 and 4.4): the
hidden dimensions of all layers are one.  The plan may shard a color differently in different
tensors, and in each op; logical axes cannot always say that, and what they cannot say is listed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from toast.errors import PlanError
from toast.parameter_names import COMMON, Roles, example_roles, last_word, parameter_roles
from toast.paths import folded, keys, matches, near
from toast.plan import Plan, place_of, spec_text
from toast.program import Spec, TensorType, element_bytes
from toast.units import listed

#: The names that a logical axis may have.
_WORD = re.compile(r"[A-Za-z_]\w*\Z")
_DIMENSION = re.compile(r"(.+):(\d+)\Z", re.DOTALL)

#: Arrays of examples: the batch comes first, and then, of tokens, the sequence.
_EXAMPLES = frozenset({
    "tokens", "inputs", "targets", "labels", "input_ids", "ids", "images", "x", "y", "batch",
    "inputs_position", "inputs_segmentation", "targets_position", "targets_segmentation",
    "positions", "segment_ids", "mask", "attention_mask",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ArgumentAxes:
    """An argument with the logical axis of each dimension."""

    #: The path of the argument, such as ``params['wq']``.
    path: str
    #: Its shape and element type.
    type: TensorType
    #: Its sharding: the mesh axes of each dimension.
    spec: Spec
    #: The number of each dimension's logical axis.
    colors: tuple[int, ...]
    #: The name of each dimension in MaxText's words, or in the user's; ``None`` where unknown.
    roles: tuple[str | None, ...]

    @property
    def bytes(self) -> float:
        """Its bytes without sharding."""
        return math.prod(self.type.shape) * element_bytes(self.type.dtype)

    @property
    def is_data(self) -> bool:
        """Whether it has examples, and is no parameter."""
        return "batch" in self.roles


@dataclasses.dataclass(frozen=True)
class InnerValue:
    """A value inside of the step that is not sharded as its logical axes are elsewhere."""

    #: The op that defines it, with its source line.
    place: str
    #: Its shape and element type.
    type: TensorType
    #: Its sharding in the plan.
    spec: Spec
    #: The sharding that its logical axes have elsewhere.
    expected: Spec
    #: Its bytes without sharding.
    bytes: float


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """The logical axes of a plan's arguments."""

    #: The plan.
    plan: Plan
    #: The arguments, each with its logical axes.
    arguments: tuple[ArgumentAxes, ...]
    #: The name of each logical axis that arguments have, by number; several may have one name.
    names: Mapping[int, str]

    def named(self, *names: str) -> list[int]:
        """The numbers of the logical axes whose dimensions have one of these roles."""
        return list(dict.fromkeys(
            color for argument in self.arguments
            for color, role in zip(argument.colors, argument.roles, strict=True) if role in names
        ))  # fmt: skip

    @functools.cached_property
    def inner_axes(self) -> dict[int, tuple[str, ...]]:
        """The mesh axes of each logical axis in the values inside of the step.

        They are those of most bytes.  Values with a batch count, if any argument has one: others
        are weights and gradients.
        """
        bytes_of: dict[int, collections.Counter[tuple[str, ...]]] = {}
        for _, type_, colors, spec in self._inner:
            size = math.prod(type_.shape) * element_bytes(type_.dtype)
            for color, axes in zip(colors, spec, strict=True):
                bytes_of.setdefault(color, collections.Counter())[axes] += size
        # Of equal counts, the first one in the program.
        return {color: counts.most_common(1)[0][0] for color, counts in bytes_of.items()}

    @functools.cached_property
    def other_values(self) -> tuple[InnerValue, ...]:
        """The values inside of the step with other mesh axes than :attr:`inner_axes` gives them.

        Of a mesh axis that two dimensions would have, the first one has it.
        """
        others = []
        for op, type_, colors, spec in self._inner:
            used: set[str] = set()
            expected = []
            for color in colors:
                axes = tuple(a for a in self.inner_axes.get(color, ()) if a not in used)
                used.update(axes)
                expected.append(axes)
            if tuple(expected) != spec:
                size = math.prod(type_.shape) * element_bytes(type_.dtype)
                place = place_of(self.plan.analysis.program, op)
                others.append(InnerValue(place, type_, spec, tuple(expected), size))
        return tuple(sorted(others, key=lambda value: -value.bytes))

    @functools.cached_property
    def _inner(self) -> list[tuple[int, TensorType, tuple[int, ...], Spec]]:
        """The op, type, logical axes and sharding of each value that counts."""
        program, names = self.plan.analysis.program, self.plan.analysis.names
        space = self.plan.model.space
        batch = {*self.named("batch")}
        colors = space.color_group_of(names.def_name).tolist()
        rows = names.value_dim.tolist()
        inner = []
        for number, value in enumerate(program.values):
            own = tuple(colors[rows[number] : rows[number + 1]])
            of_argument = value.op < len(program.arguments)
            if of_argument or not own or (batch and batch.isdisjoint(own)):
                continue
            inner.append((value.op, value.type, own, self.plan.value_spec(number)))
        return inner

    @property
    def inner_count(self) -> int:
        """The number of values that :attr:`inner_axes` is of."""
        return len(self._inner)

    def unsaid(self, specs: Mapping[str, Spec]) -> list[str]:
        """The arguments with another sharding in the plan than in ``specs``, a line for each.

        Arguments that differ in the same way are one line.
        """
        alike: dict[str, dict[str, None]] = {}
        for argument in self.arguments:
            wanted, other = argument.spec, specs[argument.path]
            if wanted != other:
                text = f"{spec_text(wanted)} in the plan, {spec_text(other)} by the rules"
                alike.setdefault(text, {})[folded(argument.path)] = None
        return [f"{listed([*paths], 4)}: {text}" for text, paths in alike.items()]

    def inner_lines(self, most: int = 3) -> list[str]:
        """What rules do not say of the values inside of the step: their number, and the largest."""
        others = self.other_values
        if not others:
            return []
        first = (
            f"{len(others)} of {self.inner_count} values inside of the step are sharded "
            "op by op; plan.jit and toast.jit run them so"
        )
        lines = [
            f"{value.type} at {value.place}: {spec_text(value.spec)}, not "
            f"{spec_text(value.expected)}"
            for value in others
        ]
        return [first, *list(dict.fromkeys(lines))[:most]]


def logical_axes(plan: Plan, names: Mapping[str, str] | None = None) -> LogicalAxes:
    """The logical axes of a plan.

    ``names`` has names by dimension of an argument, which may be a pattern:
    ``{"params['layers'][*]['w1']:1": "mlp"}``.  Other names are those of the parameters that many
    trainers have, or made from the path of an argument.  Raises :class:`toast.errors.PlanError` for
    a name that is no word, and for a dimension that no argument has.
    """
    chosen = _chosen(plan, names or {})
    program, space = plan.analysis.program, plan.model.space
    first = plan.analysis.names.value_dim
    arguments = []
    for path, value in zip(program.arguments, program.argument_values, strict=True):
        type_ = program.values[value].type
        rows = plan.analysis.names.def_name[first[value] : first[value + 1]]
        roles = list(roles_of(path, type_.shape, type_.dtype))
        for pattern, dimension, name in chosen:
            if matches(pattern, path) and dimension < len(roles):
                roles[dimension] = name
        colors = tuple(int(color) for color in space.color_group_of(rows).tolist())
        arguments.append(ArgumentAxes(path, type_, plan.arguments[path], colors, tuple(roles)))
    own = {name for _, _, name in chosen}
    return LogicalAxes(plan, tuple(arguments), _names(arguments, own))


def roles_of(path: str, shape: Sequence[int], dtype: str) -> Roles:
    """The name of each dimension of an argument in MaxText's words; ``None`` where unknown.

    Dimensions of examples are ``batch`` and ``sequence``.
    """
    if last_word(path) in _EXAMPLES:
        roles = example_roles(shape, dtype)
    elif dtype.startswith(("f", "bf")):
        roles = parameter_roles(path, shape)
    else:
        roles = (None,) * len(shape)
    return tuple(role if role in COMMON else None for role in roles)


def _chosen(plan: Plan, names: Mapping[str, str]) -> list[tuple[str, int, str]]:
    """The user's names: pattern, dimension and name."""
    chosen = []
    program = plan.analysis.program
    for label, name in names.items():
        parts = _DIMENSION.match(label)
        if parts is None:
            raise PlanError(
                f"name {label}={name}: write an argument with the number of a dimension, such as "
                f"{program.arguments[0] if program.arguments else 'x'}:0"
            )
        if not _WORD.match(name):
            raise PlanError(f"name {label}={name}: use a word for the name, such as embed")
        pattern, dimension = parts[1], int(parts[2])
        ranks = [
            len(program.values[value].type.shape)
            for path, value in zip(program.arguments, program.argument_values, strict=True)
            if matches(pattern, path)
        ]
        if not ranks:
            hint = listed(near(pattern, program.arguments))
            raise PlanError(f"name {label}={name}: no argument matches {pattern}; use {hint}")
        if dimension >= max(ranks):
            raise PlanError(
                f"name {label}={name}: {pattern} has {max(ranks)} dimensions; use a number from 0 "
                f"to {max(ranks) - 1}"
            )
        chosen.append((pattern, dimension, name))
    return chosen


def _names(arguments: Sequence[ArgumentAxes], own: Iterable[str]) -> dict[int, str]:
    """A name for each logical axis: that of most elements, the user's first.

    Logical axes with one name in the table are told apart only by their mesh axes.
    """
    own = frozenset(own)
    votes: dict[int, dict[str, float]] = {}
    sizes: collections.Counter[int] = collections.Counter()
    paths: dict[int, str] = {}
    for argument in arguments:
        elements = math.prod(argument.type.shape)
        places = zip(argument.colors, argument.roles, argument.type.shape, strict=True)
        for dimension, (color, role, size) in enumerate(places):
            sizes[color] += elements
            paths.setdefault(color, _word(argument.path, dimension))
            if role is not None:
                weight = math.inf if role in own else elements if size > 1 else 0
                counts = votes.setdefault(color, {})
                name = role if role in own else COMMON.get(role, role)
                counts[name] = counts.get(name, 0) + weight
    names: dict[int, str] = {}
    used = {name for counts in votes.values() for name in counts}
    for color in sizes:
        if color in votes:
            names[color] = max(votes[color], key=lambda name: votes[color][name])
            continue
        number, unique = 2, paths[color]
        while unique in used:
            unique, number = f"{paths[color]}_{number}", number + 1
        used.add(unique)
        names[color] = unique
    return names


def _word(path: str, dimension: int) -> str:
    """A name for a dimension that no table knows: ``w1_1``."""
    words = [key for key in keys(path) if not key.isdigit()]
    words = [re.sub(r"\W", "_", word) for word in words if word not in ("kernel", "weight")]
    word = words[-1] if words else "argument"
    return f"{'' if _WORD.match(word) else '_'}{word}_{dimension}"


__all__ = ["ArgumentAxes", "InnerValue", "LogicalAxes", "logical_axes", "roles_of"]
