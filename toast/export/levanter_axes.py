"""A plan as Levanter's mappings from logical axes to mesh axes, in YAML.

Haliax shards an array by the names of its axes: a name has the same mesh axes in every array, but
Levanter has one mapping for parameters and another one for the values inside of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

from toast.errors import PlanError
from toast.export.axis_rules import NamedTensor, one_rule_each
from toast.export.exported_text import UNSAID, axes_yaml, comments
from toast.export.logical_axes import LogicalAxes
from toast.program import Spec

#: Levanter's names of dimensions by MaxText's.
_NAMES: Mapping[str, str] = {
    "vocab": "vocab", "embed_vocab": "embed", "embed_attn": "embed", "embed": "embed",
    "embed_moe": "embed", "embed_router": "embed", "norm": "embed", "q_heads": "kv_head",
    "query_group": "q_heads_per_group", "kv_heads": "kv_head", "heads": "heads",
    "kv": "head_size", "kv_head_dim": "head_size", "mlp": "mlp", "mlp_moe": "mlp",
    "exp": "experts", "layers": "layers", "batch": "batch", "sequence": "position",
}  # fmt: skip

#: The order of dimensions in the mapping of values: of two with one mesh axis, the first keeps it.
_INNER = ("batch", "position", "experts", "heads", "kv_head", "mlp", "vocab", "head_size", "embed")

#: Logical axes that Levanter shards by default, and the mesh axes that they have then.
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "batch": ("replica_dcn", "replica", "data"), "mlp": ("model",), "heads": ("model",),
}  # fmt: skip

_HEAD = (
    "A name has the same mesh axes in every array of a mapping, and an array has each mesh axis "
    "once."
)


def levanter_config(axes: LogicalAxes) -> str:
    """The lines of a configuration of Levanter for a plan.

    Raises :class:`toast.errors.PlanError` if no dimension of an argument has a name of Levanter.
    """
    plan = axes.plan
    parameters, inner = levanter_mappings(axes)
    specs: dict[str, Spec] = {}
    for argument in axes.arguments:
        mapping = inner if argument.is_data else parameters
        names = _own_names(argument.roles)
        specs[argument.path] = tuple(mapping.get(name or "", ()) for name in names)
    notes = [*axes.unsaid(specs), *axes.inner_lines()]
    text = comments([
        f"{plan.analysis.program.name} on mesh {plan.mesh} of {plan.hardware.name}, written by "
        "toast export.",
        _HEAD,
        *(UNSAID + note for note in notes),
    ])  # fmt: skip
    sharded = {name for name, own in plan.mesh.axes if own > 1}
    # Levanter shards these over these axes, unless they have other ones: of one device, if need be.
    whole = {
        name: (f"whole_{name}",)
        for name, default in _DEFAULTS.items() if sharded.intersection(default)
    }  # fmt: skip
    ones = {
        axis: 1 for name, (axis,) in whole.items()
        if not inner.get(name) or not (parameters.get(name) or name == "batch")
    }  # fmt: skip
    # Levanter adds the first three, and divides the devices over data, unless they have sizes.
    sizes = {"data": 1, "replica": 1, "model": 1, **dict(plan.mesh.axes), **ones}
    text += "trainer:\n  mesh:\n    axes:\n"
    text += "".join(f"      {name}: {size}\n" for name, size in sizes.items())
    text += _mapping("    compute_mapping", {**whole, **_sharded(inner)})
    whole.pop("batch", None)  # no parameter has one
    text += _mapping("    param_mapping", {**whole, **_sharded(parameters)})
    old = "trainer:\n  fsdp_axis: null\n" + _mapping("  axis_resources", _sharded(inner))
    old += _mapping("  parameter_axis_resources", _sharded(parameters))
    if "model" in dict(plan.mesh.axes):
        old += f"  model_axis_size: {dict(plan.mesh.axes)['model']}\n"
    text += comments([
        "Levanter without trainer.mesh has these keys; parameters have the axes of axis_resources, "
        "too:"
    ])  # fmt: skip
    return text + "".join(f"# {line}\n" for line in old.splitlines())


def levanter_mappings(
    axes: LogicalAxes,
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The mesh axes of each logical axis: for parameters, and for the values inside of the step.

    Raises :class:`toast.errors.PlanError` if no dimension of an argument has a name of Levanter.
    """
    tensors = [
        NamedTensor(_own_names(argument.roles), argument.spec, argument.bytes)
        for argument in axes.arguments if not argument.is_data
    ]  # fmt: skip
    if not any(name for tensor in tensors for name in tensor.names):
        raise PlanError(
            "no argument of the plan has a dimension with a name of Levanter; name some, as in "
            f'--name "{axes.arguments[0].path if axes.arguments else "x"}:0=embed"'
        )
    inner: dict[str, tuple[str, ...]] = {}
    for name in _INNER:
        colors = axes.named(*(role for role, own in _NAMES.items() if own == name))
        own = next((axes.inner_axes[color] for color in colors if color in axes.inner_axes), ())
        # An activation has the batch, the sequence and another axis; a weight is used as well.
        together = {"batch", "position"}.union(*(t.names for t in tensors if name in t.names))
        taken = {axis for other in together if other in inner for axis in inner[other or ""]}
        if own and not taken & {*own}:
            inner[name] = own
    return one_rule_each(tensors), inner


def _own_names(roles: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """Levanter's names of a tensor's dimensions; the user's words stay as they are."""
    names: list[str | None] = []
    for role in roles:
        name = None if role is None else _NAMES.get(role, role)
        names.append(None if name in names else name)
    return tuple(names)


def _sharded(mapping: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: axes for name, axes in mapping.items() if axes}


def _mapping(key: str, mapping: Mapping[str, tuple[str, ...]]) -> str:
    """A mapping in YAML."""
    if not mapping:
        return f"{key}: {{}}\n"
    indent = " " * (len(key) - len(key.lstrip()) + 2)
    rows = "".join(f"{indent}{name}: {axes_yaml(axes)}\n" for name, axes in mapping.items())
    return f"{key}:\n{rows}"


__all__ = ["levanter_config", "levanter_mappings"]
