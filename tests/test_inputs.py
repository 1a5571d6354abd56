"""Arguments of wrong types and sizes: one line that says which, whatever the entry."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import toast
from tests.helpers import analyzed
from toast.errors import ToastError
from toast.evaluation.baselines import alpa, automap, manual, shardy
from toast.evaluation.compare import compare
from toast.models import ZOO

SYSTEM = {"mesh": "data=4", "hardware": "tpu-v5e"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": 5}, "mesh 5: use a mesh or a string such as data=4,model=4"),
        ({"mesh": None, "devices": "8"}, "devices '8': use a whole number"),
        ({"mesh": None, "devices": 8.0}, "devices 8.0: use a whole number"),
        ({"hardware": 5}, "hardware 5: use a device name or the path of a .toml file"),
        ({"memory_bytes": "1"}, "memory limit '1': use a number of bytes"),
        (
            {"memory_bytes": float("nan")},
            "memory limit of nan bytes (nan GiB): must be positive and finite",
        ),
        ({"overlap": "half"}, "overlap 'half': use none, partial, gathers, asynchronous or full"),
        ({"resolution": "foo"}, "resolution 'foo': use compatible or independent"),
        ({"constraints": {"x": "P()"}}, "constraints: use toast.Constraints(...), not dict"),
        (
            {"settings": {"seed": 1}},
            "settings {'seed': 1}: use toast.Settings, such as toast.Settings(seed=1)",
        ),
        ({"progress": 5}, "progress 5: use a function of one argument"),
        (
            {"seed": 1},
            "seed: has no effect for a target of type Analysis; use settings=toast.Settings(seed=...)",
        ),
        ({"rules": ("a.lp",)}, "rules: has no effect for a target of type Analysis; remove it"),
        ({"start": 5}, "5 is not a plan; use a file written by Plan.to_json"),
    ],
)
def test_what_plan_is_given(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ToastError) as caught:
        toast.plan(analyzed("mlp"), **{**SYSTEM, **changed})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, "seed -1: must be at least 0"),
        ({"seed": 1.5}, "seed 1.5: must be a whole number"),
        ({"rounds": True}, "rounds True: must be a number"),
        ({"restarts": 0}, "restarts 0: must be at least 1"),
        ({"action_cost": "2"}, "action_cost '2': must be a number"),
        ({"action_cost": float("nan")}, "action_cost nan: must be at least 0"),
        ({"budget": "soon"}, "budget 'soon': must be positive, or 0"),
        ({"budget": -1}, "budget of -1 seconds: must be positive, or 0"),
    ],
)
def test_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ToastError) as caught:
        toast.Settings(**settings)
    assert str(caught.value) == message


def test_settings_of_numpy_and_without_end() -> None:
    assert toast.Settings(seed=np.int64(3), budget=np.float32(2.0)).seed == 3
    assert toast.Settings(budget=float("inf")).budget is None


def test_baselines_take_texts_and_refuse_what_plan_refuses() -> None:
    analysis, strategies = analyzed("mlp"), ZOO["mlp"].strategies
    methods: dict[str, Any] = {
        "manual": lambda **more: manual(analysis, strategies=strategies, **{**SYSTEM, **more}),
        "automap": lambda **more: automap(analysis, **{**SYSTEM, **more}),
        "alpa": lambda **more: alpa(analysis, **{**SYSTEM, **more}),
        "shardy": lambda **more: shardy(analysis, **{**SYSTEM, **more}),
    }
    for name, method in methods.items():
        assert method().method == name
        for changed, message in (
            (
                {"memory_bytes": float("nan")},
                "memory limit of nan bytes (nan GiB): must be positive",
            ),
            ({"memory_bytes": -1}, "memory limit of -1 bytes (-9.31323e-10 GiB): must be positive"),
            ({"memory_bytes": "much"}, "memory limit 'much': use a number of bytes"),
            ({"mesh": 5}, "mesh 5: use a mesh"),
            (
                {"overlap": "half"},
                "overlap 'half': use none, partial, gathers, asynchronous or full",
            ),
        ):
            with pytest.raises(ToastError, match=re.escape(message)):
                method(**changed)
    (row,) = compare(analysis, "data=4", "tpu-v5e", ["toast"])
    assert row.fits
