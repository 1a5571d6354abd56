"""A plan as logical axes of Flax: names of the dimensions of every argument, and rules for them.

Linen tries rules in order, NNX reads them as a dictionary. Here each name has one rule, and no
tensor uses a mesh axis twice, so that both give the shardings of the plan.
"""

from __future__ import annotations

import collections

from toast.errors import PlanError
from toast.export.exported_text import UNSAID, axes_literal, comments
from toast.export.logical_axes import LogicalAxes

_FUNCTIONS = '''

def logical_specs(tree: Any, root: str) -> Any:
    """Logical PartitionSpecs in the structure of ``tree``, which is the argument named ``root``.

    With Linen: ``nn.logical_to_mesh_sharding(logical_specs(params, "params"), mesh, RULES)``.
    """

    def spec(keys: Any, leaf: Any) -> P:
        path = root + jax.tree_util.keystr(keys)
        if path not in NAMES:
            raise ValueError(f"{path} is not in the plan; plan the step again, and export that")
        return P(*NAMES[path][: len(leaf.shape)])

    return jax.tree_util.tree_map_with_path(spec, tree)


def annotate(module: Any, root: str) -> None:
    """Gives the variables of an NNX module, the argument named ``root``, their logical axes.

    Then ``nnx.get_named_sharding(nnx.state(module), mesh)`` under ``nnx.logical_axis_rules(RULES)``
    has the shardings of the plan.
    """
    from flax import nnx

    def is_variable(leaf: Any) -> bool:
        return isinstance(leaf, nnx.Variable)

    for keys, variable in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_variable):
        names = NAMES.get(f"{root}{jax.tree_util.keystr(keys)}.value")
        if names:
            variable.set_metadata(out_sharding=names)
'''


def flax_module(axes: LogicalAxes) -> str:
    """The text of a Python module with ``RULES`` and ``NAMES``."""
    rules, names = flax_names(axes)
    plan = axes.plan
    inner = dict.fromkeys(
        f"{axes.names[color]}: {axes_literal(own)}"
        for color, own in axes.inner_axes.items() if own and color in axes.names
    )  # fmt: skip
    notes = [
        f"Logical axes of {plan.analysis.program.name} on mesh {plan.mesh} of "
        f"{plan.hardware.name}, written by toast export.",
        "NAMES and RULES give every argument the sharding of the plan; None is a dimension that is "
        "whole in this array, though its logical axis is sharded in others.",
    ]
    if inner:
        notes.append(f"Inside of the step, most values have {', '.join(inner)}.")
    notes += [UNSAID + line for line in axes.inner_lines()]
    rule_lines = "".join(f"    ({name!r}, {axes_literal(own)}),\n" for name, own in rules.items())
    name_lines = "".join(f"    {path!r}: {own!r},\n" for path, own in names.items())
    return (
        f"{comments(notes)}\nfrom __future__ import annotations\n\nfrom typing import Any\n\n"
        "import jax\nfrom jax.sharding import PartitionSpec as P\n\n"
        "#: The mesh axes of each logical axis.\n"
        f"RULES: tuple[tuple[str, Any], ...] = (\n{rule_lines})\n\n"
        "#: The logical axes of each argument, by its path.\n"
        f"NAMES: dict[str, tuple[str | None, ...]] = {{\n{name_lines}}}\n{_FUNCTIONS}"
    )


def flax_names(
    axes: LogicalAxes,
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str | None, ...]]]:
    """The mesh axes of each name, and the names of the dimensions of each argument by path.

    Raises :class:`toast.errors.PlanError` for a plan without arguments.
    """
    if not axes.arguments:
        raise PlanError("the plan has no arguments to name; export the plan of a step with some")
    bytes_of: dict[str, collections.Counter[tuple[str, ...]]] = {}
    for argument in axes.arguments:
        for color, own in zip(argument.colors, argument.spec, strict=True):
            counts = bytes_of.setdefault(axes.names[color], collections.Counter())
            counts[own] += max(1, int(argument.bytes))
    rules: dict[str, tuple[str, ...]] = {}
    named: dict[tuple[str, tuple[str, ...]], str | None] = {}
    for word, counts in bytes_of.items():
        sharded = [own for own, _ in counts.most_common() if own]
        named[word, ()] = None if sharded else word
        for number, own in enumerate(sharded):
            name, further = word, 2
            while number and (name in bytes_of or name in rules):
                name, further = f"{word}_{further}", further + 1
            named[word, own] = name
            rules[name] = own
        if not sharded:
            rules[word] = ()
    names: dict[str, tuple[str | None, ...]] = {}
    for argument in axes.arguments:
        own_names: list[str | None] = []
        for color, own in zip(argument.colors, argument.spec, strict=True):
            name_ = named[axes.names[color], own]
            own_names.append(None if name_ in own_names else name_)  # each name once in a tensor
        names[argument.path] = tuple(own_names)
    return rules, names


__all__ = ["flax_module", "flax_names"]
