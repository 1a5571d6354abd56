"""A memory policy as JAX has it: a function for ``jax.checkpoint(f, policy=...)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toast.errors import PlanError
from toast.program import Block, BlockPolicy, MemoryPolicy, Residual, RunRange, TracedMemory
from toast.units import listed

#: What JAX asks a policy for each op: whether its results may be kept.
JaxPolicy = Callable[..., Any]


def jax_policy(memory: TracedMemory | None, block: str = "") -> JaxPolicy:
    """The decision for a block as a policy of ``jax.checkpoint``.

    :param memory: the policy of a program, and its blocks.
    :param block: the name of the block; it may be left out if all of them decide alike.
    :raises toast.errors.PlanError: if there is no policy, no block or none with the name, if blocks
        or the runs of one decide differently, or if a policy of JAX cannot tell what is kept.

    A policy of JAX says nothing about gathers: arguments that are ``gathered`` in the decision are
    gathered again, unless ``prevent_cse`` of ``jax.checkpoint`` is false for them.
    """
    if memory is None or memory.policy is None:
        raise PlanError("the plan has no memory policy; plan with remat=, for example remat='auto'")
    if not memory.blocks:
        left = f" ({'; '.join(memory.own)}, which the plan leaves as it is)" if memory.own else ""
        raise PlanError(
            f"the plan has a memory policy, but no block that it decides about{left}; mark layers "
            "with toast.checkpoint instead of jax.checkpoint, and plan again"
        )
    parts = [b.name for b in memory.blocks if RunRange.parse(b.name).is_part]
    if mine := [part for part in parts if block in ("", RunRange.parse(part).block)]:
        raise PlanError(
            f"layers decide differently ({', '.join(mine)}), and a jax.checkpoint has one policy "
            "for all of them; name one of these ranges, or plan with a policy for all layers, such "
            "as remat='minimal'"
        )
    known = {b.name: b for b in memory.blocks}
    if block and block not in known:
        raise PlanError(f"no block is named {block}; use {listed([*known])}")
    chosen = [known[block]] if block else [*memory.blocks]
    found = {_decision(memory.policy, each): each for each in chosen}
    if len(found) > 1:
        raise PlanError(
            f"blocks decide differently ({', '.join(b.name for b in chosen)}); name one of them"
        )
    (decision,) = found
    return _policy(decision)


class _Decision(NamedTuple):
    """What a policy of JAX is made of."""

    #: The names in the program that are kept.
    saved: frozenset[str] = frozenset()
    #: Those that are offloaded.
    offloaded: frozenset[str] = frozenset()
    #: Whether all products without batch dimensions are kept.
    products: bool = False
    #: Whether everything is kept.
    everything: bool = False


def _decision(policy: MemoryPolicy, block: Block) -> _Decision:
    """The decision for a block; values that have no name in the program count as products."""
    decision = policy.of(block.name).resolved(block)
    if decision.keeps_all:
        return _Decision(everything=True)
    kept = [r for r in block.residuals if r.name in decision.keep and r.kind != "input"]
    moved = [r for r in block.residuals if r.name in decision.offload]
    nameless = [r for r in (*kept, *moved) if not r.own]
    if nameless and not _are_all_products(nameless, decision, block):
        raise PlanError(
            f"{block.name}: {listed([r.name for r in nameless])} "
            f"{'has' if len(nameless) == 1 else 'have'} no name in the program, by which a policy "
            "of JAX could keep or offload it; name values with jax.ad_checkpoint.checkpoint_name, "
            "or use toast.checkpoint, which needs no names, and plan.jit()"
        )
    return _Decision(
        frozenset(r.name for r in kept if r.own), frozenset(r.name for r in moved), bool(nameless)
    )


def _are_all_products(nameless: Sequence[Residual], decision: BlockPolicy, block: Block) -> bool:
    """Whether values without names are those that a policy for all products keeps."""
    products = {r.name for r in block.residuals if r.kind == "product"}
    return products <= {*decision.keep} and all(r.name in products for r in nameless)


def _policy(decision: _Decision) -> JaxPolicy:
    import jax

    from toast.frontend.checkpoints import policy_by_names
    from toast.frontend.residual_names import PRODUCTS

    if decision.everything:
        everything: JaxPolicy = jax.checkpoint_policies.everything_saveable
        return everything
    by_name = policy_by_names(sorted(decision.saved), sorted(decision.offloaded))
    if not decision.products:
        return by_name

    def products_and_names(primitive: Any, *types: Any, **parameters: Any) -> Any:
        name = primitive.name
        batched = name == "dot_general" and any(parameters["dimension_numbers"][1])
        if name in PRODUCTS and not batched:
            return True
        return by_name(primitive, *types, **parameters)

    return products_and_names


__all__ = ["jax_policy"]
