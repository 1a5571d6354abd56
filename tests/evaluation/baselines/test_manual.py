"""The experts' best: strategies, and combinations of what they are made of."""

from __future__ import annotations

import pytest

from tests.helpers import analyzed, model_of
from toast.errors import PlanError
from toast.evaluation.baselines import manual, manual_states
from toast.evaluation.baselines.manual import components
from toast.hardware import Mesh, load
from toast.models import ZOO

V5E = load("tpu-v5e")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("t2b", ["data parallel", "FSDP", "Megatron", "sequence parallel"]),
        ("gns", ["edge sharding", "Megatron"]),
        ("unet", ["data parallel", "FSDP", "Megatron"]),
        ("moe", ["data parallel", "expert parallel", "Megatron"]),
        (
            "itx",
            [
                "data parallel",
                "Megatron of params['layers']*['up']",
                "Megatron of params['layers']*['wq']",
            ],
        ),
    ],
)
def test_components_are_what_strategies_combine(name: str, expected: list[str]) -> None:
    assert [component.name for component in components(ZOO[name].strategies)] == expected


@pytest.mark.parametrize("mesh", ["data=4,model=4", "a=2,b=2,c=2"])
@pytest.mark.parametrize(("name", "options"), [("t2b", {"layers": 1}), ("itx", {"layers": 2})])
def test_the_best_is_no_worse_than_any_strategy(
    name: str, options: dict[str, int], mesh: str
) -> None:
    analysis = analyzed(name, **options)
    plan = manual(analysis, Mesh.parse(mesh), V5E, ZOO[name].strategies)
    model = model_of(analysis, mesh)
    for _, state in manual_states(model, ZOO[name].strategies):
        prices = model.price(state[None])
        fits = bool(prices.peak_bytes[0] <= V5E.memory_limit_bytes)
        cost = float(model.cost(prices, V5E.memory_limit_bytes)[0])
        assert (not plan.fits, plan.cost) <= (not fits, cost + 1e-12)
    assert plan.method == "manual"
    assert plan.note
    assert 10 < plan.states < 5000


def test_a_combination_that_nobody_wrote_may_win() -> None:
    """Experts write few of the combinations of four components on two axes."""
    plan = manual(
        analyzed("t2b", layers=1), Mesh.parse("data=4,model=4"), V5E, ZOO["t2b"].strategies
    )
    assert plan.note not in ZOO["t2b"].strategies
    assert "data: " in plan.note


def test_what_fits_ranks_before_what_is_faster() -> None:
    analysis, mesh = analyzed("t2b", layers=1), Mesh.parse("data=4,model=2")
    free = manual(analysis, mesh, V5E, ZOO["t2b"].strategies)
    limit = 0.97 * free.after.peak_bytes
    tight = manual(analysis, mesh, V5E, ZOO["t2b"].strategies, memory_bytes=limit)
    assert tight.fits
    assert tight.after.peak_bytes <= limit
    assert tight.after.step_seconds >= free.after.step_seconds


def test_without_strategies_there_is_an_error() -> None:
    with pytest.raises(PlanError, match="attention has no expert strategies"):
        manual(analyzed("attention"), Mesh.parse("data=4"), V5E, {})


def test_a_strategy_may_name_an_axis() -> None:
    """An axis that the mesh lacks shards nothing."""
    model = model_of(analyzed("t2b", layers=1), "data=4,model=2")
    named = dict(manual_states(model, {"tokens": [("tokens", 0, "data"), ("tokens", 0, "slice")]}))
    first = dict(manual_states(model, {"tokens": [("tokens", 0, "first")]}))
    assert (named["tokens"] == first["tokens"]).all()
    assert not dict(manual_states(model, {"tokens": [("tokens", 0, "slice")]}))
