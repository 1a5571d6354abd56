"""Steps of training and simulation of libraries: planned, and run in shards three times.

Libraries that are not installed are skipped.  The extra `libraries-more`, which `make prove` installs,
has all but gemma, which needs TensorFlow.
"""

from __future__ import annotations

import functools
import importlib

import pytest

from tests.assurance.test_interchange import compare
from tests.libraries import steps
from tests.libraries.measured import measured, planned

#: The largest relative difference of the state after three steps.  Optimisers divide by gradients,
#: so rounding weighs more in parameters than in losses.
TOLERANCES = {
    "haiku_transformer": 1e-3,
    "jraph_network": 1e-4,
    "keras_convnet": 1e-4,
    "keras_transformer": 1e-3,
    "penzai_transformer": 1e-3,
    "gemma_transformer": 1e-3,
    "tunix_trainer": 1e-3,
}

pytestmark = [
    pytest.mark.slow,  # building a model compiles its every op
    pytest.mark.parametrize("name", steps.LIBRARIES),
    pytest.mark.filterwarnings("default"),  # a library may use what another deprecates
]


@functools.cache
def step(name: str) -> steps.Step:
    _, module = steps.LIBRARIES[name]
    try:
        importlib.import_module(module)
    except Exception as error:  # not installed, or it does not fit this version of JAX
        text = (str(error).splitlines() or [""])[0]
        pytest.skip(f"{module} cannot be imported: {type(error).__name__}: {text}")
    try:
        result: steps.Step = getattr(steps, name)()
    except ImportError as error:  # of a package that the library imports when it is used
        pytest.skip(f"{module}: {error}")
    return result


def test_every_op_has_a_rule(name: str) -> None:
    plan, _, _ = planned(step(name))
    assert plan.analysis.without_rule == ()
    assert plan.steps, "something can be sharded"
    assert compare(plan.analysis.program) > 0  # TOAST's rules and Shardy's


def test_three_steps_in_shards(name: str) -> None:
    result = measured(step(name))
    assert result.loss_error < 1e-5
    assert result.state_error < TOLERANCES.get(name, 1e-5)
