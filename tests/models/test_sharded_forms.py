"""Production forms compute the same results on eight devices, under expert strategies."""

from __future__ import annotations

import pytest

import toast
from tests.helpers import model_of
from toast.apply.verify import verify
from toast.evaluation.baselines import manual_states
from toast.models import ZOO, build
from toast.plan.shard import shardings_of


@pytest.mark.parametrize(
    ("name", "options", "strategy"),
    [
        ("llama3.1-8b", {}, "FSDP + Megatron"),
        ("llama3.1-8b", {"step": "decode"}, "FSDP + Megatron"),
        ("mixtral-8x7b", {}, "FSDP + expert parallel"),
        ("deepseek-v2-lite", {"step": "decode"}, "tensor parallel"),
        ("vit-l", {}, "FSDP + Megatron"),
        ("resnet50", {}, "FSDP"),
    ],
)
def test_strategies_do_not_change_results(
    name: str, options: dict[str, str], strategy: str
) -> None:
    analysis = toast.analyze(build(name, small=True, **options))  # type: ignore[arg-type]
    model = model_of(analysis, "a=4,b=2", min_dimensions=0)
    (state,) = dict(manual_states(model, {strategy: ZOO[name].strategies[strategy]})).values()
    verified = verify(analysis.program, shardings_of(model, state))
    assert verified.equal
    kinds = {kind for kind, _, _ in model.reshards(state)}
    # XLA makes an all-reduce and a slice of a reduce-scatter on CPUs.
    assert set(verified.collectives) <= kinds | {"all_reduce"}
