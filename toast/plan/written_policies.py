"""The programs that memory policies make of the survey of a plan, as starts and as prices."""

from __future__ import annotations

from toast.cost import CostModel
from toast.cost.policy_programs import NotWritten
from toast.cost.prices import Prices
from toast.cost.residuals import residuals_of
from toast.plan.plan import Plan
from toast.plan.same_shardings import same_shardings
from toast.plan.starting_plan import ShardedOps
from toast.plan.survey_prices import PolicyPrices
from toast.program import Program, preset
from toast.space import Space


def written_ops(surveyed: Plan, traced: Program) -> ShardedOps | None:
    """The ops of the program that the policy of ``traced`` makes of a survey.

    They have the shardings of the survey's plan.  ``None`` if no such program is written, or if it
    has other microbatches.
    """
    memory, ours = surveyed.analysis.program.memory, traced.memory
    if not memory or not ours or not ours.policy or ours.microbatches != memory.microbatches:
        return None
    policy, residuals = ours.policy, surveyed.model.policies.residuals
    cuts = {block.name: policy.cuts(block.name) for block in memory.blocks}
    if any(cuts.values()):
        residuals = residuals_of(surveyed.analysis.program, cuts)
    try:
        space, state = surveyed.policy_prices.sharded(residuals, residuals.choices([policy]))
    except NotWritten:
        return None
    return ShardedOps(space.analysis.program, space.mesh, space.of_ops(state))


def policy_prices(surveyed: Plan) -> PolicyPrices:
    """Prices of the shardings of a survey's plan under policies."""
    return PolicyPrices(surveyed.model, surveyed.state)


def kept_price(plan: Plan, surveyed: Plan) -> Prices | None:
    """The price of a plan's program with everything kept, under the plan's shardings.

    :param plan: a plan of the program that a policy makes of the survey.
    :param surveyed: a plan of the survey of the program, on the same mesh; its shardings do not
        matter.
    :returns: the price; ``None`` if the program is not written.
    """
    ours, theirs = plan.analysis.program, surveyed.analysis.program
    alike = plan.mesh == surveyed.mesh and plan.microbatches == surveyed.microbatches
    if not theirs.memory or not alike or ours.padding != theirs.padding:
        return None
    op_state = same_shardings(ours, plan.op_state, surveyed.model.space)
    space = Space(
        surveyed.analysis, surveyed.mesh, constraints=surveyed.constraints,
        resolution=surveyed.resolution, apart=op_state,
    )  # fmt: skip
    model = CostModel(
        space, surveyed.hardware, overlap=surveyed.model.overlap, like=surveyed.model,
        safety=surveyed.safety,
    )  # fmt: skip
    state = space.within(op_state[space.classes.representative])
    residuals = surveyed.model.policies.residuals
    everything = preset("none").resolved(theirs.memory.blocks)
    try:
        return PolicyPrices(model, state).price(residuals, residuals.choices([everything]))
    except NotWritten:
        return None
