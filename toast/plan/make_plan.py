"""The plan for the result of a search or of a baseline."""

from __future__ import annotations

import itertools

import numpy as np

from toast.cost import CostModel
from toast.plan.labels import dimension_labels
from toast.plan.plan import Plan, Step
from toast.plan.prediction import Prediction, reason_of
from toast.plan.shard import shardings_of
from toast.search import MeshResult, SearchResult
from toast.space import Resolving
from toast.space.annotated import annotation_labels


def make_plan(
    model: CostModel,
    result: SearchResult,
    *,
    memory_bytes: float,
    seed: int,
    seconds: dict[str, float],
    method: str = "toast",
    note: str = "",
    meshes: tuple[MeshResult, ...] = (),
    resolution: Resolving = "compatible",
) -> Plan:
    """The plan for the result of a search.

    ``model`` prices the actions of ``result`` one by one for the predictions and reasons of the
    steps.  A result without actions, from a baseline, has no steps.  ``memory_bytes`` is the limit
    per device, ``seconds`` the time of each stage; ``seed``, ``method``, ``note``, ``meshes`` and
    ``resolution`` are copied into the plan.
    """
    space = model.space
    states = [space.unsharded]
    pinned = (space.pinned != space.unsharded).any()
    if pinned:
        states.append(space.pinned)
    actions = (*space.first_actions, *result.actions)
    for action in actions:
        states.append(space.apply(states[-1], action))
    if (states[-1] != result.state).any():
        states.append(result.state)  # the state of a baseline, which actions do not reach
    prices = model.price(np.stack(states))
    predictions = [
        Prediction.of(prices, i).with_error_bars(model, memory_bytes) for i in range(len(states))
    ]
    reasons = [
        reason_of(before, after, memory_bytes, model)
        for before, after in itertools.pairwise(predictions)
    ]
    own = ("the program's own shardings",) if space.constraints.keep else ()
    pinning = *space.constraints.pin, *own, *annotation_labels(space.analysis.program)
    pins = [
        Step(pinning, "", (), after, f"pinned: {reason}")
        for after, reason in zip(predictions[1 : 1 + pinned], reasons, strict=False)
    ]
    steps = tuple(pins) + tuple(
        Step(
            dimensions=dimension_labels(space, action),
            axis=space.mesh.names[action.axis],
            resolution=action.resolution,
            after=after,
            reason=f"fixed: {reason}" if i < len(space.first_actions) else reason,
            part=action.part,
        )
        for i, (action, after, reason) in enumerate(
            zip(actions, predictions[1 + pinned :], reasons[int(pinned) :], strict=False)
        )
    )
    return Plan(
        analysis=space.analysis,
        mesh=space.full_mesh,
        hardware=model.hardware,
        memory_bytes=memory_bytes,
        shardings=shardings_of(model, result.state),
        steps=steps,
        before=predictions[0],
        after=predictions[-1],
        cost=result.cost,
        states=result.states,
        rounds=result.rounds,
        seed=seed,
        transfers=tuple(model.transfers(result.state)),
        seconds=seconds,
        method=method,
        note=note,
        meshes=meshes,
        bound_seconds=model.lower_bound(),
        model=model,
        state=result.state,
        actions=actions,
        resolution=resolution,
    )
