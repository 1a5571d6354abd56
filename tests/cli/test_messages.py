"""What commands say where there is nothing to show, or something is wrong with a plan."""

from __future__ import annotations

import io
import pathlib
import re

import pytest
import rich.console

from tests.cli.test_cli import run
from tests.helpers import analyzed
from toast import api, report
from toast.errors import TargetError
from toast.frontend import stablehlo
from toast.resources import directory
from toast.search import Settings

FACTS = directory("facts")
MODULE = """
func.func private @one(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.add %x, %x : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
func.func private @two(%x: tensor<8x4xf32>, %w: tensor<4x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.dot %x, %w : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  %1 = func.call @one(%0) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
"""


#: A program that calls a private function, another one, and one with dynamic shapes.
SEVERAL = """
func.func private @inner(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.add %x, %x : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
func.func public @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = func.call @inner(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %1 = func.call @other(%0) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
func.func public @other(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %0 = stablehlo.multiply %x, %x : tensor<8x4xf32>
  return %0 : tensor<8x4xf32>
}
func.func public @dynamic(%x: tensor<?x4xf32>) -> tensor<?x4xf32> {
  %0 = stablehlo.add %x, %x : tensor<?x4xf32>
  return %0 : tensor<?x4xf32>
}
"""


@pytest.mark.parametrize("target", ["", " "])
def test_an_empty_target_is_one_line(target: str) -> None:
    found = run("validate", target, "--mesh", "data=4")
    assert found.exit_code == 2
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"toast: TARGET {target!r} is empty; write a model's name")


def test_no_conflicts_are_no_table() -> None:
    found = run("explain", FACTS / "mlp.lp", "--conflicts")
    assert found.exit_code == 0, found.output
    assert found.stdout.strip() == "mlp has no conflicts: no value has two dimensions of one color"


def test_a_plan_that_does_not_fit_says_so_first_and_ends_with_what_it_takes(
    tmp_path: pathlib.Path,
) -> None:
    found = run(
        "plan", "t2b", "--layers", 2, "--mesh", "data=2", "--budget", 0, "--json",
        tmp_path / "plan.json",
    )  # fmt: skip
    assert found.exit_code == 0
    verdict, first = found.stdout[: found.stdout.index("Plan for")].strip().split("\n", 1)
    assert "of 15.8 GiB: does not fit" in verdict
    assert first.startswith("Does not fit: the plan needs ")
    assert first.endswith("than the limit of 15.8 GiB; what it takes is at the end")
    assert "--fit devices" in found.stdout[found.stdout.index("What it takes to fit") :]
    assert "note" not in found.stderr
    applied = run("apply", tmp_path / "plan.json", "t2b", "--layers", 2)
    assert applied.exit_code == 0
    assert applied.stdout.startswith("Does not fit: ")
    end = applied.stdout[applied.stdout.index("What it takes to fit") :]
    for change in ("--remat auto", "--fit batch", "--fit devices"):
        assert change in end
    assert run("apply", tmp_path / "plan.json", "t2b", "--layers", 2, "--strict").exit_code == 1


def test_what_does_not_fit_is_red() -> None:
    plan = api.plan(
        analyzed("t2b", layers=2), mesh="data=2", hardware="tpu-v5e",
        settings=Settings(budget=0.0),
    )  # fmt: skip
    file = io.StringIO()
    console = rich.console.Console(
        file=file, force_terminal=True, color_system="standard", width=200
    )
    console.print(report.plan_tables(plan))
    verdict, first = file.getvalue().split("\n")[:2]
    assert re.match(r"\x1b\[1;31m\d.* does not fit ", verdict)
    assert first.startswith("\x1b[1;31mDoes not fit")


def test_a_module_of_several_functions_is_annotated_whole_or_from_one(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "two.mlir"
    path.write_text(MODULE)
    every = run("rules", "annotate", path)
    assert every.exit_code == 0, every.output
    assert every.stdout.count("sdy.sharding_rule") == 2
    assert "@one" in every.stdout
    assert "call @one" in every.stdout
    entry = run("rules", "annotate", path, "--function", "two", "-o", tmp_path / "out.mlir")
    assert entry.stdout.startswith("2 ops annotated in ")
    text = (tmp_path / "out.mlir").read_text()
    assert "func.func @two" in text
    assert "@one" not in text
    assert len(stablehlo.from_file(tmp_path / "out.mlir").ops) == 5
    unknown = run("rules", "annotate", path, "--function", "three")
    assert unknown.exit_code == 2
    assert "no function @three with a body; the functions are @one, @two" in unknown.stderr
    assert run("rules", "annotate", "mlp", "--function", "f").exit_code == 2
    with pytest.raises(TargetError, match="found 0; name the entry function main"):
        stablehlo.from_file(path)


def test_all_public_functions_beside_main_are_annotated(tmp_path: pathlib.Path) -> None:
    """Private functions are inlined; functions with dynamic shapes are named, and stay as they are."""
    path = tmp_path / "several.mlir"
    path.write_text(SEVERAL)
    every = run("rules", "annotate", path)
    assert every.exit_code == 0, every.output
    functions = re.split(r"(?=  func\.func)", every.stdout)[1:]
    rules = {re.search(r"@(\w+)", text)[1]: text.count("sdy.sharding_rule") for text in functions}  # type: ignore[index]
    assert rules == {"main": 2, "other": 1, "dynamic": 0}
    assert "call @" not in every.stdout
    (line,) = every.stderr.strip().splitlines()
    assert line.startswith("toast: note: @dynamic is left out: ")
    assert "dynamic shape tensor<?x4xf32>" in line
    (tmp_path / "dynamic.mlir").write_text(SEVERAL[SEVERAL.index("func.func public @dynamic") :])
    refused = run("rules", "annotate", tmp_path / "dynamic.mlir")
    assert refused.exit_code == 2
    assert "dynamic shape" in refused.stderr
