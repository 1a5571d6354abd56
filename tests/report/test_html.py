"""The report's data is the plan's; sections are layers; names are text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.cli.test_cli import run
from tests.helpers import analyzed, f32
from toast.cli.common import Source
from toast.errors import PlanError
from toast.evaluation.compare import compare
from toast.hardware import Mesh, load
from toast.models import build
from toast.plan import Origin, Plan
from toast.program import Program
from toast.report import comparison_html, html_text, write_html
from toast.report.html import data as report_data
from toast.report.html import gather
from toast.report.html.sections import sections_of
from toast.search import Polishing, Settings, TreeSearch

#: Little search: reports do not ask for the best plan.
QUICK = {
    "settings": Settings(depth=6, rounds=1),
    "stages": (TreeSearch(effort=16), Polishing(), TreeSearch("parts", effort=8)),
}


@functools.cache
def planned(name: str, mesh: str = "data=4,model=2", **options: int) -> Plan:
    return toast.plan(analyzed(name, **options), mesh=mesh, hardware="tpu-v5e", **QUICK)


def embedded(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_embedded_data_are_the_plans() -> None:
    plan = planned("t2b", layers=2)
    data, known = embedded(html_text(plan)), plan.to_dict()
    assert data == json.loads(json.dumps(gather(plan)))
    assert data["summary"]["step_seconds"] == known["after"]["step_seconds"]
    assert data["summary"]["peak_bytes"] == known["after"]["peak_bytes"]
    assert data["after"] == json.loads(json.dumps(known["after"]))
    assert [a["reason"] for a in data["actions"]] == [a["reason"] for a in known["actions"]]
    assert sum(row["count"] for row in data["arguments"]) == len(known["arguments"])
    specs = Counter(a["spec"] for a in known["arguments"].values())
    rows: Counter[str] = Counter()
    for row in data["arguments"]:
        rows[row["spec"]] += row["count"]
    assert rows == specs
    assert max(data["memory"]["after"]["live_bytes"]) == pytest.approx(
        known["memory"]["peak_bytes"]
    )
    assert data["memory"]["before"]["peak_bytes"] == pytest.approx(plan.before.peak_bytes)


def test_time_by_kind_and_by_line_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("t2b", layers=2)
    data = gather(plan)
    total = plan.after.matmul_seconds + plan.after.memory_seconds + plan.after.collective_seconds
    assert sum(row["seconds"] for row in data["kinds"]) == pytest.approx(total)
    assert sum(row["seconds"] for row in data["lines"]) == pytest.approx(total)
    monkeypatch.setattr(report_data, "_LINES", 3)
    few = gather(plan)["lines"]
    assert [row["what"] for row in few[:3]] == ["line"] * 3
    assert (
        few[3]["what"] == f"{sum(row['what'] == 'line' for row in data['lines']) - 3} other lines"
    )
    for key in ("seconds", "seconds_before", "collective_seconds"):
        assert sum(row[key] for row in few) == pytest.approx(sum(row[key] for row in data["kinds"]))
    assert [row["what"] for row in few[4:]] in ([], ["no source line"])


def test_ops_without_a_source_line_have_a_row(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prog.mlir"
    path.write_text(
        "func.func @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> {\n"
        '  %b = stablehlo.tanh %a : tensor<64x64xf32> loc("f.py":3:1)\n'
        "  %c = stablehlo.dot_general %b, %b, contracting_dims = [1] x [0] : "
        "(tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32> loc(unknown)\n"
        "  return %c : tensor<64x64xf32> loc(unknown)\n"
        "}\n"
    )
    plan = toast.plan(path, mesh="a=1", hardware="tpu-v5e", **QUICK)
    rows = gather(plan)["lines"]
    assert [row["what"] for row in rows] == ["line", "no source line"]
    assert rows[1]["product_seconds"] == plan.after.matmul_seconds > 0
    assert "no source line" in html_text(plan)


def test_refinements_are_explained_where_there_are_any() -> None:
    plan = planned("mlp")
    step = dataclasses.replace(plan.steps[0], part=())
    whole = dataclasses.replace(plan, steps=(step,))
    part = dataclasses.replace(plan, steps=(dataclasses.replace(step, part=((0, 0),)),))
    assert "is a refinement" not in html_text(whole)
    assert "is a refinement" in html_text(part)


def test_rounding_is_not_waited_for() -> None:
    plan = planned("mlp")
    step = dataclasses.replace(
        plan.after, step_seconds=0.1 + 0.2, matmul_seconds=0.1, memory_seconds=0.2 - 1e-17
    )
    data = gather(dataclasses.replace(plan, after=step))
    assert data["summary"]["waited_seconds"] == 0
    assert "not overlapped 0 us" in html_text(dataclasses.replace(plan, after=step))
    assert 0 <= gather(plan)["summary"]["waited_seconds"] <= plan.after.collective_seconds + 1e-12


def test_numbers_are_those_of_the_command_line() -> None:
    plan = planned("t2b", layers=2)
    data = gather(plan)
    known = plan.explain_collectives()
    numbered = {
        number: row
        for row in data["collectives"]
        for first, last in row["numbers"]
        for number in range(first, last + 1)
    }
    assert sorted(numbered) == [found.number for found in known]
    for found in known:
        row = numbered[found.number]
        assert (row["kind"], tuple(row["axes"]), row["bytes"], row["seconds"]) == (
            found.kind, found.axes, found.bytes, found.seconds
        )  # fmt: skip
    total = sum(row["total_seconds"] for row in data["collectives"])
    assert total == pytest.approx(sum(found.total_seconds for found in known))
    assert [[*c[:2], *c[2:4]] for c in data["conflicts"]] == [
        [*r.names, r.set, r.group] for r in plan.analysis.resolutions
    ]
    assert data["explain"] == "toast explain TARGET"
    origin = Origin("my models:f", {"layers": 2}, ("f32[8,4]",), ("r.lp",))
    assert gather(dataclasses.replace(plan, origin=origin))["explain"] == (
        "toast explain 'my models:f' --layers 2 --arg 'f32[8,4]' --rules r.lp"
    )


def unrolled(runs: list[int]) -> list[int]:
    return [value for value, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)]


def test_the_listing_is_the_program() -> None:
    plan = planned("t2b", layers=2)
    program, names, listing = plan.analysis.program, plan.analysis.names, gather(plan)["listing"]
    first = np.cumsum([0, *(len(listing["signatures"][s][2]) for s in listing["signature"])])
    assert first.tolist() == names.first_name.tolist()
    color = unrolled(listing["color"])
    assert [c >= 0 for c in color] == names.shardable.tolist()
    whole: dict[int, set[int]] = {}
    for name, c in enumerate(color):
        if c >= 0:
            whole.setdefault(c, set()).add(int(plan.analysis.color[name]))
    assert all(len(found) == 1 for found in whole.values())
    assert len(whole) == len(listing["color_label"])
    specs = unrolled(listing["value_spec"])
    sharded = [v for v, spec in enumerate(specs) if any(listing["specs"][spec])]
    assert len(sharded) == sum(any(spec) for spec in plan.shardings.values.values())
    assert [len(op.operands) for op in program.ops] == [len(o) for o in listing["operands"]]


def sections(program: Program) -> list[tuple[str, str, int]]:
    found = sections_of(program)
    assert found[0].start == 0
    assert found[-1].stop == len(program.ops)
    for one, two in itertools.pairwise(found):
        assert one.stop == two.start
    return [(s.phase, s.title, s.stop - s.start) for s in found]


def test_layers_are_sections_forward_backward_and_in_the_optimizer() -> None:
    found = sections(analyzed("t2b", layers=3).program)
    for phase in ("forward", "backward"):
        layers = [(title, size) for p, title, size in found if p == phase and "layers" in title]
        assert {title for title, _ in layers} == {f"layers[{i}]" for i in range(3)}
        assert len({size for _, size in layers}) == 1, layers
    assert [t for p, t, _ in found if not p and t == "layers[1]"]


def test_loops_are_sections() -> None:
    found = sections(analyzed("t2b-scan", layers=3).program)
    assert {phase for phase, title, _ in found if title.endswith("\u00d7 3")} >= {
        "forward",
        "backward",
    }


def test_layers_and_caches_are_one() -> None:
    found = [title for _, title, _ in sections(analyzed("itx", layers=6).program)]
    assert [title for title in found if "[" in title] == [f"layers[{i}]" for i in range(6)]


@pytest.mark.parametrize("name", ["attention.lp", "mlp.lp"])
def test_a_fact_base_has_a_report(name: str, tmp_path: pathlib.Path) -> None:
    from toast.resources import directory

    result = run(
        "plan", directory("facts") / name, "--mesh", "d=2", "--report", tmp_path / "r.html"
    )
    assert result.exit_code == 0, result.output
    assert embedded((tmp_path / "r.html").read_text())["mesh"] == [["d", 2]]


HOSTILE = "<script>alert(1)</script>"


def hostile() -> Plan:
    names = (
        HOSTILE,
        "</script><script>window.hacked=1</script>",
        '"><img src=x onerror=hacked=1>',
        "\ud800é",
    )

    def function(p: dict[str, jax.Array]) -> list[jax.Array]:
        return [jnp.tanh(p[name] @ p[name].T) for name in names]

    return toast.plan(
        function, {name: f32(64, 64) for name in names}, mesh="a=2", hardware="tpu-v5e", **QUICK
    )  # fmt: skip


def test_names_are_text() -> None:
    text = html_text(hostile())
    assert text.isascii()
    assert HOSTILE not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert any(HOSTILE in name for name in embedded(text)["listing"]["arguments"])


def test_the_page_may_not_use_the_network() -> None:
    text = html_text(planned("mlp"))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src &#39;none&#39;; ")
    assert "unsafe" not in policy[1]
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert " style=" not in text
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/2000/svg", "", text)


def test_methods_are_beside_the_plan() -> None:
    rows = compare(
        analyzed("mlp"),
        Mesh.parse("data=4"),
        load("tpu-v5e"),
        ("toast", "shardy", "manual"),
        limit=1,
    )
    data = embedded(comparison_html(rows))
    assert [row["method"] for row in data["compared"]] == ["toast", "shardy", "manual"]
    assert data["compared"][2]["error"]
    assert data["summary"]["method"] == "toast"
    assert embedded(comparison_html(rows[1:]))["summary"]["method"] == "shardy"
    assert embedded(comparison_html(rows[:1]))["compared"] == []
    with pytest.raises(PlanError, match="no expert strategies"):
        comparison_html(rows[2:])


def test_files_are_written_whole_or_not_at_all(tmp_path: pathlib.Path) -> None:
    write_html(planned("mlp"), tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    with pytest.raises(PlanError, match="cannot write"):
        write_html(planned("mlp"), tmp_path / "none" / "r.html")
    result = run("plan", "mlp", "--mesh", "d=4", "--report", tmp_path / "none" / "r.html")
    assert result.exit_code == 2
    assert "cannot write" in result.output


def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the long work began")

    monkeypatch.setattr(Source, "analysis", work)
    there, mesh = tmp_path / "none" / "f", ("--mesh", "d=4")
    for words in (
        ("plan", "mlp", *mesh, "--report", there),
        ("plan", "mlp", *mesh, "--json", there),
        ("plan", "mlp", *mesh, "-o", there),
        ("report", "mlp", *mesh, "-o", there),
        ("compare", "mlp", *mesh, "--report", tmp_path),
        ("analyze", "mlp", "--facts", there),
        ("query", "mlp", "color(D,C)", "--csv", there),
        ("explain", "mlp", "--conflicts", "--json", there),
        ("validate", "mlp", *mesh, "--plot", there),
    ):
        result = run(*words)
        assert result.exit_code == 2, words
        assert "cannot write" in result.output, words
        assert not (tmp_path / "none").exists()


def test_groups_are_counted_where_layers_repeat() -> None:
    def layers(xs: list[jax.Array]) -> list[jax.Array]:
        return [jnp.tanh(x @ x.T) for x in xs]

    for count in (1, 3):
        plan = toast.plan(layers, [f32(64, 64)] * count, mesh="a=2", hardware="tpu-v5e", **QUICK)
        counts = plan.analysis.counts()
        assert (counts["compatibility_sets"], counts["resolution_groups"]) == (count, 1)
        assert ("1 group of repeated layers" in html_text(plan)) == (count == 3)


def test_commands_write_reports(tmp_path: pathlib.Path) -> None:
    paths = {name: tmp_path / f"{name}.html" for name in ("plan", "report", "compare")}
    done = [
        run("plan", "mlp", "--mesh", "data=4", "--report", paths["plan"]),
        run("report", "mlp", "--mesh", "data=4", "-o", paths["report"]),
        run("compare", "mlp", "--mesh", "data=4", "--limit", 1, "--methods", "toast,shardy", "--report", paths["compare"]),
    ]  # fmt: skip
    for result in done:
        assert result.exit_code == 0, result.output
    data = {name: embedded(path.read_text()) for name, path in paths.items()}
    assert {d["program"] for d in data.values()} == {"mlp"}
    assert len(data["compare"]["compared"]) == 2
    assert data["plan"]["arguments"] == data["report"]["arguments"]


def test_a_plan_file_has_a_report(tmp_path: pathlib.Path) -> None:
    plan, html = tmp_path / "plan.json", tmp_path / "plan.html"
    made = run("plan", "mlp", "--mesh", "data=4", "--json", plan)
    assert made.exit_code == 0, made.output
    done = run("report", plan, "-o", html)
    assert done.exit_code == 0, done.output
    data = embedded(html.read_text())
    known = json.loads(plan.read_text())
    assert data["program"] == "mlp"
    assert data["explain"] == "toast explain mlp"
    assert data["summary"]["step_seconds"] == pytest.approx(known["after"]["step_seconds"])
    assert {a for row in data["arguments"] for a in row["patterns"]} == set(known["arguments"])
    for option, value in (("--mesh", "data=2"), ("--seed", "0"), ("--methods", "toast")):
        refused = run("report", plan, option, value, "-o", tmp_path / "no.html")
        assert refused.exit_code == 2
        assert option in refused.output
    assert not (tmp_path / "no.html").exists()
    applied = run("apply", plan, "mlp", "--report", tmp_path / "applied.html")
    assert applied.exit_code == 0, applied.output
    again = embedded((tmp_path / "applied.html").read_text())
    assert again["arguments"] == data["arguments"]
    missing = run("report", "mlp")
    assert missing.exit_code == 2
    assert "--mesh" in missing.output


def test_a_scalar_program_and_one_without_arguments() -> None:
    for function, arguments in ((lambda x: x + 1, (f32(),)), (lambda: jnp.zeros((8, 8)), ())):
        found = toast.plan(function, *arguments, mesh="a=1", hardware="tpu-v5e", **QUICK)
        assert embedded(html_text(found))["summary"]["devices"] == 1


def test_meshes_tried_are_a_table() -> None:
    found = toast.plan(build("mlp"), devices=4, hardware="tpu-v5e", **QUICK)
    assert 'id="meshes"' in html_text(found)
