"""``toast.checkpoint``: a block of which a plan decides what is kept for the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core

from toast.frontend import memory_tracing
from toast.frontend.memory_tracing import MemoryTrace
from toast.frontend.own_checkpoints import checkpoint_place, checkpoints_in, leave
from toast.frontend.residual_names import (
    ArgumentPlaces,
    closed_jaxpr,
    custom_gradient_text,
    effect_text,
    named_block,
    with_views_before,
)
from toast.program import Block, BlockPolicy, RunRange, residual_label
from toast.program.memory_policy import MARKED, MARKED_WITH_POLICY


def checkpoint(
    layer: Callable[..., Any] | None = None,
    *,
    name: str = "",
    policy: Callable[..., Any] | None = None,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
) -> Callable[..., Any]:
    """A layer whose values a plan may recompute in the backward pass, or offload to the host.

    It stands where ``jax.checkpoint(layer)`` stood, and does the same outside of
    :func:`toast.plan`.  While a function is traced for a plan with ``remat``, the values of the
    layer that the backward pass needs have names, and the policy of the plan decides about each.

    :param layer: a function of arrays.  Without it, the result is a decorator.
    :param name: the name of the block in policies; by default that of the function.
    :param policy: as in ``jax.checkpoint``, outside of plans; a note of a plan says that its own
        policy decides instead.
    :param prevent_cse: as in ``jax.checkpoint``; plans have no barrier in loops of scans.
    :param static_argnums: as in ``jax.checkpoint``.

    >>> import jax, jax.numpy as jnp, toast
    >>> @toast.checkpoint
    ... def layer(x, w):
    ...     return jnp.sin(x @ w)
    >>> gradient = jax.grad(lambda w, x: layer(x, w).sum())
    >>> f32 = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> plan = toast.plan(gradient, f32, f32, mesh="data=4", hardware="tpu-v5e", remat="full")
    >>> print(plan.policy)
    layer: keep=x,w recompute=layer.dot_general
    """
    if layer is None:
        return functools.partial(
            checkpoint, name=name, policy=policy, prevent_cse=prevent_cse,
            static_argnums=static_argnums,
        )  # fmt: skip
    function = layer
    fixed = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    plain = jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse, static_argnums=fixed)
    block = name or name_of(function)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        trace = memory_tracing.current()
        if trace is None or not memory_tracing.planned():
            return plain(*arguments, **keywords)
        if trace.inside:  # a part of the block around it, which decides about its values
            return function(*arguments, **keywords)
        places = {place % len(arguments) for place in fixed if -len(arguments) <= place}
        free = [number for number in range(len(arguments)) if number not in places]

        def of_arrays(some: Sequence[Any], keywords: Any) -> Any:
            every = dict(enumerate(arguments)) | dict(zip(free, some, strict=True))
            return function(*(every[number] for number in range(len(arguments))), **keywords)

        given = [arguments[number] for number in free], keywords
        paths, tree = jax.tree_util.tree_flatten_with_path(given)
        labels = _labels(function, [path for path, _ in paths], free)

        def flat(*leaves: Any) -> Any:
            return of_arrays(*tree.unflatten(leaves))

        leaves = [leaf for _, leaf in paths]
        with memory_tracing.inside(trace):
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        found = policed(
            trace, closed, block, labels, prevent_cse=prevent_cse,
            origin=MARKED if policy is None else MARKED_WITH_POLICY,
        )  # fmt: skip
        run = jax.extend.core.jaxpr_as_fun(closed) if found is None else found.run(marked=True)
        return jax.tree.structure(shapes).unflatten(run(*leaves))

    return wrapped


def policed(
    trace: MemoryTrace,
    closed: Any,
    name: str,
    inputs: Sequence[str],
    *,
    prevent_cse: bool,
    origin: str,
    runs: int = 1,
) -> PolicedBlock | None:
    """The block of a jaxpr, which the policy of a trace decides about.

    Parameters are those of :func:`named_block`.  ``None`` if there is nothing to decide.
    """
    if closed.jaxpr.effects:
        trace.remark(f"{name} has side effects ({effect_text(closed.jaxpr.eqns)})")
        return None
    try:
        with_names, block, places = named_block(
            closed, name, inputs, runs=runs, origin=origin, known=trace.names
        )
    except NotImplementedError as error:  # JAX does not compute effects again
        if "Effects not supported" not in str(error):
            raise
        trace.remark(f"{name} has side effects in {custom_gradient_text(closed.jaxpr)}")
        return None
    if all(residual.kind == "input" for residual in block.residuals):
        return None
    own = [equation for equation, _ in checkpoints_in(closed.jaxpr)]
    block = trace.add(
        dataclasses.replace(block, recomputes=tuple(dict.fromkeys(map(checkpoint_place, own))))
    )
    for equation in own:
        leave(trace, equation, f"which recomputes in {block.name} whatever the plan does")
    return PolicedBlock(trace, closed, block, with_names, places, prevent_cse)


@dataclasses.dataclass(frozen=True, eq=False)
class PolicedBlock:
    """A block that the policy of a trace decides about."""

    trace: MemoryTrace
    closed: Any
    block: Block
    with_names: Callable[..., Any]
    #: Where its residuals are that have the elements of arguments.
    places: ArgumentPlaces
    prevent_cse: bool

    def run(self, *, marked: bool) -> Callable[..., list[Any]]:
        """The function of its jaxpr, with names, under the policy.

        With ``marked``, a block that keeps everything is a ``jax.checkpoint`` as well, so that it
        can be told from other code.
        """
        decision = self.trace.decision(self.block)
        policy = PlannedPolicy(decision, self)
        # Without a policy, JAX would keep a value twice that has a name: with the name and without.
        chosen = self.closed if policy.keeps_all else self.with_names(policy.names)
        if self.trace.policy is not None and self.trace.policy.surveys:
            label = functools.partial(residual_label, self.block.name)
            chosen = self.with_names(self.block.names, label)
        apart = self.prevent_cse and not policy.keeps_all
        if apart and decision.gathered:
            return self._sharing(chosen, policy, decision.gathered)
        run: Callable[..., list[Any]] = jax.extend.core.jaxpr_as_fun(chosen)
        if marked or not policy.keeps_all:
            run = jax.checkpoint(run, policy=policy, prevent_cse=apart)
        return run

    def _sharing(
        self, chosen: Any, policy: PlannedPolicy, names: Sequence[str]
    ) -> Callable[..., list[Any]]:
        """The function whose backward pass uses what XLA made of arguments in the forward pass.

        There is no barrier before these.  Arguments that are rounded or reshaped first are
        computed outside of the block.
        """
        views = [self.places.views[name] for name in names if name in self.places.views]
        before, block = with_views_before(chosen, self.closed, views)
        shared = {self.places.numbers[name] for name in names if name in self.places.numbers}
        inputs = range(len(self.closed.jaxpr.invars))
        apart = (*(False for _ in views), *(number not in shared for number in inputs))
        inside = jax.checkpoint(
            jax.extend.core.jaxpr_as_fun(block), policy=policy, prevent_cse=apart
        )

        def run(*arguments: Any) -> list[Any]:
            results: list[Any] = inside(*before(*arguments), *arguments)
            return results

        return run

    def of_runs(self, runs: RunRange, count: int) -> PolicedBlock:
        """The block for ``count`` of its runs, which decide differently than others."""
        block = dataclasses.replace(self.block, name=str(runs), runs=count)
        self.trace.move(block, count)
        return dataclasses.replace(self, block=block)

    def within(self, jaxpr: Any) -> PolicedBlock:
        """The block in a jaxpr that has its equations; what they capture are arguments there."""
        mine = self.closed.jaxpr
        alike = [e.primitive for e in mine.eqns] == [e.primitive for e in jaxpr.eqns]
        assert alike, "names of values are by the places of equations"
        more = len(jaxpr.invars) - len(mine.invars)
        closed = closed_jaxpr(jaxpr)
        return dataclasses.replace(
            self,
            closed=closed,
            with_names=functools.partial(self.with_names, other=closed),
            places=self.places.after(more),
        )


class PlannedPolicy:
    """A policy of ``jax.checkpoint`` that a plan chose."""

    def __init__(self, decision: BlockPolicy, policed_block: PolicedBlock) -> None:
        #: The block.
        self.policed = policed_block
        #: Whether it is as if there were no ``jax.checkpoint``.
        self.keeps_all = decision.keeps_all
        # Arguments exist anyway: one that is kept under a name would be a copy.
        self._kept = tuple(
            r.name for r in policed_block.block.residuals
            if r.name in decision.keep and r.kind != "input"
        )  # fmt: skip
        self._offloaded = decision.offload
        self._policy = policy_by_names(self._kept, self._offloaded)

    @property
    def block(self) -> str:
        """The name of the block."""
        return self.policed.block.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values that are kept or offloaded."""
        return (*self._kept, *self._offloaded)

    def __call__(self, *arguments: Any, **parameters: Any) -> Any:
        """What JAX asks for each op: whether its results may be kept."""
        return self.keeps_all or self._policy(*arguments, **parameters)


def policy_by_names(kept: Sequence[str], offloaded: Sequence[str]) -> Callable[..., Any]:
    """The policy of ``jax.checkpoint`` that keeps and offloads values with these names."""
    policy: Callable[..., Any]
    if not offloaded:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return policy
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*kept], names_which_can_be_offloaded=[*offloaded],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    return policy


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, also of a partial one or a method; ``block`` for a lambda."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__)).strip("_")
    return "block" if not name or name.startswith("<") else name


def _labels(
    function: Callable[..., Any], paths: Sequence[Sequence[Any]], free: Sequence[int]
) -> list[str]:
    """Names of the leaves of the arguments: ``x``, ``params['wq']``."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in plain]

    def label(path: Sequence[Any]) -> str:
        if path[0].idx == 1:  # keywords
            return f"{path[1].key}{jax.tree_util.keystr(tuple(path[2:]))}"
        number = free[path[1].idx]
        first = names[number] if number < len(names) else f"input{number}"
        return f"{first}{jax.tree_util.keystr(tuple(path[2:]))}"

    return [label(path) for path in paths]
