"""A plan as a configuration of MaxText: mesh, ``logical_axis_rules`` and memory policy.

The names are those of MaxText's own layers, of weights and of activations; MaxText tries rules in
order, skips one whose mesh axes are in use in the tensor, and takes the first that it can.
"""

from __future__ import annotations

from collections.abc import Mapping

from toast.errors import PlanError
from toast.export.axis_rules import AxisRule, NamedTensor, applied, ordered_rules, reachable
from toast.export.exported_text import UNSAID, axes_yaml, comments
from toast.export.logical_axes import LogicalAxes
from toast.plan.maxtext_policy import maxtext_microbatches, maxtext_policy
from toast.program import Spec, TracedMemory

#: The mesh axes of MaxText, each with the option that sets its size inside of a slice.
MESH_AXES: Mapping[str, str] = {
    "data": "ici_data_parallelism", "stage": "ici_pipeline_parallelism",
    "fsdp": "ici_fsdp_parallelism", "fsdp_transpose": "ici_fsdp_transpose_parallelism",
    "context": "ici_context_parallelism", "tensor": "ici_tensor_parallelism",
    "tensor_sequence": "ici_tensor_sequence_parallelism", "expert": "ici_expert_parallelism",
    "autoregressive": "ici_autoregressive_parallelism", "sequence": "ici_sequence_parallelism",
    "diloco": "ici_diloco_parallelism",
    "context_autoregressive": "ici_context_autoregressive_parallelism",
}  # fmt: skip

#: Other names for them.
SYNONYMS: Mapping[str, str] = {
    "model": "tensor", "tp": "tensor", "mp": "tensor", "batch": "data", "dp": "data",
    "replica": "data", "ep": "expert", "experts": "expert", "cp": "context", "seq": "context",
    "pp": "stage",
}  # fmt: skip

#: MaxText's names of activations, by the dimension that they have.  A dimension of an activation
#: is a logical axis with one of the roles behind it.
_ACTIVATIONS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("batch",): (
        "activation_batch", "activation_batch_attn", "activation_batch_moe",
        "activation_embed_and_logits_batch", "activation_kv_batch", "decode_batch",
    ),
    ("sequence",): (
        "activation_length", "activation_length_attn", "activation_length_moe",
        "activation_norm_length", "activation_norm_length_moe", "activation_q_length",
    ),
    ("q_heads", "heads"): ("activation_heads",),
    ("kv_heads",): ("activation_kv_heads",),
    ("kv", "kv_head_dim"): ("activation_kv",),
    ("exp",): ("activation_exp",),
    ("mlp",): ("activation_mlp",),
    ("mlp_moe",): ("activation_mlp_moe",),
    ("vocab",): ("activation_vocab",),
    ("embed", "embed_attn", "norm"): ("activation_embed", "activation_embed_attn"),
    ("embed_moe",): ("activation_embed_moe",),
}  # fmt: skip

#: Dimensions that have no name in MaxText.
_NAMELESS = frozenset({"batch", "sequence", "query_group"})


def maxtext_config(axes: LogicalAxes, rename: Mapping[str, str] | None = None) -> str:
    """The lines of a configuration file of MaxText for a plan.

    ``rename`` has MaxText's mesh axis for an axis of the plan.  Raises
    :class:`toast.errors.PlanError` for an axis that is none of MaxText's, and if no dimension of
    an argument has a name of MaxText.
    """
    plan = axes.plan
    renamed = _renamed([name for name, _ in plan.mesh.axes], rename or {})
    rules, activations = maxtext_rules(axes)
    specs = {
        argument.path: applied(rules, _weight_names(argument.roles))
        if not argument.is_data
        else _data_spec(activations, argument.roles)
        for argument in axes.arguments
    }
    notes = [*axes.unsaid(specs), *axes.inner_lines()]
    lines = [
        f"{plan.analysis.program.name} on mesh {plan.mesh} of {plan.hardware.name}, written by "
        "toast export.",
        "Use it as a configuration of its own, or copy the first three keys into a file of "
        "configs/custom_mesh_and_rule. Rules are tried in order; a tensor has each mesh axis once.",
        *(UNSAID + note for note in notes),
    ]
    names = [renamed[name] for name, _ in plan.mesh.axes]
    text = comments(lines) + "base_config: base.yml\n"
    text += f"mesh_axes: {axes_yaml(names)}\ndata_sharding: [{axes_yaml(names)}]\n"
    every = reachable((*activations, *rules))
    text += f"logical_axis_rules:{'' if every else ' []'}\n"
    text += "".join(
        f"  - [{rule.name}, {axes_yaml([renamed[axis] for axis in rule.axes])}]\n" for rule in every
    )
    for name, size in plan.mesh.axes:
        text += f"{MESH_AXES[renamed[name]]}: {size}\n"
    if "fsdp" not in names:
        text += "ici_fsdp_parallelism: 1\n"  # base.yml gives it all devices
    return text + _policy_text(plan.analysis.program.memory)


def _policy_text(memory: TracedMemory | None) -> str:
    """The lines of the memory policy, if there is one; a comment says what MaxText cannot have."""
    if memory is None or memory.policy is None:
        return maxtext_microbatches(memory)
    try:
        return maxtext_policy(memory)
    except PlanError as error:
        return comments([str(error)]) + maxtext_microbatches(memory)


def maxtext_rules(axes: LogicalAxes) -> tuple[tuple[AxisRule, ...], tuple[AxisRule, ...]]:
    """The rules of weights, and those of activations, in the mesh axes of the plan.

    Raises :class:`toast.errors.PlanError` if no dimension of an argument has a name of MaxText.
    """
    weights = [
        NamedTensor(_weight_names(argument.roles), argument.spec, argument.bytes)
        for argument in axes.arguments if not argument.is_data
    ]  # fmt: skip
    activations = []
    for roles, names in _ACTIVATIONS.items():
        colors = axes.named(*roles)
        own = next((axes.inner_axes[color] for color in colors if color in axes.inner_axes), None)
        if own:
            activations += [AxisRule(name, own) for name in names]
    if not any(name for tensor in weights for name in tensor.names):
        raise PlanError(
            "no argument of the plan has a dimension with a name of MaxText; name some, as in "
            f'--name "{axes.arguments[0].path if axes.arguments else "x"}:0=embed"'
        )
    return ordered_rules(weights), tuple(activations)


def _weight_names(roles: tuple[str | None, ...]) -> tuple[str | None, ...]:
    """The names of a weight's dimensions; a second dimension of a name has none."""
    names: list[str | None] = []
    for role in roles:
        known = role is not None and role not in _NAMELESS and role not in names
        names.append(role if known else None)
    return tuple(names)


def _data_spec(activations: tuple[AxisRule, ...], roles: tuple[str | None, ...]) -> Spec:
    """The sharding of an argument with examples: that of MaxText's input."""
    words = {"batch": "activation_embed_and_logits_batch", "sequence": "activation_norm_length"}
    return applied(activations, [words.get(role or "") for role in roles])


def _renamed(names: list[str], rename: Mapping[str, str]) -> dict[str, str]:
    """MaxText's mesh axis of each axis of the plan."""
    for name in rename:
        if name not in names:
            raise PlanError(f"rename {name}: the mesh has no such axis; use {', '.join(names)}")
    renamed = {name: rename.get(name, SYNONYMS.get(name, name)) for name in names}
    for name, own in renamed.items():
        if own not in MESH_AXES:
            raise PlanError(
                f"axis {name}: MaxText has no mesh axis {own}; rename it to one of "
                f"{', '.join(MESH_AXES)}, as in --rename {name}=fsdp"
            )
        if list(renamed.values()).count(own) > 1:
            raise PlanError(
                f"axis {name}: two axes of the mesh would be MaxText's {own}; rename one, as in "
                f"--rename {name}=fsdp"
            )
    return renamed


__all__ = ["MESH_AXES", "SYNONYMS", "maxtext_config", "maxtext_rules"]
