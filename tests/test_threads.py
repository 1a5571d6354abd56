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
