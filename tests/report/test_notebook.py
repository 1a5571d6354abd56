"""Analyses and plans as notebooks show them; the notebook-style example runs."""

from __future__ import annotations

import html.parser
import os
import pathlib
import subprocess
import sys

import toast
from tests.helpers import f32
from toast.plan import Plan
from toast.report import boxes as pieces
from toast.resources import directory


class Balanced(html.parser.HTMLParser):
    """Tags that are opened are closed, in order; what is loaded from elsewhere is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(text: str) -> Balanced:
    found = Balanced()
    found.feed(text)
    found.close()
    assert not found.open
    assert not found.links
    assert "script" not in found.seen
    return found


def test_a_plan(plan: Plan) -> None:
    found = parsed(plan._repr_html_())
    for part in (
        "Plan for t2b-tiny on mesh data=2,model=2 of tpu-v5e", "Arguments, by group",
        "Actions, in order", "Predicted, per device", "Collectives per step", plan.steps[0].reason,
    ):  # fmt: skip
        assert part in found.text
    assert found.seen.count("table") >= 4


def test_an_analysis(plan: Plan) -> None:
    found = parsed(plan.analysis._repr_html_())
    assert "Analysis of t2b-tiny" in found.text
    assert f"{plan.analysis.counts()['names']:,}" in found.text
    assert "Argument groups" in found.text


def test_answers(plan: Plan) -> None:
    analysis, path = plan.analysis, next(iter(plan.arguments))
    applied = toast.apply_plan(plan, analysis, mesh="data=4")
    other = toast.plan(analysis, mesh="data=4", hardware="tpu-v5e")
    answers = {
        "applied to t2b-tiny": applied,
        "mesh": toast.diff(plan, other),
        "The plans are the same.": toast.diff(plan, plan),
        f"Why not {path}": plan.why_not(path, "P()", budget=1.0),
        "bytes per device": plan,
        "Not sharded along": plan.explain_argument(path),
        "Collective 1": plan.explain_collective(1),
        "have one color, by": analysis.explain("tokens:0", "targets:0"),
        "Compatibility set": analysis.explain_conflict(0),
        "Pinned, rest of the plan unchanged": plan.why_not("tokens", "P()", search=False),
    }
    for text, answer in answers.items():
        assert text in parsed(answer._repr_html_()).text


def test_at_the_prompt_all_are_one_line(plan: Plan) -> None:
    analysis, path = plan.analysis, next(iter(plan.arguments))
    applied = toast.apply_plan(plan, analysis)
    for shown in (
        plan, analysis, analysis.program, applied, applied.saved, plan.model, plan.model.space,
        plan.shardings, plan.timeline, plan.breakdown, toast.diff(plan, plan),
        plan.explain_argument(path), plan.explain_collective(1), analysis.explain_conflict(0),
        analysis.explain("tokens:0", "targets:0"), plan.why_not(path, "P()", search=False),
    ):  # fmt: skip
        assert "\n" not in repr(shown)
        assert len(repr(shown)) < 300
    assert repr(plan).startswith("<Plan for t2b-tiny on mesh data=2,model=2 of tpu-v5e: step ")


def test_names_are_text() -> None:
    name = "<script>alert(1)</script>"
    analysis = toast.analyze(lambda x: x[name] * 2, {name: f32(64, 64)})
    plan = toast.plan(analysis, mesh="d=2", hardware="tpu-v5e")
    for shown in (analysis._repr_html_(), plan._repr_html_()):
        assert name in parsed(shown).text


def test_long_tables_are_folded() -> None:
    found = parsed(pieces.table("t", ("n",), [(str(i),) for i in range(9)], most=4))
    assert "5 more" in found.text
    assert found.seen.count("details") == 1
    assert "details" not in parsed(pieces.table("t", ("n",), [("1",)], most=4)).seen


def test_the_notebook_runs(tmp_path: pathlib.Path) -> None:
    """``examples/first_plan.py`` in a process of its own: it asks XLA for eight CPU devices."""
    root = directory("rules").parent
    path = root / "examples" / "first_plan.py"
    assert path.read_text().count("# %%") >= 6
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the loss is the same on one device and on eight" in done.stdout
    assert "Traceback" not in done.stderr
