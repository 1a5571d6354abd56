"""The memory policy and the microbatches under which functions are being traced.

A plan chooses these, and they change what ``toast.checkpoint`` and ``toast.accumulate`` do while a
function is traced for it.  Outside of that they do what the program says.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from toast.program import Block, BlockPolicy, MemoryPolicy, TracedMemory


@dataclasses.dataclass(eq=False)
class MemoryTrace:
    """What a trace shall do, and what it saw."""

    #: ``None`` if recomputation in the program stays as it is.
    policy: MemoryPolicy | None
    #: ``None`` if the program's own number of microbatches stays.
    microbatches: int | None
    #: Blocks by name, and the decisions for them.
    blocks: dict[str, Block] = dataclasses.field(default_factory=dict)
    resolved: dict[str, BlockPolicy] = dataclasses.field(default_factory=dict)
    #: The number of functions that were differentiated.
    gradients: int = 0
    #: The number of microbatches of each ``toast.accumulate``.
    accumulated: list[int] = dataclasses.field(default_factory=list)
    #: Recomputation of the program that stays, and blocks that cannot be computed again.
    own: list[str] = dataclasses.field(default_factory=list)
    #: Whether the body of a block is being traced: blocks inside it are parts of it.
    inside: bool = False

    def add(self, block: Block) -> BlockPolicy:
        """The decision for a block, which is recorded; calls of equal blocks count as runs."""
        assert self.policy is not None
        name, number = block.name, 2
        while name in self.blocks and self.blocks[name].residuals != block.residuals:
            name, number = f"{block.name}_{number}", number + 1
        known = self.blocks.get(name)
        runs = block.runs + (known.runs if known else 0)
        self.blocks[name] = block = dataclasses.replace(block, name=name, runs=runs)
        self.resolved[name] = self.policy.of(name).resolved(block)
        return self.resolved[name]

    def remark(self, text: str) -> None:
        """Records recomputation that stays as it is."""
        if text not in self.own:
            self.own.append(text)

    def record(self) -> TracedMemory:
        """What the trace did, after it is complete.

        Raises :class:`toast.errors.TargetError` if the policy names blocks or residuals that the
        program does not have.
        """
        blocks = tuple(self.blocks.values())
        policy = self.policy and self.policy.resolved(blocks)
        return TracedMemory(policy, max(self.accumulated, default=1), blocks, tuple(self.own))


#: JAX does not use functions that were traced in another context again.
_CONTEXT = jax.make_user_context(None)


def current() -> MemoryTrace | None:
    """The trace for a plan that is in progress in this thread."""
    trace: MemoryTrace | None = _CONTEXT.value
    return trace


@contextlib.contextmanager
def tracing(trace: MemoryTrace) -> Iterator[MemoryTrace]:
    """Traces in this block do what ``trace`` says."""
    with _CONTEXT(trace):
        yield trace


@contextlib.contextmanager
def inside(trace: MemoryTrace) -> Iterator[None]:
    """The body of a block is traced in this block."""
    before, trace.inside = trace.inside, True
    try:
        yield
    finally:
        trace.inside = before
