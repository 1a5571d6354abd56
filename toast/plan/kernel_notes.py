"""Notes on ops without a rule, and on custom calls that every device runs whole."""

from __future__ import annotations

from collections.abc import Sequence

from toast.analysis import Analysis

#: Maximum number of kernels that a note names, and of notes on ops without a rule.
_NAMED = 5

#: The target of the calls of JAX's ``custom_partitioning``.
_CUSTOM_PARTITIONING = "CustomSPMDPartitioning"


def kernel_notes(analysis: Analysis) -> list[str]:
    """A line for each kind of op or custom call without a rule, and lines on whole kernels."""
    program = analysis.program
    kinds: dict[tuple[object, ...], list[int]] = {}
    for op in analysis.without_rule:
        signature = program.signatures[program.ops[op].signature]
        names = (signature.attribute("call_target_name"), signature.attribute("kernel_name"))
        kinds.setdefault((signature.kind, *names), []).append(op)
    notes = []
    for ops in [*kinds.values()][:_NAMED]:
        several = f" (1 of {len(ops)} such ops)" if len(ops) > 1 else ""
        notes.append(
            f"no rule for {program.describe(ops[0])}{several}: its dimensions are not sharded"
            f"{_price_note(analysis, ops[0])}"
        )
    if len(kinds) > _NAMED:
        notes.append(f"... and {len(kinds) - _NAMED} more kinds of ops without a rule")
    return notes + _whole_kernels(analysis)


def _price_note(analysis: Analysis, op: int) -> str:
    """What the price of a custom call without a rule consists of; empty for other ops."""
    if analysis.program.kind(op) != "custom_call":
        return ""
    if analysis.rules[analysis.names.signature[op]].costs:
        return "; its price is its cost estimate, on every device"
    return "; its price counts only its operands and results"


def _whole_kernels(analysis: Analysis) -> list[str]:
    """A note on the custom calls with rules that devices run whole, and one on prices."""
    notes = []
    # In jax.shard_map, a device runs the call on its own part.
    whole = [
        rule.runs_whole and not signature.attribute("manual")
        for rule, signature in zip(analysis.rules, analysis.program.signatures, strict=True)
    ]
    if names := _names(analysis, whole):
        reason = (
            "the call states the sizes of whole operands; wrap it in jax.shard_map"
            if analysis.lowering == "local"
            else "XLA does not partition a custom call; wrap it in jax.shard_map, or state "
            "partitioned(Op) in a rule file if it brings its own partitioning"
        )
        notes.append(f"every device runs {names} whole, because {reason}")
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
