"""Alternatives to a plan that take another trace: other memory policies, other microbatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

from toast import api
from toast.analysis import Analysis
from toast.errors import HardwareError, PlanError
from toast.explain import other_policy
from toast.frontend.microbatches import check_microbatches
from toast.plan import Plan, WhyNot, is_joint, joint_plan, with_same_shardings
from toast.program import Choice, MemoryPolicy
from toast.search import Settings

#: A memory policy as users state it; ``None`` for what the program says.
_Policy = str | MemoryPolicy | None


class _PlanWith(Protocol):
    """Plans the program of a plan with another memory policy."""

    def __call__(
        self, policy: _Policy, /, start: Plan | None = None, microbatches: int | None = None
    ) -> Plan: ...


def why_not(
    plan: Plan,
    target: Any,
    *arguments: Any,
    remat: str | MemoryPolicy | None = None,
    microbatches: int | None = None,
    keep: str | Sequence[str] | None = None,
    recompute: str | Sequence[str] | None = None,
    offload: str | Sequence[str] | None = None,
    gathered: str | Sequence[str] | None = None,
    budget: float | None = 10.0,
    progress: Callable[[Any], None] | None = None,
    **options: Any,
) -> WhyNot[Plan]:
    """Compare a plan with one that recomputes other values, or has other microbatches.

    A plan does not have the function that it is for, so that this takes it again, to trace and plan
    it with one of the alternatives.  :meth:`Plan.why_not` compares other shardings.

    :param plan: a plan of the function.
    :param target: the function, with ``arguments`` and ``options`` (``donate``, ``platform``,
        ``trip_counts``, ``rules``, keyword arguments) as for the plan.
    :param remat: another memory policy, as for :func:`toast.plan`.
    :param microbatches: another number of microbatches.
    :param keep: names of residuals, separated by commas or as a list, which are kept instead; also
        names with ``*``, or kinds (``@product``).  Other residuals stay as in the plan.
    :param recompute: residuals that are recomputed instead.
    :param offload: residuals that are offloaded instead.
    :param gathered: arguments of blocks whose gathered copies stay in memory.
    :param budget: the most seconds of a search (None: without a limit), which starts from the
        shardings of the plan.
    :param progress: as for :func:`toast.plan`.
    :returns: the comparison: the alternative is its ``searched``.
    :raises toast.errors.PlanError: if there is not exactly one alternative, the function is not
        that of the plan, or the plan has no policy that an alternative would change.
    :raises toast.errors.TargetError: if the function cannot be traced so.

    >>> import jax, jax.numpy as jnp, toast
    >>> layer = toast.checkpoint(lambda x, w: jnp.sin(x @ w), name="layer")
    >>> gradient = jax.grad(lambda w, x: layer(x, w).sum())
    >>> f32 = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    >>> plan = toast.plan(gradient, f32, f32, mesh="data=4", hardware="tpu-v5e", remat="none")
    >>> answer = toast.why_not(plan, gradient, f32, f32, remat="full")
    >>> answer.now, answer.spec, answer.accept().policy.label
    (('none',), 'full', 'full')
    """
    named = {
        "remat": remat, "microbatches": microbatches, "keep": keep, "recompute": recompute,
        "offload": offload, "gathered": gathered,
    }  # fmt: skip
    asked = {option: value for option, value in named.items() if value is not None}
    if len(asked) != 1:
        raise PlanError(
            f"toast.why_not: {' and '.join(asked) or 'no alternative'}; use one of "
            f"{', '.join(named)} at a time"
        )
    if not isinstance(plan, Plan):
        raise PlanError(f"toast.why_not: {type(plan).__name__} is no plan; use that of toast.plan")
    ((option, value),) = asked.items()
    check_microbatches(microbatches)
    memory = plan.analysis.program.memory
    own_count = memory.microbatches if memory else None
    options = {**options, "platform": api.platform_of(options.get("platform"), plan.hardware)}

    def planned(
        policy: _Policy, /, start: Plan | None = None, microbatches: int | None = None
    ) -> Plan:
        count = microbatches or own_count
        analysis = api.analyze(
            target, *arguments, remat=policy, microbatches=count, progress=progress,
            lowering=plan.analysis.lowering, **options,
        )  # fmt: skip
        _check_alike(plan, analysis)
        other = planned_alike(plan, analysis, start=start, budget=budget, progress=progress)
        if plan.origin is None:
            return other
        label = policy.label if isinstance(policy, MemoryPolicy) else policy or ""
        origin = dataclasses.replace(plan.origin, remat=label, microbatches=count or 0)
        return dataclasses.replace(other, origin=origin)

    own = memory.policy if memory else None
    return alternative(
        plan, option, value, planned, own_policy=(own.preset or own) if own else None,
        may_cut_batch=own_count in (None, 1), progress=progress,
    )  # fmt: skip


def alternative(
    plan: Plan,
    option: str,
    value: Any,
    planned: _PlanWith,
    *,
    own_policy: _Policy,
    may_cut_batch: bool,
    progress: Callable[[Any], None] | None = None,
    asked: str = "",
) -> WhyNot[Plan]:
    """Compare a plan with another one of its program, planned anew.

    :param plan: the plan.
    :param option: an option of :func:`why_not`.
    :param value: its value; names of residuals may be a text with commas.
    :param planned: plans the program with another policy and number of microbatches.
    :param own_policy: the policy of the plan, as its user stated it.
    :param may_cut_batch: whether ``remat="auto"`` chooses the number of microbatches, too.
    :param progress: as for :func:`toast.plan`.
    :param asked: what errors write before the option: ``--why-not`` on the command line.
    """
    before: tuple[str, ...] = ()
    if option == "microbatches":
        other = planned(own_policy, microbatches=value)
    elif option == "remat" and value == "auto":
        if is_joint(plan):
            raise PlanError(
                f"{asked}remat=auto: the plan has the policy that remat=auto chose; name another "
                "one, such as remat=minimal"
            )
        other = joint_plan(planned, progress, may_cut_batch=may_cut_batch)
    elif option == "remat":
        other = planned(value)
    else:
        names = value.split(",") if isinstance(value, str) else value
        names = [name for name in (name.strip() for name in names) if name]
        value = ",".join(names)
        policy, before = _changed(plan, cast(Choice, option), names, asked)
        other = planned(policy)
    text = value.label if isinstance(value, MemoryPolicy) else str(value)
    return other_policy(plan, other, option, text, before)


def planned_alike(
    plan: Plan,
    analysis: Analysis,
    *,
    start: Plan | None,
    budget: float | None,
    progress: Callable[[Any], None] | None,
) -> Plan:
    """The plan of another trace of a plan's program, under the same options.

    The search starts from ``start``, or else from the shardings of ``plan``, and takes at most
    ``budget`` seconds.  The result may not fit.
    """
    memory = analysis.program.memory
    alike = memory is None or memory.microbatches == plan.microbatches
    if start is None:
        start = with_same_shardings(plan, analysis) if alike else plan
    # A limit of the user would be an error for plans that do not fit.
    machine = dataclasses.replace(plan.hardware, memory_limit_bytes=plan.memory_bytes)
    other = api.plan(
        analysis, mesh=plan.mesh, hardware=machine, safety=plan.safety, overlap=plan.model.overlap,
        constraints=plan.constraints, resolution=plan.resolution, start=start,
        settings=Settings(seed=plan.seed, budget=budget), progress=progress,
    )  # fmt: skip
    return dataclasses.replace(other, hardware=plan.hardware)


def _check_alike(plan: Plan, analysis: Analysis) -> None:
    """Raises :class:`toast.errors.PlanError` for a function that is not that of a plan."""
    mine, other = plan.analysis.program, analysis.program
    if _argument_types(mine) != _argument_types(other):
        raise PlanError(
            f"toast.why_not: {other.name} has other arguments than the program of the plan "
            f"({mine.name}); use the function and the arguments that it was made from"
        )
    if mine.donated != other.donated:
        raise PlanError(
            "toast.why_not: other arguments are donated than in the plan; use donate= as there"
        )


def _argument_types(program: Any) -> list[tuple[str, str]]:
    types = [str(program.values[value].type) for value in program.argument_values]
    return [*zip(program.arguments, types, strict=True)]


def _changed(
    plan: Plan, choice: Choice | Literal["gathered"], names: Sequence[str], asked: str
) -> tuple[MemoryPolicy, tuple[str, ...]]:
    """The policy of a plan with another choice for residuals, and what it did with these."""
    memory, text = plan.analysis.program.memory, f"{choice}={','.join(names)}"
    if memory is None or memory.policy is None:
        others = "recompute" if choice == "gathered" else "keep"
        policy = f"*: {others}=* {text}"
        instead = f"{asked}'remat={policy}'" if asked else f"remat={policy!r}"
        raise PlanError(
            f"{asked}{text}: the plan has no memory policy, which this would change; use "
            f"{instead}, or make the plan with {'--remat' if asked else 'remat='}"
        )
    if choice == "offload" and not plan.hardware.has_host_link:
        raise HardwareError(
            f"{asked}{text}: the file of {plan.hardware.name} has no [host] with the speed of the "
            "link to the memory of the host; add it to a copy of the file, and plan with that"
        )
    return memory.policy.changed(memory.blocks, choice, names, dict(memory.own_names))
