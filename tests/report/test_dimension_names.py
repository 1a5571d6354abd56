"""What reports call dimensions: the words of exports, in plain ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import toast
from toast.parameter_names import COMMON, PLAIN
from toast.report.dimension_names import named_dimensions


@pytest.mark.parametrize(("path", "shape", "names"), [
    ("wq", (8, 4, 2), ["model", "heads", "head size"]),
    ("wq", (8, 8), ["model", None]),
    ("wv", (8, 4, 2), ["model", "key heads", "head size"]),
    ("output", (8, 32), ["model", "vocabulary"]),
    ("output", (32, 8), ["vocabulary", "model"]),
    ("head", (8, 32), ["model", "vocabulary"]),
    ("expert_up", (4, 8, 16), ["experts", "model", "hidden"]),
    ("router", (8, 4), ["model", "experts"]),
    ("layers", (3, 8, 16), [None, None, None]),
])  # fmt: skip
def test_of_a_weight(path: str, shape: tuple[int, ...], names: list[str | None]) -> None:
    weight = {path: jax.ShapeDtypeStruct(shape, jnp.float32)}
    program = toast.analyze(lambda params: params[path] + 1, weight, cache=False).program
    called = named_dimensions(program, [range(len(shape))], {})
    assert [called.get(color) for color in range(len(shape))] == names


def test_every_word_is_a_trainers_or_a_reports() -> None:
    assert {"layers", "norm", "query_group"} == {*COMMON} - {*PLAIN}
    assert {"router_experts", "classes", "features", "height", "width", "channels"} == (
        {*PLAIN} - {*COMMON}
    )
