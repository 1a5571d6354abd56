"""The garbage collector leaves older objects alone during a search, and only then."""

from __future__ import annotations

import gc
import weakref

import pytest

from toast.garbage import older_objects_stay


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_only_objects_of_the_block_are_collected_in_it() -> None:
    older = Cycle()
    freed = weakref.ref(older)
    del older
    with older_objects_stay():
        assert gc.get_freeze_count()
        newer = weakref.ref(Cycle())
        with older_objects_stay():  # nested
            gc.collect()
        assert newer() is None
        assert freed() is not None
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()
    gc.collect()
    assert freed() is None


def test_objects_are_visited_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="now"), older_objects_stay():
        raise ValueError("now")
    assert not gc.get_freeze_count()


def test_objects_that_the_caller_has_frozen_stay_frozen() -> None:
    gc.freeze()
    try:
        with older_objects_stay():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_the_collector_looks_at_new_objects_as_often_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with older_objects_stay():
        assert all(now >= then for now, then in zip(gc.get_threshold(), before, strict=True))
        assert gc.get_threshold() > before
    assert gc.get_threshold() == before
    gc.set_threshold(0)
    try:
        with older_objects_stay():
            assert not gc.get_threshold()[0]  # the caller has turned it off
    finally:
        gc.set_threshold(*before)
