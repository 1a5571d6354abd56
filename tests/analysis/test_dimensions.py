"""Naming dimensions: paths as JAX writes them and shorter, results, numbers; and clear errors."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests.helpers import analyzed, f32
from toast import api
from toast.analysis import find_dimension, value_label
from toast.analysis.dimensions import dimension_of
from toast.errors import ExplainError
from toast.models import build
from toast.program import Program
from toast.resources import directory


def program() -> Program:
    def function(params: dict[str, list[jax.Array]], x: jax.Array) -> dict[str, list[jax.Array]]:
        hidden = checkpoint_name(x @ params["layers"][0], "hidden")
        twice = [checkpoint_name(x * 2.0, "twice"), checkpoint_name(x * 3.0, "twice")]
        return {"out": [hidden @ params["layers"][1], jnp.sum(twice[0]) + jnp.sum(twice[1])]}

    return api.program_of(function, {"layers": [f32(8, 4), f32(4, 2)]}, f32(16, 8))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("params['layers'][0]:1", "params['layers'][0]:1"),
        ('params["layers"][0]:1', "params['layers'][0]:1"),
        ("params.layers[0]:1", "params['layers'][0]:1"),
        ("params.layers.0:1", "params['layers'][0]:1"),
        ("params.layers[1]:-1", "params['layers'][1]:1"),
        (" x : -2 ", "x:0"),
        ("result['out'][0]:0", "result['out'][0]:0"),
        ("result.out[0]:0", "result['out'][0]:0"),
        ("hidden:1", "hidden:1"),
        ("%0:1", "params['layers'][0]:1"),
    ],
)
def test_many_ways_to_name_a_dimension(text: str, label: str) -> None:
    assert find_dimension(program(), text).label == label


MESSAGES = {
    "x": "x: no dimension: x is f32[16,8] and has dimensions 0 to 1; write x:0",
    "params['a:b']": "params['a:b']: no such argument, result or value; did you mean params['layers'][1] or params['layers'][0]?",
    "x:one": "x:one: no dimension: x is f32[16,8] and has dimensions 0 to 1; write x:0",
    "x:": "x:: no dimension: x is f32[16,8] and has dimensions 0 to 1; write x:0",
    "result.out[1]": "result.out[1]: no dimension: result.out[1] is f32[] and has none",
    "xs:one": "xs: no such argument, result or value; did you mean x?",
    "x:2": "x:2: no dimension 2: x is f32[16,8] and has dimensions 0 to 1",
    "x:-3": "x:-3: no dimension -3: x is f32[16,8] and has dimensions 0 to 1",
    "result.out[1]:0": "result.out[1]:0: no dimension 0: result.out[1] is f32[] and has none",
    "params.layer[0]:0":
        "params.layer[0]: no such argument, result or value; did you mean params['layers'][0] or params['layers'][1]?",
    "weights:0":
        "weights: no such argument, result or value; there are params['layers'][0], params['layers'][1], x and 5 more",
    "%999:0": "%999: no such value; values are %0 to %N",
    "twice:0": "twice: several values have this name; use one of %N (f32[16,8]), %N (f32[16,8])",
}  # fmt: skip


@pytest.mark.parametrize("text", MESSAGES)
def test_what_does_not_exist_is_said(text: str) -> None:
    with pytest.raises(ExplainError) as caught:
        find_dimension(program(), text)
    said = re.sub(r"(?<!^)%[1-9]\d*", "%N", str(caught.value))
    assert said == MESSAGES[text]


def test_one_dimension_is_told() -> None:
    with pytest.raises(
        ExplainError, match=r"x:1: no dimension 1: x is f32.3. and has dimension 0$"
    ):
        find_dimension(api.program_of(lambda x: x * 2.0, f32(3)), "x:1")


@pytest.mark.parametrize("name", ["t2b", "gns-scan", "moe"])
def test_every_label_leads_back(name: str) -> None:
    """In programs with hundreds of paths no two values share a label."""
    found = api.program_of(build(name, small=True))
    labels = {value_label(found, value) for value in range(len(found.values))}
    assert len(labels) == len(found.values)
    for value in found.values[:: max(1, len(found.values) // 50)]:
        number = found.ops[value.op].results[value.result]
        for d in range(len(value.type.shape)):
            dimension = dimension_of(found, number, d)
            assert find_dimension(found, dimension.label) == dimension


def test_fact_bases_have_their_own_names() -> None:
    attention = api.program_of(directory("facts") / "attention.lp")
    assert str(find_dimension(attention, "qt:1")) == "qt:1 f32[64,128]"
    assert analyzed("mlp").explain("result:0", "x:0").tied
