"""Stages of the user's own, and interrupts wherever they come."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import toast
from tests.helpers import analyzed, model_of
from toast.cost import CostModel, Memo, Worth
from toast.errors import SearchError
from toast.search import (
    DEFAULT_STAGES,
    Budget,
    Ledger,
    Polishing,
    Search,
    SearchResult,
    Settings,
    Trajectory,
    TreeSearch,
    WhenImproved,
    find,
    noted_interrupts,
)
from toast.space import States

LIMIT = 1e5


@pytest.fixture(scope="module")
def model() -> CostModel:
    return model_of(analyzed("t2b-tiny"), "d=2,m=2")


def single_actions(ledger: Ledger, budget: Budget) -> list[Trajectory]:
    """The best single action."""
    space = ledger.model.space
    keys, costs = ledger.price(space.apply_each(space.initial, range(len(space.actions))))
    best = int(np.argmin(costs))
    return [ledger.offer(keys[best], (space.actions[best],))]


def failing(ledger: Ledger, budget: Budget) -> None:
    raise ValueError("no way")


def returning_a_number(ledger: Ledger, budget: Budget) -> Any:
    return 5


def failing_late(ledger: Ledger, budget: Budget) -> Iterator[Trajectory]:
    yield ledger.best
    raise ValueError("late")


def returning_numbers(ledger: Ledger, budget: Budget) -> list[int]:
    return [1]


def pricing_forever(ledger: Ledger, budget: Budget) -> None:
    for _ in itertools.count():
        single_actions(ledger, budget)


def search(model: CostModel, *stages: object, **settings: int | float) -> SearchResult:
    return Search(
        model, memory_bytes=LIMIT, settings=Settings(**settings), stages=stages  # type: ignore[arg-type]
    ).run()  # fmt: skip


def test_a_search_is_the_stages_that_it_is_given(model: CostModel) -> None:
    alone = search(model, single_actions)
    assert len(alone.actions) == 1
    polished = search(model, single_actions, Polishing())
    assert polished.rank <= alone.rank
    assert polished.states > alone.states
    nothing = search(model)
    assert (nothing.actions, nothing.states) == ((), 1)


def test_later_rounds_polish_only_trajectories_near_the_best(model: CostModel) -> None:
    ledger, budget = Ledger(model, LIMIT, 1e-4), Budget(None)
    ledger.starts = [ledger.begin()]
    Polishing()(ledger, budget)
    empty = ledger.begin()
    far = empty._replace(cost=1.6 * ledger.best.cost)
    ledger.starts = [far]
    budget.round = 1
    assert Polishing()(ledger, budget) == [far, empty]
    budget.round = 0
    assert Polishing()(ledger, budget)[0].rank < far.rank


def test_stages_begin_with_what_the_stage_before_returned(model: CostModel) -> None:
    starts: list[list[Trajectory]] = []

    def noting(ledger: Ledger, budget: Budget) -> None:
        starts.append(ledger.starts)

    result = search(model, noting, single_actions, noting, noting, rounds=1)
    (origin,), (best,), again = starts
    assert origin.actions == ()
    assert best.actions == result.actions
    assert again == [best]


def test_conditional_stages_run_while_there_is_improvement(model: CostModel) -> None:
    rounds: list[int] = []

    def noting(ledger: Ledger, budget: Budget) -> None:
        rounds.append(budget.round)

    result = search(model, single_actions, WhenImproved((noting,)), patience=3)
    assert len(result.rounds) == 4
    assert rounds == [0]


def test_plans_and_processes_take_stages() -> None:
    analysis = analyzed("mlp")
    plan = toast.plan(analysis, mesh="d=4", hardware="tpu-v5e", stages=[single_actions])
    assert len(plan.steps) == 1
    with pytest.raises(SearchError, match="stage failing: ValueError: no way"):
        toast.plan(analysis, mesh="d=4", hardware="tpu-v5e", stages=[failing])
    with pytest.raises(SearchError, match="stage returning_numbers: returns something other than"):
        toast.plan(analysis, mesh="d=4", hardware="tpu-v5e", stages=[returning_numbers])
    with pytest.raises(SearchError, match="stage returning_a_number: TypeError: 'int' object"):
        toast.plan(analysis, mesh="d=4", hardware="tpu-v5e", stages=[returning_a_number])
    with pytest.raises(SearchError, match="stage failing_late: ValueError: late"):
        toast.plan(analysis, mesh="d=4", hardware="tpu-v5e", stages=[failing_late])
    model = model_of(analysis, "d=4")
    one, two = (
        find(
            model, memory_bytes=np.inf, settings=Settings(restarts=2, processes=number),
            stages=[TreeSearch(effort=16), Polishing()],
        )
        for number in (1, 2)
    )  # fmt: skip
    assert (one.actions, one.states, one.notes) == (two.actions, two.states, two.notes)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([7], "stage 7: give a function of a ledger and a budget"),
        ("tree", "stages 'tree': give a list of functions"),
        ([Polishing], r"stage Polishing is a class; give Polishing\(\)"),
        ([lambda ledger, budget: None], "stage <lambda> cannot be sent to other processes; define"),
    ],
)
def test_what_is_no_stage_is_refused(stages: object, message: str) -> None:
    settings = Settings(restarts=2, processes=2)
    with pytest.raises(SearchError, match=message):
        toast.plan(
            analyzed("mlp"), mesh="d=4", hardware="tpu-v5e", settings=settings, stages=stages  # type: ignore[arg-type]
        )  # fmt: skip


def test_fields_of_stages_are_checked() -> None:
    with pytest.raises(SearchError, match="changes 'foo': use colors, parts, regions, arguments"):
        TreeSearch("foo")  # type: ignore[arg-type]
    with pytest.raises(SearchError, match="width 0: must be a whole number of at least 1"):
        TreeSearch(width=0)
    with pytest.raises(SearchError, match="stage 3: give a function"):
        WhenImproved((3,))  # type: ignore[arg-type]


def test_a_budget_ends_a_stage_that_prices(model: CostModel) -> None:
    result = search(model, single_actions, pricing_forever, budget=0.3)
    assert result.stopped == "budget"
    assert len(result.actions) == 1


@pytest.fixture
def interrupts() -> Iterator[None]:
    # A shell that starts tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted_at(call: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interrupt of the process as a batch of states is priced."""
    price, calls = Memo.price, itertools.count()

    def interrupted(memo: Memo, states: States) -> Worth:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return price(memo, states)

    with monkeypatch.context() as patch:
        patch.setattr(Memo, "price", interrupted)
        yield


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("call", [0, 2, 5, 9, 14])
def test_an_interrupt_is_noted_wherever_it_comes(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    analysis = analyzed("t2b-tiny")
    with interrupted_at(call, monkeypatch):
        plan = toast.plan(analysis, mesh="d=2,m=2", hardware="tpu-v5e", memory_bytes=2e6)
    assert plan.note.startswith("interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupts")
def test_the_second_interrupt_is_raised() -> None:
    with noted_interrupts() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_set()
        with noted_interrupts() as inner:
            assert inner is interrupt
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    with noted_interrupts(raising=True) as interrupt:
        assert not interrupt.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupt.is_set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interrupts")
def test_a_handler_of_the_users_own_is_called() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: calls.append(number))
    with noted_interrupts() as interrupt:
        signal.raise_signal(signal.SIGINT)
    assert calls == [signal.SIGINT]
    assert not interrupt.is_set()


def test_default_stages_are_data() -> None:
    colors, polishing, later = DEFAULT_STAGES
    assert (colors, polishing) == (TreeSearch(effort=128), Polishing())
    assert isinstance(later, WhenImproved)
    assert later.uses_proposals
