"""A plan's policy gives the program that the model would have with its own recomputation."""

from __future__ import annotations

import pytest

from toast.api import program_of
from toast.models import build


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"remat": "names"}, "*: keep=query,key,value,attention"),
        ({"remat": "full"}, "full"),
        ({"remat": "none"}, "none"),
        (
            {"remat": "query+key", "offload": "attention+layer_input"},
            "train_layer: keep=query,key offload=attention,layer_input",
        ),
    ],
)
def test_policies_are_the_options_of_models(options: dict[str, str], policy: str) -> None:
    own = program_of(build("qwen3-8b", small=True, **options))
    ours = program_of(build("qwen3-8b", small=True), remat=policy)
    assert ours.digest == own.digest


@pytest.mark.parametrize("name", ["t2b-scan", "vit-l"])
def test_one_microbatch_that_keeps_everything_changes_nothing(name: str) -> None:
    options = {"remat": "none"} if name == "vit-l" else {}
    model = build(name, small=True, **options)
    assert program_of(model, remat="none", microbatches=1).digest == program_of(model).digest
