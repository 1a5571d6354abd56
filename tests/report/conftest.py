"""A browser, a report to open in it, and the plan of a small train step."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.report.browser import SHOTS, browser
from tests.report.test_html import planned
from tests.tiny_plan import plan
from toast.report import write_html

__all__ = ["plan"]


@pytest.fixture(scope="module")
def chrome() -> Iterator[Any]:
    SHOTS.mkdir(parents=True, exist_ok=True)
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("report") / "t2b.html"
    write_html(planned("t2b", layers=2), path)
    return path
