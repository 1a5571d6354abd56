"""The drawing of the block that repeats most, and of the mesh."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest

import toast
from tests.helpers import f32
from tests.report.browser import missing, opened
from tests.report.test_html import QUICK, planned
from tests.tiny_plan import tiny
from toast.plan import Plan
from toast.report.html import drawing, gather
from toast.report.html.block import block_of
from toast.report.html.legend import Colors
from toast.report.html.sections import sections_of


def block(plan: Plan) -> dict[str, Any]:
    drawn = block_of(plan, sections_of(plan.analysis.program), Colors(plan))
    assert drawn is not None
    return drawn


def test_a_layer_is_drawn_with_its_weights_and_collectives() -> None:
    plan = tiny()
    drawn = block(plan)
    assert (drawn["title"], drawn["phase"], drawn["alike"]) == ("layers[1]", "forward", 2)
    nodes = {node["title"]: node for node in drawn["nodes"]}
    assert {"wq", "wk", "wv", "wo", "gate", "up", "down", "rms_norm", "attention"} <= {*nodes}
    for name in ("wq", "down"):
        lines = {line[0]: line for line in nodes[name]["lines"]}
        path = f"params['layers'][1]['{name}']"
        assert [dim[2] for dim in lines[name][2]] == [list(a) for a in plan.arguments[path]]
        assert nodes[name]["seconds"] > 0
    section = next(
        s
        for s in sections_of(plan.analysis.program)
        if (s.title, s.phase) == ("layers[1]", "forward")
    )
    moved: Counter[str] = Counter()
    for row in (
        *(m for n in drawn["nodes"] for m in (*n["weights_moves"], *n["result_moves"])),
        *(m for e in drawn["edges"] for m in e["moves"]),
    ):
        moved[row["kind"]] += row["count"]
    expected: Counter[str] = Counter()
    for c in plan.breakdown.collectives:
        if section.start <= c.op < section.stop:
            expected[c.kind] += c.count
    assert moved == expected
    assert moved


def test_boxes_do_not_overlap_and_edges_go_down() -> None:
    drawn = block(tiny())
    for a, b in itertools.combinations(drawn["nodes"], 2):
        apart_x = a["x"] + a["width"] <= b["x"] or b["x"] + b["width"] <= a["x"]
        apart_y = a["y"] + a["height"] <= b["y"] or b["y"] + b["height"] <= a["y"]
        assert apart_x or apart_y, (a["title"], b["title"])
        assert 0 <= a["x"] <= drawn["width"] - a["width"]
    for edge in drawn["edges"]:
        numbers = [*map(float, re.findall(r"-?[\d.]+", edge["path"]))]
        assert numbers[1] < numbers[-1]


def test_a_program_without_boxes_has_no_block() -> None:
    plan = toast.plan(lambda x: x + 1.0, f32(64), mesh="data=2", hardware="tpu-v5e", **QUICK)
    assert gather(plan)["block"] is None


def test_the_mesh_is_drawn_with_its_axes() -> None:
    text = drawing.mesh_map([("data", 2), ("model", 4)])
    assert text.count('class="device"') == 8
    assert 'data-at="1,3"' in text
    assert "data" in text
    assert "model" in text
    assert not drawing.cut_mesh([("data", 2), ("model", 4)])
    cube = drawing.mesh_map([("x", 4), ("y", 4), ("z", 32)])
    assert cube.count('class="device"') == 2 * 4 * 16
    assert ">128<" in cube  # the first device of the second panel
    assert drawing.cut_mesh([("x", 4), ("y", 4), ("z", 32)])
    assert drawing.mesh_map([("x", 1)]).count('class="device"') == 1
    assert "&lt;b&gt;" in drawing.mesh_map([("<b>", 2)])


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_devices_are_colored_by_shards(chrome: Any, report: Any) -> None:
    plan = planned("t2b", layers=2)
    page = opened(chrome, report)
    rows = plan.argument_table()
    at, row = next((k, r) for k, r in enumerate(rows) if any(r.spec))
    page.locator("#shards").select_option(str(at))
    shards = 1
    for axes in row.spec:
        for axis in axes:
            shards *= dict(plan.mesh.axes)[axis]
    texts = page.locator(".device text").all_text_contents()
    assert len(texts) == plan.mesh.devices
    assert {*map(int, texts)} == {*range(shards)}
    assert f"{shards} shard" in page.locator("#shards-text").inner_text()
    assert page.complaints == []
    page.close()
