"""A memory policy as MaxText's configuration has it: ``remat_policy: custom``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from toast.errors import PlanError
from toast.program import PRESETS, Choice, RunRange, TracedMemory
from toast.units import listed

#: MaxText's names of values, each with the other names that TOAST's models give them.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "decoder_layer_input": ("layer_input",),
    "context": ("attention",),
    "mlpwi": (),
    "mlpwi_0": ("gate",),
    "mlpwi_1": ("up",),
    "mlpwo": ("mlp_output",),
    "moe_mlpwi_0": ("expert_gate",),
    "moe_mlpwi_1": ("expert_up",),
    "moe_mlpwo": (),
    "query_proj": ("query",),
    "key_proj": ("key",),
    "value_proj": ("value",),
    "kv_proj": (),
    "qkv_proj": (),
    "out_proj": ("attention_output",),
}
#: The most residuals that an error lists.
_MOST_LISTED = 12

_WORDS: Mapping[Choice, str] = {"keep": "device", "recompute": "remat", "offload": "offload"}

#: Presets that MaxText does not have: its own ``none`` recomputes everything.
_OWN = frozenset({"none", "named"})

#: The preset of MaxText that keeps most, and the names that it keeps.
_MOST = "minimal_with_context"
_KEPT_BY_MOST = frozenset({
    "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "query_proj", "key_proj", "value_proj",
    "kv_proj", "qkv_proj", "out_proj",
})  # fmt: skip


def maxtext_policy(memory: TracedMemory | None) -> str:
    """The lines of MaxText's configuration for the policy and the microbatches of a program.

    Values that are kept or offloaded and have no name in MaxText are listed in a comment.  MaxText
    cannot keep everything: if the plan does, the lines keep all that has a name in MaxText.  Raises
    :class:`toast.errors.PlanError` if there is no policy, if no value has a name of MaxText, or if
    two blocks, or the runs of one, decide differently.
    """
    policy = None if memory is None else memory.policy
    if memory is None or policy is None:
        raise PlanError("the plan has no memory policy; plan with remat=, for example remat='auto'")
    cut = maxtext_microbatches(memory)
    if policy.preset in PRESETS and policy.preset not in _OWN:
        return f"remat_policy: {policy.preset}\n{cut}"
    parts = [block.name for block in memory.blocks if RunRange.parse(block.name).is_part]
    if parts:
        raise PlanError(
            f"layers decide differently ({', '.join(parts)}), and MaxText has one decision for all "
            "of them; plan with a policy for all layers, such as remat='minimal'"
        )
    known = {name: key for key, names in _NAMES.items() for name in (key, *names)}
    if memory.blocks and all(
        policy.of(block.name).resolved(block).keeps_all for block in memory.blocks
    ):
        named = {known.get(r.name) for block in memory.blocks for r in block.residuals}
        return "\n".join(_lines_of_everything(named)) + f"\n{cut}"
    chosen: dict[str, Choice] = {}
    nameless: dict[Choice, list[str]] = {"keep": [], "offload": []}
    for block in memory.blocks:
        of_block = policy.of(block.name)
        for residual in block.residuals:
            choice = of_block.choice(residual)
            key = known.get(residual.name)
            if key is None:
                if choice in nameless and residual.kind != "input":
                    nameless[choice].append(residual.name)
            elif chosen.setdefault(key, choice) != choice:
                blocks = listed([block.name for block in memory.blocks])
                raise PlanError(
                    f"blocks ({blocks}) decide differently about {residual.name}, and MaxText has "
                    "one decision for all layers; give it the same one in each block"
                )
    if not chosen:
        names = dict.fromkeys(
            r.name for block in memory.blocks for r in block.residuals if r.kind != "input"
        )
        has = f": it has {listed([*names], _MOST_LISTED)}" if names else ""
        raise PlanError(
            f"no residual of the plan has a name of MaxText{has}; name them with "
            f"jax.ad_checkpoint.checkpoint_name: {', '.join(_NAMES)}"
        )
    return "\n".join(_lines(chosen, nameless)) + f"\n{cut}"


def maxtext_microbatches(memory: TracedMemory | None) -> str:
    """The lines of MaxText's configuration for the microbatches of a program, if there are several.

    MaxText's ``per_device_batch_size`` is that of one microbatch.
    """
    if memory is None or memory.microbatches < 2:
        return ""
    return (
        f"gradient_accumulation_steps: {memory.microbatches}\n"
        f"# per_device_batch_size: that of the step, divided by {memory.microbatches}\n"
    )


def _lines_of_everything(named: Collection[str | None]) -> Iterator[str]:
    """The lines for a plan that keeps everything; ``named`` are its residuals' names in MaxText."""
    yield "# the plan keeps everything; MaxText computes again what has no name in it"
    others = [key for key in _NAMES if key in named and key not in _KEPT_BY_MOST]
    if [*others] in ([], ["decoder_layer_input"]):  # which MaxText keeps anyway
        yield f"remat_policy: {_MOST}"
        return
    yield "remat_policy: custom"
    for key in _NAMES:
        if key in _KEPT_BY_MOST or key in others:
            yield f"{key}: device"


def _lines(chosen: Mapping[str, Choice], nameless: Mapping[Choice, list[str]]) -> Iterator[str]:
    yield "remat_policy: custom"
    for key in _NAMES:
        if key in chosen:
            choice = chosen[key]
            if key == "decoder_layer_input" and choice == "recompute":
                choice = "keep"  # MaxText can compute it from nothing
            yield f"{key}: {_WORDS[choice]}"
    for choice, names in nameless.items():
        if names:
            every = ", ".join(dict.fromkeys(names))
            yield f"# {_WORDS[choice]}, without a name in MaxText: {every}"


__all__ = ["maxtext_policy"]
