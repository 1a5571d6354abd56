"""Records: methods that later stages provide, copies and pickles."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle

import pytest

import toast
from tests.helpers import analyzed
from toast import records
from toast.plan.runnable_plan import RunnablePlan


def method(name: str) -> object:
    owner, _, attribute = name.partition(".")
    inner = {"Record": records.Record, "RunnablePlan": RunnablePlan}
    home = inner[owner] if owner in inner else getattr(toast, owner)
    found = inspect.getattr_static(home, attribute)
    return getattr(found, "func", found)  # of a cached property


@pytest.mark.parametrize("name", records.providers())
def test_every_late_method_has_its_function(name: str) -> None:
    """With the same parameters and defaults; the function may have more, with defaults."""
    function = records.provider(name)
    wanted = [*inspect.signature(method(name)).parameters.values()][1:]  # type: ignore[arg-type]
    there = [*inspect.signature(function).parameters.values()][1:]
    if inspect.isclass(function):
        there = there[1:]
    assert [(p.name, p.default) for p in wanted] == [(p.name, p.default) for p in there][
        : len(wanted)
    ]
    assert all(p.default is not p.empty for p in there[len(wanted) :])


def test_records_import_no_later_stage() -> None:
    """Whoever makes a plan has not imported what explains and shows it."""
    for place in records.providers().values():
        importlib.import_module(place.partition(":")[0])


@pytest.fixture(scope="module")
def plan() -> toast.Plan:
    return toast.plan(analyzed("mlp"), mesh="data=4", hardware="tpu-v5e")


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_plans_are_copied_and_pickled(plan: toast.Plan, make: object) -> None:
    assert plan.breakdown  # cached, and not copied
    again = make(plan)  # type: ignore[operator]
    assert again.shardings == plan.shardings
    assert again.analysis.program == plan.analysis.program
    assert again.to_dict() == plan.to_dict()
    assert again.explain_argument("x") == plan.explain_argument("x")
    assert again.annotated() == plan.annotated()


def test_a_pickled_plan_runs(plan: toast.Plan) -> None:
    again = pickle.loads(pickle.dumps(plan))
    assert again.verify().equal
