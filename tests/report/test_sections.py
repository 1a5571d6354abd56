"""Sections of the listing, and memory at its peak in groups."""

from __future__ import annotations

import pytest

import toast
from tests.helpers import analyzed
from toast.report.html.sections import sections_of
from toast.report.memory import peak_groups
from toast.search import Settings


def test_sections_are_named_by_the_functions_that_do_the_work() -> None:
    """Norms have more ops than the products beside them."""
    sections = sections_of(analyzed("t2b", layers=3).program)
    layer = next(s for s in sections if s.title == "layers[1]" and s.phase == "forward")
    assert layer.detail == "mlp, attention, rms_norm, rotary"
    last = max(s.stop for s in sections if s.title == "layers[2]" and s.phase == "forward")
    head = next(s for s in sections if s.start == last)
    assert head.title == "loss"  # which has the product with the embedding
    assert head.detail == "loss, cross_entropy, rms_norm"


def test_groups_at_the_peak_add_up_to_it() -> None:
    analysis = analyzed("t2b", layers=3)
    plan = toast.plan(analysis, mesh="data=4", hardware="tpu-v5e", settings=Settings(budget=0.0))
    for line in (plan.timeline, plan.timeline_before):
        groups = peak_groups(analysis.program, line)
        assert sum(g.bytes for g in groups) + line.argument_bytes == pytest.approx(line.peak_bytes)
        assert sum(g.count for g in groups) == len(line.at_peak) > len(groups)
        assert {g.what for g in groups if not g.count} == {"gaps", "fast"}
        assert [g.bytes for g in groups] == sorted((g.bytes for g in groups), reverse=True)
        assert max(g.count for g in groups) % 3 == 0
