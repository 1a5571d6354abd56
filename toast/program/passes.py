"""The passes of a differentiated program, from the paths that JAX gives ops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

#: What an op belongs to: the forward pass, the backward pass, what the backward pass computes again
#: of the forward pass; or nothing of these, such as an optimizer.
Pass = Literal["forward", "backward", "recomputed", ""]

#: The kind of op that begins what ``jax.checkpoint`` computes again.
_BARRIER = "optimization_barrier"


def passes_of(ops: Iterable[tuple[str, str]]) -> list[Pass]:
    """``[ops]`` the pass of each op, from its kind and its path.

    The paths of functions that JAX lowers once, such as ``silu``, do not begin at the program, and
    some ops have no path.  These ops belong to the pass of the op before them.  Bodies of loops are
    such functions in some versions of JAX; what a block computes there after its recomputation
    belongs to the backward pass.
    """
    passes: list[Pass] = []
    current: Pass = ""
    for kind, path in ops:
        begins = kind == _BARRIER and "transpose(" in path
        if begins or "rematted_computation" in path:
            current = "recomputed"
        elif "transpose(" in path:
            current = "backward"
        elif "jvp(" in path:
            current = "forward"
        elif path.startswith("jit("):
            current = ""
        elif current == "recomputed" and path.startswith("checkpoint/"):
            current = "backward"
        passes.append(current)
    return passes


__all__ = ["Pass", "passes_of"]
