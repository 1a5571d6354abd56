"""The command line: real output, clear errors, exit codes, files whole or not at all."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import toast
from toast import targets
from toast.cli import app
from toast.errors import TargetError
from toast.resources import directory

FACTS = directory("facts")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_plan_prints_the_tables_and_writes_json(tmp_path: pathlib.Path) -> None:
    target, annotated = tmp_path / "plan.json", tmp_path / "plan.mlir"
    result = run(
        "plan", "t2b", "--layers", 2, "--mesh", "data=4,model=4", "--hardware", "tpu-v5e",
        "--json", target, "-o", annotated,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for part in (
        "Arguments, by group", "Actions, in order", "Predicted, per device",
        "Collectives per step", "step time", "peak memory", "params['layers'][*]['gate']",
        "all_gather", "Time:",
    ):  # fmt: skip
        assert part in result.stdout, part
    data = json.loads(target.read_text())
    assert data["fits"] is True
    assert data["mesh"] == {"data": 4, "model": 4}
    assert len(data["actions"]) >= 3
    assert all(action["reason"] for action in data["actions"])
    assert set(data["seconds"]) >= {"lowering", "rules", "names", "conflicts", "search"}
    assert data["arguments"]["tokens"]["sharding"][0]  # along the batch
    assert "sdy.mesh" in annotated.read_text()
    again = run("plan", annotated, "--mesh", "data=4")
    assert again.exit_code == 0, again.output
    assert "params['embedding']" in again.stdout


def test_analyze_prints_counts(tmp_path: pathlib.Path) -> None:
    target, base = tmp_path / "a.json", tmp_path / "a.lp"
    result = run("analyze", FACTS / "attention.lp", "--json", target, "--facts", base)
    assert result.exit_code == 0, result.output
    assert re.search(r"conflicts\s*│\s*5 ", result.stdout)
    assert json.loads(target.read_text())["counts"]["compatibility_sets"] == 1
    assert run("analyze", base).exit_code == 0


def test_plan_finds_the_mesh(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "plan.json"
    result = run(
        "plan", "mlp", "--devices", "4", "--restarts", "2", "--processes", "2", "--json", target
    )
    assert result.exit_code == 0, result.output
    assert "Meshes of 4 devices" in result.stdout
    assert "best of 2 searches" in result.stdout
    rows = json.loads(target.read_text())["meshes"]
    assert [row["mesh"] for row in rows] == [{"a": 4}, {"a": 2, "b": 2}]


def test_a_plan_begins_with_an_earlier_one(tmp_path: pathlib.Path) -> None:
    """What there is to know of it stands in lines of its own."""
    target = tmp_path / "plan.json"
    options = ("--hardware", "tpu-v5e", "--json", target, "--budget", "0")
    assert run("plan", "t2b", "--layers", 1, "--mesh", "data=4", *options[:4]).exit_code == 0
    cost = json.loads(target.read_text())["cost"]
    start = ("--start", target, "--mesh", "data=4")
    result = run("plan", "t2b", "--layers", 1, *start, *options)
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text())["cost"] == cost
    lines = [line for line in result.stdout.splitlines() if line.startswith(("Search:", "Note:"))]
    assert lines[1:] == ["Note: stopped at its budget"]
    result = run("plan", "t2b", "--layers", 2, *start, *options)
    assert result.exit_code == 0, result.output
    assert re.search(r"^Search: [^\n]*, cost [\d.]+ \(unsharded: [\d.]+\)$", result.stdout, re.M)
    assert re.search(r"^Note: stopped at its budget\nNote: start ", result.stdout, re.M)
    result = run("plan", "gns", "--layers", 1, *start)
    assert result.exit_code == 2
    assert "plan.json: this is a plan of t2b; gns has" in result.stderr
    assert result.stderr.count("\n") == 1


def test_verify_compares_every_output() -> None:
    result = run("verify", "mlp", "--mesh", "data=4,model=2")
    assert result.exit_code == 0, result.output
    assert "1 of 1 outputs equal" in result.stdout


def test_functions_by_module_and_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_module.py").write_text(
        "import jax.numpy as jnp\n"
        "from toast.models import build\n"
        "def f(x, w):\n    return jnp.tanh(x @ w)\n"
        "def model():\n    return build('mlp')\n"
    )
    monkeypatch.chdir(tmp_path)
    shapes = ("--arg", "bf16[4096,512]", "--arg", "bf16[512,512]")
    result = run("plan", "users_module:f", "--mesh", "d=4", *shapes)
    assert result.exit_code == 0, result.output
    assert "bf16[4096,512]" in result.stdout
    assert run("analyze", "users_module:model").exit_code == 0
    for arguments, message in (
        (("users_module:g",), "module users_module has no g"),
        (("users_module:f",), "needs example arguments: pass --arg f32[8,4] once per argument"),
        (("users_module:f", "--arg", "bf16[4096"), "--arg bf16[4096: not a shape"),
        (("users_module:f", "--arg", "q7[4]"), "unknown element type q7"),
        (("missing_module:f",), "cannot import missing_module"),
    ):
        failed = run("analyze", *arguments)
        assert failed.exit_code == 2
        assert message in failed.stderr


def test_functions_by_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "users_file.py"
    file.write_text("def f(x):\n    return x + 1\n")
    assert targets.references([f"call={file}:f"])["call"](1) == 2
    with pytest.raises(TargetError, match=r"there is no file missing/file\.py; check the path"):
        targets.references(["call=missing/file.py:f"])


def test_options_of_models_are_settings(tmp_path: pathlib.Path) -> None:
    """A plan remembers them, and later commands build the same program."""
    target = tmp_path / "plan.json"
    options = ("--layers", 1, "--sequence", 128, "--set", "step=decode", "--set", "page=32")
    failed = run("plan", "llama3.1-8b", *options, "--mesh", "d=2")
    assert "has no option page" in failed.stderr
    result = run("plan", "llama3.1-8b", *options[:-2], "--mesh", "d=2", "--json", target)
    assert result.exit_code == 0, result.output
    origin = json.loads(target.read_text())["origin"]
    assert origin["sizes"] == {"layers": 1, "sequence": 128, "step": "decode"}
    applied = run("query", target, "reshards")
    assert applied.exit_code == 0, applied.output


def test_columns_are_the_width_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = run("models").stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run("models").stdout
    monkeypatch.setenv("COLUMNS", "wide")
    assert run("models").stdout == wide
    assert 80 < max(map(len, wide.splitlines())) <= 160
    assert max(map(len, narrow.splitlines())) == 80


def test_models_are_listed() -> None:
    result = run("models")
    assert result.exit_code == 0
    assert "t2b" in result.stdout
    assert "8,538,074,112" in result.stdout


def test_ops_without_a_rule_are_named_and_the_analysis_goes_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "odd.mlir"
    path.write_text(
        "func.func public @main(%a: tensor<8x8xf32>) -> tensor<8x8xf32> {\n"
        '  %0 = stablehlo.custom_call @mystery(%a) : (tensor<8x8xf32>) -> tensor<8x8xf32> loc("net.py":7:1)\n'
        "  return %0 : tensor<8x8xf32>\n}\n"
    )
    result = run("analyze", path)
    assert result.exit_code == 0, result.output
    assert (
        "no rule for custom_call @mystery f32[8,8] at net.py:7: its dimensions are not sharded"
        in result.stderr
    )


T = ("t2b-tiny", "--mesh", "d=2")
BAD = {
    "mesh": (("plan", "mlp", "--mesh", "data4"), "mesh 'data4': 'data4' is not axis=size"),
    "no mesh": (("plan", "mlp"), "neither a mesh nor a number of devices given; use either --mesh"),
    "two meshes": (("plan", *T, "--devices", "4"), "both a mesh and a number of devices given; use either"),
    "prime": (("plan", "mlp", "--devices", "7"), "mesh axis a=7 divides no dimension of mlp"),
    "axis": (("plan", "mlp", "--mesh", "d=7"), "mesh axis d=7 divides no dimension of mlp"),
    "large axis": (("plan", "mlp", "--mesh", "d=4096", "--hardware", "h100"), "divides no dimension of mlp (the largest has 256"),
    "hardware": (("plan", *T, "--hardware", "h10"), "no hardware named h10; did you mean h100?"),
    "model": (("plan", "t2c", "--mesh", "d=2"), "no model named t2c; did you mean t2b?"),
    "model in capitals": (("plan", "T2B", "--mesh", "d=2"), "no model named T2B; did you mean t2b?"),
    "model with an option": (("plan", "t2bb", "--layers", "1", "--mesh", "d=2"), "no model named t2bb; did you mean t2b?"),
    "option of a file": (("plan", FACTS / "mlp.lp", "--layers", "1", "--mesh", "d=2"), "--layers is for models"),
    "file": (("plan", "none.mlir", "--mesh", "d=2"), "none.mlir: cannot read: No such file"),
    "option": (("plan", "mlp", "--mesh", "d=2", "--layers", "3"), "model mlp has no option layers"),
    "setting": (("plan", *T, "--set", "remat"), "--set remat: write NAME=VALUE, such as step=decode"),
    "unknown value": (
        ("plan", "llama3.1-8b", "--layers", "1", "--mesh", "data=8", "--set", "remat=latent"),
        "remat latent: no value is named 'latent'; use none, full, names, or names of layer_input, query, key, value, "
        "attention, attention_output, gate, up, mlp_output, joined by +",
    ),
    "unknown setting": (("plan", *T, "--set", "remat=full"), "model t2b-tiny has no option remat"),
    "wrong setting": (("plan", "llama3.1-8b", "--mesh", "d=2", "--set", "step=4"), "step 4: expected a text"),
    "setting of a file": (("plan", FACTS / "mlp.lp", "--set", "step=decode", "--mesh", "d=2"), "--set step is for models"),
    "size": (("plan", *T, "--layers", "0"), "layers 0: must be at least 1"),
    "memory": (("plan", *T, "--memory", "0.0001"), "the smallest peak found is"),
    "negative memory": (("plan", *T, "--memory", "-1"), "must be positive"),
    "rules": (("plan", *T, "--rules", "nowhere"), "nowhere: no such rule file or folder"),
    "system": (("plan", "mlp", "--mesh", "d=512", "--hardware", "tpu-v5e"), "a tpu-v5e system has at most 256; use a smaller mesh"),
    "no table": (("hardware", "calibrate", "h100", "--collectives", "none.csv"), "none.csv: cannot read: No such file"),
    "nothing to fit": (("hardware", "calibrate", "h100"), "nothing to fit; add --collectives FILE, --products FILE or --run"),
    "two tables": (("hardware", "calibrate", "h100", "--run", "--products", "x.csv"), "--run measures both tables; remove --collectives and --products"),
    "another GPU": (("hardware", "calibrate", "h100", "--run"), "h100 describes NVIDIA H100 80GB HBM3, but JAX found"),
    "torus": (("hardware", "calibrate", "tpu-v4", "--collectives", FACTS / "mlp.lp"), "mlp.lp:"),
    "cpu devices": (("validate", "mlp", "--mesh", "d=512", "--oracle", "cpu"), "--oracle cpu runs at most 256 devices"),
    "devices": (("verify", "mlp", "--mesh", "d=512"), "toast verify runs at most 256 devices"),
    "json": (("plan", *T, "--json", "/nowhere/x.json"), "/nowhere/x.json: cannot write"),
    "value": (("plan", *T, "--seed", "x"), "toast: Invalid value for '--seed': Input should be a valid integer"),
    "word": (("plan", *T, "--overlap", "foo"), "'--overlap': 'foo' is not one of 'none', 'partial', 'gathers', 'asynchronous', 'full'; see"),
    "unknown option": (("plan", *T, "--bogus", "3"), "toast: No such option: --bogus; see "),
    "python file": (("plan", "tests/cli/test_cli.py", "--mesh", "d=2"), "tests/cli/test_cli.py: a Python file; write tests/cli/test_cli.py:FUNCTION"),
    "annotate": (("rules", "annotate", "tests/cli/test_cli.py"), "a Python file; write tests/cli/test_cli.py:FUNCTION"),
    "no target": (("plan",), "toast: Missing argument 'target'; see "),
    "command": (("plna",), "toast: No such command 'plna'. Did you mean 'plan'? see "),
    "command of a group": (("rules", "lst"), "toast: No such command 'lst'"),
    "empty pattern": (("plan", *T, "--forbid", "=d"), "--forbid '=d': write params*=data"),
    "no text": (("query", "mlp", "\udc80"), "query, column 1: '\\udc80' outside of strings"),
    "fact base": (("verify", FACTS / "mlp.lp", "--mesh", "d=2"), "mlp is a fact base"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str) -> None:
    arguments, message = BAD[case]
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert lines[0].startswith("toast: ")
    assert not result.stdout


def test_a_wrong_setting_of_jax_is_one_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "toast", "models"], capture_output=True, text=True, check=False,
        env={**os.environ, "JAX_ENABLE_X64": "bogus"},
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("toast: JAX cannot be imported: invalid truth value 'bogus'")
    assert result.stderr.count("\n") == 1


def test_nothing_is_written_when_a_stage_fails(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "plan.json"
    assert run("plan", *T, "--memory", "0.0001", "--json", target).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_given_twice_means_both(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "plan.json"
    result = run(
        "plan", "t2b", "--layers", 1, "--mesh", "d=4,m=4", "--json", target,
        "--forbid", "params*=d", "--forbid", "params*=m", "--fix", "tokens:0=d",
        "--fix", "tokens:0=m",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(target.read_text())["arguments"]
    assert found["params['embedding']"]["sharding"] == [[], []]
    assert set(found["tokens"]["sharding"][0]) == {"d", "m"}


def test_without_a_command_there_is_help() -> None:
    for arguments in ((), ("rules",)):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Usage:" in result.output


@pytest.mark.parametrize("command", ["plan", "analyze", "verify", "validate", "models"])
def test_help_names_every_option(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_names_of_the_users_are_shown_as_they_are(tmp_path: pathlib.Path) -> None:
    """Brackets are no markup: not in a device's name, a program's, or a file's."""
    device, program = tmp_path / "mine.toml", tmp_path / "[bold].lp"
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    device.write_text(text.replace('name = "tpu-v5e"', 'name = "[/x]"'))
    shown = run("hardware", "show", device)
    assert shown.exit_code == 0, shown.output
    assert "[/x]: Google Cloud TPU v5e" in shown.stdout
    program.write_text((FACTS / "attention.lp").read_text())
    result = run("analyze", program)
    assert result.exit_code == 0, result.output
    assert "Analysis of [bold]" in result.stdout


def test_hardware_is_listed_and_shown() -> None:
    listed = run("hardware", "list")
    assert listed.exit_code == 0, listed.output
    assert "tpu-v5e" in listed.stdout
    assert "nodes of 8" in listed.stdout
    shown = run("hardware", "show", "tpu-v5e", "--mesh", "data=4,model=4")
    assert shown.exit_code == 0, shown.output
    assert "bidirectional line" in shown.stdout
    assert "shortest paths" in shown.stdout
    inside = run("hardware", "show", "h100")
    assert "in-switch" in inside.stdout


def test_hardware_is_calibrated(tmp_path: pathlib.Path) -> None:
    times, target = tmp_path / "times.csv", tmp_path / "mine.toml"
    rows = [
        f"all_gather,{n},{size},{5e-6 + n * 1e-6 + size * (n - 1) / n / 3e11}"
        for n in (2, 4, 8) for size in (2**10, 2**20, 2**26, 2**28)
    ]  # fmt: skip
    times.write_text("\n".join(["collective,devices,bytes,seconds", *rows]))
    result = run("hardware", "calibrate", "h200", "--collectives", times, "-o", target)
    assert result.exit_code == 0, result.output
    assert "64 MB and more" in result.stdout
    assert "all_gather" in run("hardware", "show", target).stdout
    made = run("plan", "mlp", "--mesh", "data=8", "--hardware", target)
    assert made.exit_code == 0, made.output


def test_plans_are_validated_on_cpu_devices() -> None:
    result = run("validate", "mlp", "--mesh", "data=4", "--oracle", "cpu", "--plans", 1)
    assert result.exit_code == 0, result.output
    assert "plans compute the same results as one device" in result.stdout
    assert "Megatron" in result.stdout


def test_rules_are_listed_with_their_files() -> None:
    result = run("rules", "list")
    assert result.exit_code == 0
    assert re.search(r"dot_general\s+│ .*rules/ops/dot.lp", result.stdout)
    assert "custom_call Sharding" in result.stdout
    assert re.search(r"kernel splash_mha_fwd_residuals\s+│ .*rules/ops/kernels.lp", result.stdout)
    assert re.search(r"kernel te_gemm_v2_ffi\s+│ .*rules/ops/dot.lp", result.stdout)
    assert re.search(r"dot_general .* pass-through reduction\s+│ \d{3}", result.stdout)
    assert re.search(r"infeed .* need-replication", result.stdout)


def test_rules_are_checked(tmp_path: pathlib.Path) -> None:
    good, bad, second = tmp_path / "good.lp", tmp_path / "bad.lp", tmp_path / "second.lp"
    good.write_text("rule(my_op).\nfactor(Op,D,T,D) :- op(Op,my_op), tensor_dim(Op,T,D,_).\n")
    assert run("rules", "check", good).stdout == "1 rule file is sound\n"
    for path, text, message in (
        (bad, "rule(my_op).\nfactor(Op,D,T,D) :- op(Op,my_op).\n", "bad.lp:2: unsafe variables"),
        (bad, "rule(my_op).\nfacter(1).\n", "bad.lp:2: predicate facter/1 is not declared"),
        (second, "rule(my_op).\n", "second.lp:1: duplicate rule for my_op, which"),
    ):
        path.write_text(text)
        result = run("rules", "check", *((good, path) if path == second else (path,)))
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_rules_are_compared_with_shardys_and_written(tmp_path: pathlib.Path) -> None:
    result = run("rules", "diff", "mlp")
    assert result.exit_code == 0, result.output
    assert "0 differ" in result.stdout
    target = tmp_path / "mlp.mlir"
    assert run("rules", "annotate", "mlp", "-o", target).exit_code == 0
    assert "([i, k], [k, j])->([i, j])" in target.read_text()
    shapes = ("--arg", "f32[8,16,32,32]", "--arg", "f32[64,16,3,3]")
    convolution = run("rules", "diff", "tests.cli.test_cli:convolve", *shapes)
    assert convolution.exit_code == 0
    assert "0 differ" in convolution.stdout
    rules = tmp_path / "whole.lp"
    rules.write_text("stays_whole(dot_general).\n")
    differ = run("rules", "diff", "mlp", "--rules", rules)
    assert differ.exit_code == 1
    assert "dot_general at " in differ.stdout


def convolve(x: Any, k: Any) -> Any:
    from jax import lax

    return lax.conv(x, k, (1, 1), "SAME")


def test_the_versions_are_printed() -> None:
    result = run("--version")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(
        r"toast [\d.]+ \(Python [\d.]+, jax [\d.]+, clingo [\d.]+\)\n", result.stdout
    )
    assert f"toast {toast.__version__} " in result.stdout


def test_shells_complete_commands_and_options() -> None:
    assert "--install-completion" in run("--help").stdout
    for words, completions in (("toast pl", ["plan"]), ("toast plan --me", ["--mesh", "--memory"])):
        typed = {"_TOAST_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", "from toast.cli import app; app(prog_name='toast')"],
            env={**os.environ, **typed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.split() == completions
