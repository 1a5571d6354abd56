"""``toast explain``: chains, conflicts, prices, JSON; one line for everything that is not there."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from tests.cli.test_cli import FACTS, run

X_XT = FACTS / "x_xt.lp"


def test_a_chain(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "chain.json"
    result = run("explain", X_XT, "x:0", "z:-1", "--json", target)
    assert result.exit_code == 0, result.output
    assert "x:0 f32[32,4] and z:1 f32[32,32] have one color, by 4 steps:" in result.stdout
    assert re.search(r"2  I +factor 0 of transpose#1.*\[rules/ops/shape.lp:31, 32\]", result.stdout)
    chain = json.loads(target.read_text())["chain"]
    assert chain["tied"] is True
    assert [step["kind"] for step in chain["steps"]] == [
        "def_use", "identity", "def_use", "identity",
    ]  # fmt: skip
    assert chain["steps"][1]["rules"][0] == {"file": "rules/ops/shape.lp", "line": 31}


def test_a_model_by_short_names() -> None:
    one, other = "params.layers[0].wq:0", "params.layers[1].wo:2"
    result = run("explain", "t2b", "--layers", 2, one, other)
    assert result.exit_code == 0, result.output
    assert "params['layers'][0]['wq']:0 bf16[2048,8,256] and" in result.stdout
    assert re.search(r"transformer.py:\d+ jit\(step\)", result.stdout), "the user's line"


def test_arguments_of_one_group_are_mirrored() -> None:
    """Not one dimension, but the same of two layers: an action on one is one on both (4.4)."""
    result = run(
        "explain", "t2b", "--layers", 2, "params.layers[0].gate:1", "params.layers[1].gate:1"
    )
    assert result.exit_code == 0, result.output
    assert "have different colors" in result.stdout
    assert "An action on one is still mirrored to the other" in result.stdout
    for pair in (("x:0", "x:1"), ("x:0", "z:0")):
        assert "mirrored" not in run("explain", X_XT, *pair).stdout


def test_a_conflict_with_prices(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "conflict.json"
    result = run("explain", X_XT, "--conflict", 0, "--mesh", "data=4", "--json", target)
    assert result.exit_code == 0, result.output
    for part in (
        "Conflict 0: dot_general#2:lhs(0) and dot_general#2:rhs(1) have one color",
        "Flow 1, from x:0 f32[32,4] to z:0:",
        "Flow 2, from x:0 f32[32,4] to z:1:",
        "Resolution 1: the axis goes to dot_general#2:rhs(1)",
        "Both resolutions on mesh data=4 of tpu-v5e",
        "P(None, 'data')",
    ):
        assert part in result.stdout, part
    data = json.loads(target.read_text())
    assert data["conflict"]["source"]["label"] == "x:0"
    assert [row["resolution"] for row in data["priced"]["resolutions"]] == [0, 1]
    assert data["priced"]["resolutions"][0]["prediction"]["step_seconds"] > 0
    useless = run("explain", X_XT, "--conflict", 0, "--mesh", "data=5")
    assert "Axis data divides no dimension of this color." in useless.stdout


def test_the_list_of_conflicts(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "conflicts.json"
    result = run("explain", FACTS / "attention.lp", "--conflicts", "--json", target)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"dot_general#8:lhs\(0\)", result.stdout)) == 1
    assert [row["set"] for row in json.loads(target.read_text())["conflicts"]] == [0] * 5


MESSAGES = {
    (): "nothing to explain: use either two dimensions (x:0 w:1), --conflict K or --conflicts",
    ("x:0", "z:0", "--conflicts"): "several explanations requested: use either two dimensions",
    ("x:0",): "1 dimension (x:0): use exactly two, such as x:0 w:1",
    ("x:0", "y:0", "z:0"): "3 dimensions (x:0, y:0, z:0): use exactly two",
    ("x:0", "z:0", "--mesh", "data=2"): "--mesh prices the resolutions of a conflict; add --conflict K",
    ("--conflict", 0, "--axis", "data"): "--axis data: has no effect without a mesh; add --mesh",
    ("--conflict", 0, "--hardware", "h100"): "--hardware h100: has no effect without a mesh; add --mesh",
    ("x:0", "z:0", "--hardware", "nosuch"): "--hardware nosuch: has no effect without a mesh",
    ("x:0", "z:0", "--budget", 3): "--budget 3: is only for --why-not on a plan; remove --budget",
    ("--conflict", 3): "conflict 3: x_xt has only conflict 0; --conflicts lists them",
    ("--conflict", 0, "--mesh", "data=2", "--axis", "model"): "axis model: not in mesh data=2; use data",
    ("--conflict", 0, "--mesh", "data"): "mesh",
    ("x:2", "z:0"): "x:2: no dimension 2: x is f32[32,4] and has dimensions 0 to 1",
    ("xx:0", "z:0"): "xx: no such argument, result or value; did you mean x?",
    ("x:0", "z:0", "--json", "/nonexistent/a.json"): "/nonexistent/a.json: cannot write: No such file",
}  # fmt: skip


@pytest.mark.parametrize("options", MESSAGES)
def test_bad_input_gets_one_line(options: tuple[object, ...]) -> None:
    result = run("explain", X_XT, *options)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert MESSAGES[options] in result.stderr
    assert not result.stdout
