"""The threads of linear algebra."""

from __future__ import annotations

import threadpoolctl

from toast.threads import blas_in_one_thread


def _threads() -> list[int]:
    return [
        library["num_threads"]
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    ]


def test_linear_algebra_runs_in_one_thread_and_then_as_before() -> None:
    before = _threads()
    with blas_in_one_thread():
        assert set(_threads()) == {1}
        with blas_in_one_thread():
            pass
        assert set(_threads()) == {1}
    assert _threads() == before


def test_blocks_that_overlap_are_as_one() -> None:
    before = _threads()
    one, other = blas_in_one_thread(), blas_in_one_thread()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert set(_threads()) == {1}
    other.__exit__(None, None, None)
    assert _threads() == before
