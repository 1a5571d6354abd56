"""The passes of a differentiated program, from the paths that JAX gives ops."""

from __future__ import annotations

from typing import Literal

from toast.program.program import Program

#: What an op belongs to: the forward pass, the backward pass, what the backward pass computes again
#: of the forward pass; or nothing of these, such as an optimizer.
Pass = Literal["forward", "backward", "recomputed", ""]

#: The kind of op that begins what ``jax.checkpoint`` computes again.
_BARRIER = "optimization_barrier"


def passes_of(program: Program) -> list[Pass]:
    """``[ops]`` the pass of each op.

    The paths of functions that JAX lowers once, such as ``silu``, do not begin at the program, and
    some ops have no path.  These ops belong to the pass of the op before them.  Bodies of loops are
    such functions in some versions of JAX; what a block computes there after its recomputation
    belongs to the backward pass.
    """
    passes: list[Pass] = []
    current: Pass = ""
    for op in range(len(program.ops)):
        path = program.location(op).path
        begins = program.kind(op) == _BARRIER and "transpose(" in path
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
