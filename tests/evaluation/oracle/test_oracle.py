"""What XLA's TPU compiler says; and how its programs are read."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import toast
from tests.helpers import f32, mlp, printed
from toast.analysis import Lowering
from toast.apply import Verification
from toast.cost import CostModel
from toast.errors import HardwareError, PlanError
from toast.evaluation import validate as stage
from toast.evaluation.oracle import Communication, Schedule, Verdict, communication_in, judge, tpu
from toast.evaluation.oracle.hlo import Module
from toast.evaluation.oracle.schedule import schedule
from toast.evaluation.validate import StateComparison, Validation, validate
from toast.hardware import Mesh, load
from toast.plan import Prediction
from toast.space import Space
from toast.units import size_text

HLO = """HloModule jit_f, is_scheduled=true, num_partitions=4

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.1 = f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add
}

%wide.windowed_dot_general_body_rs.1 (q: (f32[4])) -> (f32[4]) {
  %collective-permute.1 = f32[4,2]{1,0} collective-permute(%y), channel_id=7, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %collective-permute.2 = f32[4,2]{1,0} collective-permute(%y), channel_id=8, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}

%all-reduce-scatter.1 (q: f32[8]) -> f32[2] {
  %all-reduce.7 = f32[8]{0} all-reduce(%q), channel_id=11, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %dynamic-slice.1 = f32[2]{0} dynamic-slice(%all-reduce.7, %i), dynamic_slice_sizes={2}
}

%fused (z: bf16[2]) -> bf16[16] {
  %all-gather.3 = bf16[16]{0} all-gather(%z), channel_id=3, dimensions={0}
}

%other (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-reduce.2 = f32[8]{0} all-reduce(%x), channel_id=9, to_apply=%add
}

%three (p: (s32[], f32[8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(3)
  ROOT %lt = pred[]{:T(512)} compare(%g, %constant.1), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %while.3 = (s32[], f32[8]) while(%t), condition=%three, body=%other
  %while.1 = (s32[], f32[8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %while.2 = (f32[4]) while(%u), condition=%c, body=%wide.windowed_dot_general_body_rs.1
  %all-gather.2 = bf16[16]{0} all-gather(%b), channel_id=3, dimensions={0}
  %fusion.8 = f32[2]{0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1
  %get-tuple-element.5 = f32[4,2]{1,0} get-tuple-element(%while.2), index=0
  %collective-permute.3 = f32[4,2]{1,0} collective-permute(%get-tuple-element.5), channel_id=12, source_target_pairs={{0,1},{1,0}}
  ROOT %all-to-all.1 = (f32[4]{0}, f32[4]{0}) all-to-all(%v, %w), channel_id=4
}
"""


def test_collectives_of_a_scheduled_program() -> None:
    """Loops count as often as they run, one channel once, a windowed product as what it does."""
    assert communication_in(HLO) == (
        Communication("all_gather", 1, 32.0, 32.0 * 3 / 4),
        Communication("all_reduce", 8, 256.0, 256.0 * 2 * 3 / 4),
        Communication("all_to_all", 1, 32.0, 32.0 * 3 / 4),
        Communication("reduce_scatter", 2, 40.0, 40.0 * 3),
    )


BRANCHES = """HloModule jit_h, is_scheduled=true, num_partitions=4

%sum (p: f32[8]) -> f32[8] {
  %all-reduce.1 = f32[8]{0} all-reduce(%p), channel_id=1, to_apply=%add
  ROOT %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%f, backend_config={"window_config":{"estimated_cycles":"1000"}}
}

%gather (p: f32[8]) -> f32[8] {
  ROOT %all-gather.1 = f32[8]{0} all-gather(%p), channel_id=2, dimensions={0}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %conditional.1 = f32[8]{0} CONDITIONAL
}

ENTRY %main (a: f32[8]) -> f32[8] {
  ROOT %while.1 = (s32[], f32[8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"10"}}
}
"""


@pytest.mark.parametrize(
    "written",
    [
        "conditional(%i, %x, %y), branch_computations={%sum, %gather}, metadata={}",
        "conditional(%i, %x, %y), branch_computations={gather, sum}",
        "conditional(%i, %x, %y), true_computation=%sum, false_computation=%gather",
        "call(%x), to_apply=%add, called_computations={%sum,%gather}",
    ],
)
def test_branches_count_as_they_are_priced(written: str) -> None:
    """All of them, as often as the loop around them runs."""
    text = BRANCHES.replace("CONDITIONAL", written)
    assert communication_in(text) == (
        Communication("all_gather", 10, 320.0, 320.0 * 3 / 4),
        Communication("all_reduce", 10, 320.0, 320.0 * 2 * 3 / 4),
    )
    found = schedule(text, clock_hz=1e9, link_bytes_per_s=1e9, coordinates=GRID[:4])
    assert found.compute_seconds == pytest.approx(10 * 1e-6)
    assert found.collective_seconds == pytest.approx(10 * (2 * 32 + 32) / 2e9)


def test_branches_are_priced_all() -> None:
    """What the compiler's programs are read by: a product in one branch, and two in the other."""

    def chosen(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: (x + 1) @ w @ w, x)

    def seconds(function: Callable[..., Any]) -> float:
        analysis = toast.analyze(function, f32(512, 512), f32(512, 512))
        model = CostModel(Space(analysis, Mesh.parse("d=4")), load("a100"))
        return Prediction.of(model.price(model.space.initial[None])).matmul_seconds

    assert seconds(chosen) == pytest.approx(3 * seconds(lambda x, w: x @ w))


SCHEDULED = """HloModule jit_g, is_scheduled=true

%start (z: f32[4]) -> f32[16] {
  %all-gather.1 = f32[16,1000]{1,0} all-gather(%z), channel_id=3, replica_groups=mesh['a'=4,'b'=4] {'b'}, dimensions={0}
  ROOT %custom-call.1 = (f32[4,1000]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (z: f32[4]) -> f32[16] {
  %all-gather.2 = f32[16,1000]{1,0} all-gather(%z), channel_id=3, replica_groups=mesh['a'=4,'b'=4] {'b'}, dimensions={0}
  ROOT %custom-call.2 = f32[16,1000]{1,0} custom-call(%all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%body (p: (u32[], f32[8])) -> (u32[], f32[8]) {
  %p = (u32[], f32[8]) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two)
  %fusion.9 = f32[8]{0} fusion(%p), kind=kLoop, calls=%f, backend_config={"window_config":{"estimated_cycles":"1000"}}
  ROOT %tuple.1 = (u32[], f32[8]) tuple(%next, %fusion.9)
}

%condition (p: (u32[], f32[8])) -> pred[] {
  %p = (u32[], f32[8]) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%p), index=0
  %eight = u32[]{:T(128)} constant(8)
  ROOT %lt = pred[]{:T(512)} compare(%j, %eight), direction=LT
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %begin = (f32[4,1000]{1,0}) fusion(%x), kind=kCustom, calls=%start
  %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"window_config":{"estimated_cycles":"HERE"}}
  %end = f32[16,1000]{1,0} fusion(%begin), kind=kCustom, calls=%done
  %while.1 = (u32[], f32[8]) while(%t), condition=%condition, body=%body
  ROOT %all-reduce.1 = f32[16,1000]{1,0} all-reduce(%y), channel_id=4, replica_groups=[1,16]<=[16], to_apply=%add
}
"""
GRID = [(i // 4, i % 4) for i in range(16)]


@pytest.mark.parametrize("cycles", [10, 1_000_000])
def test_a_gather_may_run_beside_many_iterations(cycles: int) -> None:
    """The loop does not wait for the gather that runs beside it, nor for that beside its start."""
    text = SCHEDULED.replace("HERE", "10")
    lines = text.splitlines()
    end = next(number for number, line in enumerate(lines) if "%end = " in line)
    loop = next(number for number, line in enumerate(lines) if "%while.1 = " in line)
    lines[end], lines[loop] = lines[loop], lines[end]
    text = "\n".join(lines).replace('"estimated_cycles":"1000"', f'"estimated_cycles":"{cycles}"')
    found = schedule(text, clock_hz=1e9, link_bytes_per_s=1e9, coordinates=GRID)
    gather, reduce = 64_000 / 2e9, 2 * 64_000 / 4e9
    work = (10 + 4 * cycles) / 1e9
    assert found.compute_seconds == pytest.approx(work)
    assert found.seconds == pytest.approx(max(gather, work) + reduce)


@pytest.mark.parametrize("cycles", [10, 10_000])
def test_a_schedule_overlaps_what_was_started_early(cycles: int) -> None:
    """Kernels of 1 GHz, links of 1 GB/s: the gather runs beside the first kernel only."""
    found = schedule(
        SCHEDULED.replace("HERE", str(cycles)),
        clock_hz=1e9, link_bytes_per_s=1e9, coordinates=GRID,
    )  # fmt: skip
    gather = 64_000 / 2e9  # two links
    reduce = 2 * 64_000 / 4e9  # four, over both dimensions
    loop = 4 * 1000 / 1e9
    assert found.compute_seconds == pytest.approx(cycles / 1e9 + loop)
    assert found.collective_seconds == pytest.approx(gather + reduce)
    assert found.seconds == pytest.approx(max(gather, cycles / 1e9) + loop + reduce)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("mesh['a'=2,'b'=3] {'b'}", (0, 1, 2)),
        ("mesh['a'=2,'b'=3] {'a'}", (0, 3)),
        ("[2,3]<=[6]", (0, 1, 2)),
        ("[3,2]<=[2,3]T(1,0)", (0, 3)),
        ("{{0,3},{1,4},{2,5}}", (0, 3)),
    ],
)
def test_groups_of_devices(groups: str, expected: tuple[int, ...]) -> None:
    line = f"  %a = f32[8]{{0}} all-reduce(%b), channel_id=1, replica_groups={groups}, to_apply=%c"
    module = Module.parse("ENTRY %main (b: f32[8]) -> f32[8] {\n" + line + "\n}")
    assert module.computations["main"][0].group == expected


@pytest.fixture(scope="module")
def plan() -> toast.Plan:
    shapes = f32(4096, 1024), f32(1024, 4096), f32(4096, 1024)
    return toast.plan(mlp, *shapes, mesh="b=4", hardware="tpu-v5e")


def test_what_has_no_compiler_is_refused(plan: toast.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    program = plan.analysis.program
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PlanError, match="the TPU compiler is not installed: pip install"):
        judge(program, plan.shardings, load("tpu-v5e"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    with pytest.raises(HardwareError, match="no TPU compiler for h100; use tpu-v4"):
        judge(program, plan.shardings, load("h100"))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_the_compiler_answers_and_is_remembered(
    plan: toast.Plan, tmp_path: pathlib.Path, lowering: str
) -> None:
    program, target = plan.analysis.program, load("tpu-v5e")
    local = plan.lowered().module if lowering == "local" else None
    verdict = judge(program, plan.shardings, target, local=local, cache=tmp_path)
    assert verdict.argument_bytes == plan.after.argument_bytes
    assert not verdict.out_of_memory
    assert len(list(tmp_path.rglob("*.json"))) == 1
    assert judge(program, plan.shardings, target, local=local, cache=tmp_path) == verdict


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is an extra")
def test_the_scheduled_program_is_kept(plan: toast.Plan, tmp_path: pathlib.Path) -> None:
    program, target, kept = plan.analysis.program, load("tpu-v5e"), tmp_path / "kept.txt"
    for _ in range(2):  # a cached verdict has no text
        verdict = judge(program, plan.shardings, target, full=True, cache=tmp_path, keep=kept)
        module = Module.parse(kept.read_text())
        assert module.partitions == 4
        assert any(i.cycles for i in module.computations[module.entry])
        assert verdict.schedule is not None
        kept.unlink()


def test_only_full_compilations_schedule(plan: toast.Plan, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="keep: only a full compilation"):
        judge(plan.analysis.program, plan.shardings, load("tpu-v5e"), keep=tmp_path / "kept.txt")


#: A worker that writes what a compiler does, then does what the test says: the folder is ``job``.
WORKER = """
import json, os, pathlib, sys, time
job = pathlib.Path(sys.argv[1])
(job / "dump").mkdir()
stem = "module_0000.jit_f.cl_1.after_optimizations"
texts = {
    "_after_buffer_assignment": "HloModule jit_f\\n\\nENTRY %main () -> f32[] {\\n}\\n",
    "-live-range": "  Stack trace breakdown for peak usage: 1 200 bytes\\n",
    "-memory-usage-report": "Memory Space: default (color=0)\\nTotal bytes: 1800 (1.8KiB)\\n",
    "-buffer-assignment": "BufferAssignment:\\n"
    "allocation 0: size 1000, page 0, parameter 0, shape |f32[250]|, maybe-live-out:\\n"
    " value: <1 a @0> (size=1000,offset=0): f32[250]\\n"
    "allocation 1: size 500, page 0, preallocated-temp:\\n"
    "allocation 2: size 700, color 1, page 0, preallocated-temp:\\n"
    "allocation 3: size 300, page 0, thread-local:\\n",
}
def write(**cut):
    for name, text in texts.items():
        text = text[: cut.get(name.strip("-_").replace("-", "_"))]
        if text:
            (job / "dump" / f"{stem}{name}.txt").write_text(text)
"""


@pytest.fixture
def compiled(
    plan: toast.Plan, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Verdict]:
    """Judge by a worker that does what it is told; verdicts are kept in ``tmp_path``."""
    popen = subprocess.Popen
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")

    def run(does: str, **options: Any) -> Verdict:
        def start(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
            return popen([sys.executable, "-c", WORKER + does, command[-1]], **settings)

        monkeypatch.setattr(subprocess, "Popen", start)
        return judge(
            plan.analysis.program, plan.shardings, load("tpu-v5e"), cache=tmp_path, **options
        )

    return run


KILLED = "os.kill(os.getpid(), 9)"


def test_the_memory_of_a_compiler_that_is_ended(compiled: Callable[..., Verdict]) -> None:
    found = compiled("write(); time.sleep(60)")
    assert dataclasses.replace(found, seconds=0.0) == Verdict(
        1000.0, 1000.0, 1000.0, 500.0, 1200.0, False, (), 0.0
    )


@pytest.mark.parametrize(
    "cut",
    [
        "buffer_assignment=120",
        "memory_usage_report=0",
        "live_range=45",
        "after_buffer_assignment=20",
    ],
)
def test_files_are_waited_for_until_they_are_whole(
    cut: str, compiled: Callable[..., Verdict], tmp_path: pathlib.Path
) -> None:
    """A slow disk has some of them late, or in part."""
    with pytest.raises(PlanError, match="the TPU compiler died: gone"):
        compiled(f"write({cut}); print('gone', flush=True); sys.exit(1)")
    assert not list(tmp_path.rglob("*.json"))
    found = compiled(f"write({cut}); time.sleep(1.2); write(); time.sleep(60)")
    assert (found.argument_bytes, found.temporary_bytes, found.live_bytes) == (1000, 500, 1200)


def test_a_full_compile_that_dies_late_is_no_success(
    compiled: Callable[..., Verdict], tmp_path: pathlib.Path
) -> None:
    """Its memory is known, its time is not; nothing is kept, and what was kept is not believed."""
    for does in (
        f"write(); {KILLED}",
        f"write(); (job / 'result.json').write_text('{{'); {KILLED}",
    ):
        with pytest.raises(PlanError, match="the TPU compiler died: ended by SIGKILL"):
            compiled(does, full=True)
        assert not list(tmp_path.rglob("*.json"))
    assert compiled(f"write(); {KILLED}").argument_bytes == 1000  # all that was asked for


def test_a_cached_success_without_a_time_is_void(
    compiled: Callable[..., Verdict], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tpu, "_verdict", lambda *_: Verdict(1.0, 0.0, 0.0, 1.0, 2.0, False, (), 1.0)
    )
    compiled("", full=True)
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "1")
    assert list(tmp_path.rglob("*.json"))
    with pytest.raises(PlanError, match="the TPU compiler died"):
        compiled(KILLED, full=True)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("(job / 'result.json').write_text('{\"a\": 1}')", "memory report is missing or incomplete; check"),
        ("write(); (job / 'result.json').write_text('{\"a\": 1}')", "cannot be read: KeyError: 'argument"),
        ("(job / 'result.json').write_text('{\"error\": \"E: no\"}')", "the TPU compiler failed: E: no"),
        ("", "the TPU compiler died: no message"),
    ],
)  # fmt: skip
def test_whatever_a_compiler_leaves_costs_its_row_only(
    does: str, message: str, compiled: Callable[..., Verdict], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(PlanError, match=message):
        compiled(does, full=True)
    assert not list(tmp_path.rglob("*.json"))


def test_no_room_for_a_compile(
    compiled: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(PlanError, match="cannot be run: No space left on device; check the free"):
        compiled("")


def test_a_compile_that_fails_costs_its_row(
    plan: toast.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = iter(
        [
            Verdict(
                1e6, 0.0, 0.0, 1e6, 2e6, False, (Communication("all_gather", 1, 2.0**20),), 1.0
            ),
            Verdict(0.0, 0.0, 0.0, 9e12, 9e12, True, (), 1.0),
        ]
    )

    def judged(*_arguments: object, **_options: object) -> Verdict:
        verdict = next(said, None)
        if verdict is None:
            raise PlanError("the TPU compiler died: no message")
        return verdict

    monkeypatch.setattr(stage, "judge", judged)
    monkeypatch.setattr(stage, "check", lambda _hardware: None)
    found = validate(plan.analysis, Mesh.parse("b=4"), load("tpu-v5e"), plans=2)
    assert [row.name for row in found.rows][:2] == ["toast", "unsharded"]
    assert len(found.compiled) == 1
    assert found.misjudged() == (found.rows[1],)
    assert found.rows[2].error == "the TPU compiler died: no message"
    assert isinstance(found.rows[0], StateComparison)
    text = printed(stage.table(found))
    assert "the TPU compiler died: no message" in text
    assert "1 of 1; 1 plans out of memory that were predicted to fit" in text


def verdict(peak: float, seconds: float, sent: float = 0.0) -> Verdict:
    moved = (Communication("all_gather", 1, sent, sent),)
    return Verdict(
        1.0, 0.0, 0.0, peak - 1, peak, False, moved, 1.0, Schedule(seconds, seconds, 0.0)
    )


def predicted(peak: float, seconds: float, sent: float = 0.0) -> Prediction:
    return Prediction(seconds, seconds, 0.0, peak, 1.0, (), sent_bytes=sent)


def test_figures_of_a_validation() -> None:
    """Ties of 15 % do not count; the third and fourth plan are in the wrong order."""
    rows = [
        (predicted(1e9, 1.0), verdict(1e9, 1.0)),
        (predicted(2e9, 1.1), verdict(1e9, 1.1)),
        (predicted(1e9, 5.0, 9e8), verdict(1e9, 2.0, 1e9)),
        (predicted(1e9, 4.0, 5e8), verdict(1e9, 3.0, 1e9)),
    ]
    found = Validation(
        tuple(StateComparison(str(i), ours, theirs) for i, (ours, theirs) in enumerate(rows)), 16e9
    )
    assert found.pairs() == (4, 5)
    assert found.tau() == pytest.approx(3 / 5)
    assert found.peak_errors()[0] == 0
    assert [round(row.sent_error, 2) for row in found.rows] == [0, 0, -0.1, -0.5]
    assert found.squeezed() == ()
    assert dataclasses.replace(found, memory_bytes=1.5e9).squeezed() == (found.rows[1],)
    text = stage.summary(found)
    assert "bytes sent within 10 % in 3 of 4" in text
    assert "Kendall's tau 0.60 over 5 pairs" in text
    assert "peak: median error 0.0%, 95th percentile 85.0%, worst 100.0% (0 plans squeezed" in text
    assert "95th percentile 132%, worst 150%" in text
    picture = stage.plot(found)
    assert picture.count("<circle") == 8
    xml.etree.ElementTree.fromstring(picture)
    assert "step" in printed(stage.table(found))


def test_programs_without_arguments() -> None:
    """Nothing is predicted, and nothing is there: that is exact."""
    ours = dataclasses.replace(predicted(1e9, 1.0), argument_bytes=0.0)
    theirs = dataclasses.replace(verdict(1e9, 1.0), argument_bytes=0.0, temporary_bytes=1e9)
    row = StateComparison("toast", ours, theirs)
    assert (row.argument_error, row.output_error, row.peak_error) == (0.0, 0.0, 0.0)
    assert "arguments exact in 1 of 1" in stage.summary(Validation((row,), 16e9))
    more = dataclasses.replace(row, predicted=dataclasses.replace(ours, argument_bytes=8.0))
    assert more.argument_error > 0


def test_small_programs_are_said_to_tell_little() -> None:
    small = StateComparison("toast", predicted(1e5, 1e-6), verdict(5e4, 2e-6))
    said = "All peaks are below 4 MiB, where the compiler's padding and fixed costs dominate"
    assert said in stage.summary(Validation((small,), 16e9))
    large = StateComparison("unsharded", predicted(1e9, 1.0), verdict(1e9, 1.0))
    assert said not in stage.summary(Validation((small, large), 16e9))
    assert said not in stage.summary(Validation((dataclasses.replace(small, verdict=None),), 16e9))


def test_outputs_are_unknown_where_the_compiler_was_ended() -> None:
    ours = dataclasses.replace(predicted(1e9, 1.0), output_bytes=5e6)
    for full, outputs in ((True, "0 B"), (False, "-")):
        theirs = verdict(1e9, 1.0, 2e9)
        theirs = theirs if full else dataclasses.replace(theirs, schedule=None)
        text = printed(stage.table(Validation((StateComparison("toast", ours, theirs),), 16e9)))
        row = next(line for line in text.splitlines() if "toast" in line)
        cells = [cell.strip() for cell in row.split("│")]
        assert cells[cells.index(size_text(5e6)) + 1] == outputs
        assert "1 all_gather 1907.3" in text  # not cut


def test_no_plan_compiles() -> None:
    found = Validation((StateComparison("toast", predicted(1e9, 1.0), error="hangs"),), 16e9)
    assert np.isnan(found.tau())
    assert "hangs" in printed(stage.table(found))
    xml.etree.ElementTree.fromstring(stage.plot(found))


def test_messages_and_names_are_no_markup() -> None:
    """A path in an error must not take the other rows with it."""
    rows = (
        StateComparison("found [/b]", predicted(1e9, 1.0), verdict(1e9, 1.0)),
        StateComparison("<&>", predicted(1e9, 1.0), error="no file [/tmp/x] at f.py:100:4"),
    )
    text = printed(stage.table(Validation(rows, 16e9)))
    assert "found [/b]" in text
    assert "no file [/tmp/x] at f.py:100:4" in text
    equal = Verification((), {})
    rows = (StateComparison("[/a]", predicted(1.0, 1.0), verification=equal), rows[1])
    text = printed(stage.table(Validation(rows, 16e9)))
    assert "[/a]" in text
    assert "no file [/tmp/x] at f.py:100:4" in text


def test_names_in_the_picture_are_no_tags() -> None:
    row = StateComparison("<a&b>", predicted(1e9, 1.0), verdict(1e9, 1.0))
    xml.etree.ElementTree.fromstring(stage.plot(Validation((row,), 16e9)))


@pytest.mark.parametrize("lowering", ["xla", "local"])
def test_plans_are_run_on_cpu_devices(lowering: Lowering) -> None:
    analysis = toast.analyze(mlp, f32(64, 32), f32(32, 64), f32(64, 16))
    mesh, target = Mesh.parse("b=2,m=2"), load("tpu-v5e")
    found = validate(analysis, mesh, target, oracle="cpu", lowering=lowering, plans=2)
    assert all(row.verification and row.verification.equal for row in found.rows)
    text = printed(stage.table(found))
    assert (
        f"{len(found.rows)} of {len(found.rows)} plans compute the same results as one device"
        in text
    )
