"""Both resolutions of a conflict, priced by the models that plans are priced by."""

from __future__ import annotations

import pytest

import toast
from tests.explain.test_chains import fact_base, small
from tests.helpers import model_of
from toast.errors import ExplainError, HardwareError, MeshError
from toast.explain import resolutions
from toast.plan import Prediction


def test_they_are_priced_as_actions_are() -> None:
    analysis = small("t2b")
    priced = resolutions(analysis, 5, mesh="data=2,model=2", hardware="tpu-v5e")
    assert [(r.axis, r.resolution) for r in priced.resolutions] == [
        ("data", 0), ("data", 1), ("model", 0), ("model", 1),
    ]  # fmt: skip
    model = model_of(analysis, "data=2,model=2")
    space = model.space
    resolution = analysis.resolutions[5]
    group = int(space.color_group_of(resolution.names[0]))
    place = space.color_groups[group].bits.index(resolution.group)
    for row in priced.resolutions:
        (action,) = (
            a for a in space.actions
            if a.color == group and space.mesh.names[a.axis] == row.axis
            and a.resolution[place] == row.resolution and sum(a.resolution) == row.resolution
        )  # fmt: skip
        expected = Prediction.of(model.price(space.apply(space.initial, action)[None]))
        assert row.prediction == expected
    assert priced.unsharded == Prediction.of(model.price(space.unsharded[None]))
    sides = [side.label for side in analysis.explain_conflict(5).sides]
    assert [row.picks for row in priced.resolutions] == sides * 2


def test_the_tensor_is_sharded_as_the_resolution_says() -> None:
    priced = resolutions(fact_base("x_xt"), 0, mesh="data=4", hardware="tpu-v5e", axis="data")
    assert priced.tensor == "z"
    assert [row.sharding for row in priced.resolutions] == ["P('data')", "P(None, 'data')"]
    counts = [c.count for c in priced.resolutions[0].prediction.collectives]
    assert sum(counts) == 1, "one operand is gathered"


def test_axes_that_divide_nothing_are_told() -> None:
    priced = resolutions(fact_base("x_xt"), 0, mesh="data=4,odd=5", hardware="tpu-v5e")
    assert priced.useless_axes == ("odd",)
    assert {row.axis for row in priced.resolutions} == {"data"}


def test_bad_input() -> None:
    analysis: toast.Analysis = fact_base("x_xt")
    with pytest.raises(ExplainError, match="conflict 7: x_xt has only conflict 0"):
        resolutions(analysis, 7, mesh="data=4", hardware="tpu-v5e")
    with pytest.raises(ExplainError, match="axis model: not in mesh data=4; use data"):
        resolutions(analysis, 0, mesh="data=4", hardware="tpu-v5e", axis="model")
    with pytest.raises(MeshError):
        resolutions(analysis, 0, mesh="data=0", hardware="tpu-v5e")
    with pytest.raises(HardwareError):
        resolutions(analysis, 0, mesh="data=4", hardware="tpu-v0")
