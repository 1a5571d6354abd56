"""XLA computes convolutions right in every state that the rules allow, and wrong in some that they do not."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import toast
from tests.helpers import f32
from toast import apply
from toast.cost import CostModel
from toast.evaluation.validate import shardings_of
from toast.hardware import Mesh, load
from toast.space import Space

#: Shapes of the input (NHWC) and the kernel (HWIO), and the options of convolutions.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "same size": ((8, 16, 8, 8), (3, 3, 8, 8), {"padding": "SAME"}),
    "smaller": ((8, 18, 10, 8), (3, 3, 8, 8), {"padding": "VALID"}),
    "strided": ((8, 16, 16, 8), (3, 3, 8, 8), {"window_strides": (2, 2), "padding": "SAME"}),
    "patches": ((8, 32, 16, 8), (4, 4, 8, 8), {"window_strides": (4, 4), "padding": "VALID"}),
    "large patches": ((8, 32, 32, 8), (8, 8, 8, 8), {"window_strides": (8, 8), "padding": "VALID"}),
    "single elements": ((8, 16, 8, 8), (1, 1, 8, 8), {"padding": "SAME"}),
    "spread input": (
        (8, 8, 8, 8), (3, 3, 8, 8), {"padding": ((1, 2), (1, 2)), "lhs_dilation": (2, 2)},
    ),
    "spread kernel": ((8, 16, 16, 8), (3, 3, 8, 8), {"padding": "SAME", "rhs_dilation": (2, 2)}),
    "gradient of a kernel": ((8, 16, 8, 8), (16, 8, 8, 8), {"padding": ((1, 1), (1, 1))}),
    "gradient of a strided kernel": (
        (8, 16, 16, 8), (8, 8, 8, 8), {"padding": ((1, 0), (1, 0)), "rhs_dilation": (2, 2)},
    ),
    "groups": ((8, 16, 8, 16), (3, 3, 4, 16), {"padding": "SAME", "feature_group_count": 4}),
    "depthwise": ((8, 16, 8, 16), (3, 3, 1, 16), {"padding": "SAME", "feature_group_count": 16}),
    "gradient of groups": ((8, 8, 8, 8), (8, 8, 8, 16), {"padding": ((1, 1), (1, 1)), "batch_group_count": 4}),
}  # fmt: skip


def convolution(case: str) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """A convolution of a case, and the types of its operands."""
    left, right, options = CASES[case]
    function = functools.partial(
        lax.conv_general_dilated,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        **{"window_strides": (1, 1), **options},
    )
    return function, [f32(*left), f32(*right)]


@pytest.mark.parametrize("mesh", ["a=2,b=4", "a=4,b=2", "a=2,b=2,c=2"])
@pytest.mark.parametrize("case", CASES)
def test_every_state_of_a_convolution_computes_the_same(case: str, mesh: str) -> None:
    function, types = convolution(case)
    space = Space(toast.analyze(function, *types), Mesh.parse(mesh))
    (op_class,) = np.flatnonzero(space.products).tolist()
    choices = space.choices[op_class]
    # One program has a convolution for each choice; with collapse=False each has its own state.
    many = toast.analyze(lambda x, k: [function(x, k) for _ in choices], *types)
    space = Space(many, Mesh.parse(mesh), collapse=False)
    state = space.initial.copy()
    state[np.flatnonzero(space.products)] = choices
    verification = apply.verify(many.program, shardings_of(CostModel(space, load("tpu-v5e")), state))
    rule = many.rules[many.names.signature[space.classes.representative[space.products][0]]]
    wrong = [
        [rule.factors[f].label if f >= 0 else "-" for f in choice]
        for choice, output in zip(choices.tolist(), verification.outputs, strict=True)
        if not output.equal
    ]
    assert not wrong, wrong
    print(len(choices))
