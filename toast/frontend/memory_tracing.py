"""The memory policy and the microbatches under which functions are being traced.

A plan chooses these, and they change what ``toast.checkpoint`` and ``toast.accumulate`` do while a
function is traced for it.  Outside of that they do what the program says.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from toast.errors import AccumulationError, TargetError
from toast.program import (
    Block,
    BlockPolicy,
    MemoryPolicy,
    Residual,
    RunRange,
    TracedMemory,
)
from toast.units import listed


@dataclasses.dataclass(eq=False)
class MemoryTrace:
    """What a trace shall do, and what it saw."""

    #: ``None`` if recomputation in the program stays as it is.
    policy: MemoryPolicy | None
    #: ``None`` if the program's own number of microbatches stays.
    microbatches: int | None
    #: Blocks by name.
    blocks: dict[str, Block] = dataclasses.field(default_factory=dict)
    #: The names of residuals of the jaxprs that were seen, by text.
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: The number of functions that were differentiated.
    gradients: int = 0
    #: The number of microbatches of each ``toast.accumulate``.
    accumulated: list[int] = dataclasses.field(default_factory=list)
    #: Recomputation of the program that stays, and blocks that cannot be computed again.
    own: list[str] = dataclasses.field(default_factory=list)
    #: Names of values in a ``jax.checkpoint`` of the program, and where this is.
    own_names: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Whether the body of a block is being traced: blocks inside it are parts of it.
    inside: bool = False
    #: How often the loops of microbatches run what is being traced.
    repeats: int = 1
    #: The residuals of blocks, by names without ranges.
    _equal: dict[str, tuple[Residual, ...]] = dataclasses.field(default_factory=dict)

    def add(self, block: Block) -> Block:
        """A block, which is recorded, with its name: calls of equal blocks count as runs."""
        name, number = block.name, 2
        while name in self._equal and self._equal[name] != block.residuals:
            name, number = f"{block.name}_{number}", number + 1
        self._equal[name] = block.residuals
        block = dataclasses.replace(block, name=name)
        self._count(block, block.runs * self.repeats)
        return block

    def _count(self, block: Block, runs: int) -> None:
        known = self.blocks.get(block.name)
        runs += known.runs if known else 0
        alike = known is None or known.repeats == self.repeats
        self.blocks[block.name] = dataclasses.replace(
            block, runs=runs, repeats=self.repeats if alike else 1
        )

    def decision(self, block: Block) -> BlockPolicy:
        """The decision for a block; everything is kept where its runs decide differently."""
        assert self.policy is not None
        if self.policy.cuts(block.name):
            return BlockPolicy(block.name, keep=("*",)).resolved(block)
        return self.policy.of(block.name).resolved(block)

    def repeat(self, block: str, times: int) -> None:
        """Records that a block runs ``times`` more times than it was called."""
        self._count(self.blocks[block], times * self.repeats)

    def move(self, block: Block, runs: int) -> None:
        """Records that ``runs`` runs of a block, whose name has a range, are apart from others."""
        self.blocks.pop(RunRange.parse(block.name).block, None)
        self._count(block, runs * self.repeats)

    def remark(self, text: str) -> None:
        """Records recomputation that stays as it is."""
        if text not in self.own:
            self.own.append(text)

    def leave(self, text: str, names: Iterable[str], place: str) -> None:
        """Records a ``jax.checkpoint`` of the program, with the names of values in it."""
        self.remark(text)
        self.own_names.update((name, place) for name in names if name not in self.own_names)

    def record(self, name: str, *, differentiated: bool = True) -> TracedMemory:
        """What the trace of the program ``name`` did, after it is complete.

        ``differentiated`` is whether the program has ops of gradients.

        Raises :class:`toast.errors.TargetError` if there is nothing to recompute or to accumulate,
        or if the policy names blocks or residuals that the program does not have.
        """
        if self.microbatches is not None and self.microbatches > 1 and not self.accumulated:
            raise AccumulationError(
                f"{name}: microbatches={self.microbatches}, but no gradients are accumulated in "
                "it; use toast.accumulate(jax.value_and_grad(loss), batch_argnums=...) in the step"
            )
        blocks = tuple(self.blocks.values())
        if self.policy is not None and not (blocks and (differentiated or self.gradients)):
            self._check_blocks(name, self.policy)
        policy = self.policy and self.policy.resolved(blocks, self.own_names)
        microbatches = max(self.accumulated, default=1)
        return TracedMemory(
            policy, microbatches, blocks, tuple(self.own), bool(self.accumulated),
            tuple(self.own_names.items()),
        )  # fmt: skip

    def _check_blocks(self, name: str, policy: MemoryPolicy) -> None:
        """Raises an error if a program without blocks cannot have the policy."""
        if not self.gradients:
            raise TargetError(
                f"{name}: remat {policy.label}: nothing is differentiated in it, so that there is "
                "nothing to recompute; leave out remat, or plan the train step"
            )
        if policy.preset != "none":
            advice = "use toast.checkpoint(layer) around its layers"
            if self.own:
                advice = (
                    f"what stays as it is: {listed(self.own)}; use toast.checkpoint(layer) around "
                    "other layers, or in place of jax.checkpoint"
                )
            raise TargetError(
                f"{name}: remat {policy.label}: there is no scan and no repeated layer that may be "
                f"recomputed; {advice}"
            )


@dataclasses.dataclass(frozen=True)
class _Request:
    """What the next traces shall do."""

    policy: MemoryPolicy | None
    microbatches: int | None


_REQUESTED: contextvars.ContextVar[_Request | None] = contextvars.ContextVar(
    "_REQUESTED", default=None
)


@contextlib.contextmanager
def requested(policy: MemoryPolicy | None, microbatches: int | None) -> Iterator[None]:
    """Programs that are traced in this block have this policy and these microbatches."""
    if policy is None and microbatches is None:
        yield
        return
    token = _REQUESTED.set(_Request(policy, microbatches))
    try:
        yield
    finally:
        _REQUESTED.reset(token)


def requested_trace() -> MemoryTrace | None:
    """A new trace as requested; ``None`` if nothing is."""
    request = _REQUESTED.get()
    return None if request is None else MemoryTrace(request.policy, request.microbatches)


#: JAX does not use functions that were traced in another context again.
_CONTEXT = jax.make_user_context(None)


def current() -> MemoryTrace | None:
    """The trace for a plan that is in progress in this thread."""
    trace: MemoryTrace | None = _CONTEXT.value
    return trace


def planned() -> bool:
    """Whether the policy of a plan decides about recomputation in the trace in progress."""
    trace = current()
    return trace is not None and trace.policy is not None


@contextlib.contextmanager
def tracing(trace: MemoryTrace) -> Iterator[MemoryTrace]:
    """Traces in this block do what ``trace`` says."""
    with _CONTEXT(trace):
        yield trace


@contextlib.contextmanager
def repeated(times: int) -> Iterator[None]:
    """The body of a loop, which runs ``times`` times, is traced in this block."""
    trace = current()
    before = 1 if trace is None else trace.repeats
    if trace is not None:
        trace.repeats = before * times
    try:
        yield
    finally:
        if trace is not None:
            trace.repeats = before


@contextlib.contextmanager
def inside(trace: MemoryTrace) -> Iterator[None]:
    """The body of a block is traced in this block."""
    before, trace.inside = trace.inside, True
    try:
        yield
    finally:
        trace.inside = before
