"""Texts for shardings, values and dimensions."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from toast.paths import folded
from toast.program import Program, Spec
from toast.space import Action, Space
from toast.units import listed


def describe_value(program: Program, value: int) -> str:
    """An argument by its path, another value by its op, with the source line."""
    op = program.values[value].op
    if op < len(program.arguments):
        return f"{program.arguments[op]} {program.values[value].type}"
    return program.describe(op)


def place_of(program: Program, op: int) -> str:
    """The source line of an op; for results, ``end of the step``."""
    over = op >= len(program.ops) - len(program.results)
    return "end of the step" if over else str(program.location(max(op, 0)))


def dimension_labels(space: Space, action: Action) -> tuple[str, ...]:
    """The dimensions of arguments that an action shards, by decreasing number of elements.

    List positions are replaced by ``*``.  For a refinement, the result has the ops that it changes,
    each with the factor that gets the axis.
    """
    analysis = space.analysis
    program, names = analysis.program, analysis.names
    if action.part:
        return tuple(
            dict.fromkeys(part_label(space, op_class, factor) for op_class, factor in action.part)
        )
    members = space.names_of(action.color)
    members = members[names.name_op[members] < len(program.arguments)]
    weights: dict[str, float] = {}  # in the order of the arguments
    for name in members.tolist():
        op = int(names.name_op[name])
        type_ = program.values[program.ops[op].results[0]].type
        label = f"{folded(program.arguments[op])}:{name - int(names.first_name[op])}"
        weights[label] = weights.get(label, 0.0) + float(np.prod(type_.shape, dtype=np.float64))
    return tuple(sorted(weights, key=lambda label: -weights[label]))


#: Maximum number of factors that identify a color without dimensions of arguments.
_NAMED_FACTORS = 8


def action_labels(space: Space, action: Action) -> tuple[str, ...]:
    """The labels that identify an action in a file: its dimensions or, without any, factors."""
    labels = dimension_labels(space, action)
    if labels or action.part:
        return labels
    names = space.analysis.names
    members = space.names_of(action.color)
    ops = names.name_op[members]
    pairs = zip(
        space.classes.of_op[ops].tolist(), (members - names.first_name[ops]).tolist(), strict=True
    )
    shown = list(dict.fromkeys(pairs))[:_NAMED_FACTORS]
    return tuple(dict.fromkeys(part_label(space, op_class, factor) for op_class, factor in shown))


def part_label(space: Space, op_class: int, factor: int) -> str:
    """``dot_general:batching(0) at moe.py:169``; ``:-`` if the axis is removed."""
    analysis, op = space.analysis, int(space.classes.representative[op_class])
    program = analysis.program
    rule = analysis.rules[analysis.names.signature[op]]
    label = rule.factors[factor].label if factor >= 0 else "-"
    if op < len(program.arguments):
        return f"{folded(program.arguments[op])}:{label}"
    place = program.location(op)
    at = f" at {pathlib.PurePath(place.file).name}:{place.line}" if place.file else ""
    return f"{program.kind(op)}:{label}{at}"


def shown_label(label: str) -> str:
    """A label as text: ``x:-`` (the axis is removed) becomes ``no dimension of x``."""
    name, dash, place = label.partition(":-")
    return f"no dimension of {name}{place}" if dash and place[:4] in ("", " at ") else label


def shown_labels(labels: Sequence[str], most: int) -> str:
    """The first ``most`` labels as text, and the number of the others."""
    return listed([*map(shown_label, labels)], most)


def spec_text(spec: Spec) -> str:
    """A sharding in JAX's form: ``P('data', None, ('model', 'x'))``."""
    parts = [
        "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
        for axes in spec
    ]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"
