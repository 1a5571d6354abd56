"""Kernels of a plan of the corpus: what the compiler's program says of them."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_evaluation import loaded
from toast.evaluation.oracle.hlo import Module

loaded("grammar")
loaded("strangers")
examine = loaded("examine")

SCHEDULED = """HloModule jit_f, is_scheduled=true

%product (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %convolution.1 = f32[8,8]{1,0} convolution(%p, %p)
}

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %fusion.2 = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%product, metadata={op_name="jit(f)/transpose(jvp())/while/body/closed_call/bh,hg->bg/dot_general"}, backend_config={"window_config":{"estimated_cycles":"500"}}
  ROOT %tuple.1 = (s32[], f32[8,8]) tuple(%x, %fusion.2)
}

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %copy.1 = f32[8,8]{0,1} copy(%a), metadata={op_name="jit(f)/add"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %bitcast.1 = f32[8,8]{0,1} bitcast(%copy.1)
  %while.1 = (s32[], f32[8,8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %get-tuple-element.1 = f32[8,8]{1,0} get-tuple-element(%while.1), index=1
}
"""


def test_kernels_run_as_often_as_their_loops() -> None:
    copy, product = examine.kernels(Module.parse(SCHEDULED), 1e9)
    assert (copy.opcode, copy.runs, copy.seconds) == ("copy", 1, pytest.approx(1e-6))
    assert (product.opcode, product.runs, product.seconds) == ("product", 10, pytest.approx(5e-7))
    assert copy.path == "jit(f)/add"


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("jit(f)/transpose(jvp())/while/body/closed_call/bh,hg->bg/dot_general",
         "loop backward bh,hg->bg/dot_general"),
        ("jit(f)/transpose(jvp(jvp()))/checkpoint/rematted_computation/mul", "backward again mul"),
        ("jit(f)/jit(step)/add", "add"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_place_says_what_a_path_computes(path: str, place: str) -> None:
    assert examine.place(path) == place


def test_held_out_programs_are_not_examined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["examine.py", "3", "found"])
    with pytest.raises(SystemExit) as end:
        examine.main()
    assert end.value.code == 2
    assert "seed 3: programs with odd seeds are held out" in capsys.readouterr().err
