"""Arguments of wrong types and sizes: one line that says which, whatever the entry."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import toast
from tests.helpers import analyzed
from toast.baselines import alpa, automap, manual, shardy
from toast.compare import compare
from toast.errors import ToastError
from toast.models import ZOO

SYSTEM = {"mesh": "data=4", "hardware": "tpu-v5e"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": 5}, "mesh 5: give a mesh, or text such as data=4,model=4"),
        ({"mesh": None, "devices": "8"}, "devices '8': give a whole number"),
        ({"mesh": None, "devices": 8.0}, "devices 8.0: give a whole number"),
        ({"hardware": 5}, "hardware 5: give a name, or the path of a .toml file"),
        ({"memory_bytes": "1"}, "memory limit '1': give a number of bytes"),
        ({"memory_bytes": float("nan")}, "memory limit of nan bytes (nan GiB): must be positive"),
        ({"overlap": "half"}, "overlap 'half': give one of none, partial and full"),
        ({"resolution": "foo"}, "resolution 'foo': use compatible or independent"),
        ({"constraints": {"x": "P()"}}, "constraints: give toast.Constraints(...), not dict"),
        (
            {"settings": {"seed": 1}},
            "settings {'seed': 1}: give toast.Settings(seed=1), or the like",
        ),
        ({"progress": 5}, "progress 5: give a function of one argument"),
        (
            {"seed": 1},
            "seed: of no use with a target of type Analysis; give settings=toast.Settings(seed=...)",
        ),
        ({"rules": ("a.lp",)}, "rules: of no use with a target of type Analysis; leave it out"),
        ({"start": 5}, "5 is no plan; give what Plan.to_json wrote"),
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
        ({"wave": 0}, "wave 0: must be at least 1"),
        ({"exploration": "2"}, "exploration '2': must be a number"),
        ({"exploration": float("nan")}, "exploration nan: must be at least 0"),
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
            ({"memory_bytes": "much"}, "memory limit 'much': give a number of bytes"),
            ({"mesh": 5}, "mesh 5: give a mesh"),
            ({"overlap": "half"}, "overlap 'half': give one of none, partial and full"),
        ):
            with pytest.raises(ToastError, match=re.escape(message)):
                method(**changed)
    (row,) = compare(analysis, "data=4", "tpu-v5e", ["toast"])
    assert row.fits
