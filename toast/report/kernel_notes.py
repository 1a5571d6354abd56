"""Notes on custom calls: those without a rule, and those that XLA runs whole on every device."""

from __future__ import annotations

from collections.abc import Sequence

from toast.analysis import Analysis
from toast.facts import quoted
from toast.program import Signature

#: Maximum number of kernels that a note names.
_NAMED = 5

#: The target of the calls of JAX's ``custom_partitioning``.
_CUSTOM_PARTITIONING = "CustomSPMDPartitioning"


def price_note(analysis: Analysis, op: int) -> str:
    """What the price of a custom call without a rule consists of; empty for other ops."""
    if analysis.program.kind(op) != "custom_call":
        return ""
    if analysis.rules[analysis.names.signature[op]].costs:
        return "; its price is its cost estimate, on every device"
    return "; its price counts only its operands and results"


def suggested_rule(analysis: Analysis, ops: Sequence[int]) -> list[str]:
    """A rule for the first custom call among ``ops``, which shards its first dimension.

    Empty if there is none with a dimension.
    """
    signatures = (_signature(analysis, op) for op in ops)
    calls = (s for s in signatures if s.kind == "custom_call")
    for call in calls:
        first = next((type_.shape for type_ in call.operands if type_.shape), ())
        if not first:
            continue
        attribute = "kernel_name" if call.attribute("kernel_name") else "call_target_name"
        name = quoted(str(call.attribute(attribute)))
        other = f"mine(Op), tensor_dim(Op,T,D,Size), (D,Size) != (0,{first[0]})"
        return [
            f"a rule for it that shards its first dimension, in a file for --rules (change "
            f"{first[0]} and what follows to the call's einsum):",
            f"custom_call_rule({name}).",
            "%! mine(Op): a call of it.",
            f"mine(Op) :- op(Op,custom_call), attribute(Op,{attribute},{name}).",
            f"factor(Op,batch,T,0) :- mine(Op), tensor_dim(Op,T,0,{first[0]}).",
            f"factor(Op,(T,D),T,D) :- {other}.",
            f"need_replication(Op,(T,D)) :- {other}.",
        ]
    return []


def whole_kernels(analysis: Analysis) -> list[str]:
    """A note on the custom calls with rules that XLA runs whole, and one on prices."""
    notes = []
    # In jax.shard_map, a device runs the call on its own part.
    whole = [
        rule.runs_whole and not signature.attribute("manual")
        for rule, signature in zip(analysis.rules, analysis.program.signatures, strict=True)
    ]
    if names := _names(analysis, whole):
        notes.append(
            f"every device runs {names} whole, because XLA does not partition a custom call; wrap "
            "it in jax.shard_map, or state partitioned(Op) in a rule file if it brings its own "
            "partitioning"
        )
    unpriced = [
        not rule.costs and signature.attribute("call_target_name") == _CUSTOM_PARTITIONING
        for rule, signature in zip(analysis.rules, analysis.program.signatures, strict=True)
    ]
    if any(unpriced):
        notes.append(
            "calls of custom_partitioning do not state their costs, and their functions are not in "
            "the module: their price counts only their operands and results; lower the program for "
            "one device (without in_shardings), so that JAX inlines these functions"
        )
    return notes


def _names(analysis: Analysis, chosen: Sequence[bool]) -> str:
    """The kernels of the chosen signatures, with the number of their calls."""
    calls: dict[str, int] = {}
    for signature in analysis.names.signature.tolist():
        if chosen[signature]:
            call = analysis.program.signatures[signature]
            name = str(call.attribute("kernel_name") or call.attribute("call_target_name"))
            calls[name] = calls.get(name, 0) + 1
    listed = [f"{name} ({count} calls)" if count > 1 else name for name, count in calls.items()]
    if len(listed) > _NAMED:
        listed[_NAMED:] = [f"{len(listed) - _NAMED} other kernels"]
    return ", ".join(listed)


def _signature(analysis: Analysis, op: int) -> Signature:
    return analysis.program.signatures[analysis.program.ops[op].signature]
