"""``jax.checkpoint`` in the program itself, whose policies a plan leaves as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax

from toast.frontend.memory_tracing import MemoryTrace
from toast.frontend.residual_names import REMATS, inner_jaxpr, own_names
from toast.program.memory_policy import OWN_CHECKPOINT


def checkpoints_in(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """The equations of ``jax.checkpoint`` in a jaxpr, and how often loops run each."""
    for equation in jaxpr.eqns:
        inner = inner_jaxpr(equation)
        if inner is None:
            continue
        if equation.primitive.name in REMATS:
            yield equation, 1
        else:
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            yield from ((found, runs * times) for found, runs in checkpoints_in(inner))


def leave(trace: MemoryTrace, equation: Any, effect: str = "") -> None:
    """Records in a trace that a ``jax.checkpoint`` stays as it is, and its ``effect`` on the plan.

    The text is, for example, ``layer at model.py:12 has a jax.checkpoint of its own``.
    """
    place, policy = checkpoint_place(equation), _policy_text(equation.params.get("policy"))
    names = own_names(inner_jaxpr(equation))
    trace.leave(f"{place} {OWN_CHECKPOINT}{policy}{effect and f', {effect}'}", names, place)


def checkpoint_place(equation: Any) -> str:
    """The function in a ``jax.checkpoint`` with its place: ``layer at model.py:12``."""
    debug_info = inner_jaxpr(equation).debug_info
    name, _, path = str(getattr(debug_info, "func_src_info", "a block")).partition(" at ")
    return f"{name} at {path.rpartition('/')[2]}" if path else name


def _policy_text(policy: Any) -> str:
    """The policy of a ``jax.checkpoint`` as text, if it has one."""
    if policy is None:
        return ""
    # Policies of older versions of JAX are no functions, but of classes with their names.  Of two
    # names, the last is the newer one.
    listed = sorted(
        name for name, known in vars(jax.checkpoint_policies).items() if known == policy
    )
    of_class = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(policy).__qualname__).lower()
    own = getattr(policy, "__qualname__", listed[-1] if listed else of_class)
    return f" with policy {own.partition('.<locals>')[0].strip('_')}"
