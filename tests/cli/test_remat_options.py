"""``--remat`` and ``--microbatches``: plans, their files, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

import toast
from toast.cli import app
from toast.cli.common import Source
from toast.cli.plan_file_commands import load_plan_and_source, policy_plans

MODEL = ["t2b-scan", "--layers", "2", "--sequence", "128", "--mesh", "data=4"]
SHORT = ["--budget", "0"]


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def test_files_record_both(tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "plan.json")
    code, printed, _ = invoke(
        "plan", *MODEL, *SHORT, "--remat", "full", "--microbatches", "2", "--json", file
    )
    assert code in (0, 1)
    assert "the batch is cut into 2 microbatches" in printed
    assert "remat full, 4 runs of scan; recomputed: " in printed
    data = json.loads(pathlib.Path(file).read_text())
    assert (data["origin"]["remat"], data["origin"]["microbatches"]) == ("full", 2)
    assert data["remat"]["preset"] == "full"
    assert data["remat"]["policy"]["scan"]["offload"] == []
    assert data["remat"]["microbatches"] == 2

    code, printed, errors = invoke("explain", file, "--argument", "tokens")
    assert (code, errors) == (0, "")
    code, printed, errors = invoke("apply", file, *MODEL[:-2])
    assert code == 0
    assert "another program" not in errors


def test_another_policy_is_an_alternative(tmp_path: pathlib.Path) -> None:
    file, other, answer = (str(tmp_path / name) for name in ("plan.json", "other.json", "a.json"))
    invoke("plan", *MODEL, *SHORT, "--remat", "none", "--json", file)
    code, printed, _ = invoke(
        "explain", file, "--why-not", "remat=full", *SHORT, "-o", other, "--json", answer
    )
    assert code == 0
    assert "remat = full instead of none" in printed
    assert "Better than the plan" not in printed
    (explained,) = json.loads(pathlib.Path(answer).read_text())["explained"]
    numbers = {row["what"]: row for row in explained["searched"]["numbers"]}
    assert numbers["step time"]["second"] > numbers["step time"]["first"]
    alternative = json.loads(pathlib.Path(other).read_text())
    assert alternative["origin"]["remat"] == "full"
    # The costs compare: both are relative to the unsharded step of the plan.
    plan_cost = json.loads(pathlib.Path(file).read_text())["cost"]
    assert f"cost {explained['searched']['cost']:.4g} (plan: {plan_cost:.4g})" in printed
    steps = numbers["step time"]["second"] / numbers["step time"]["first"]
    assert explained["searched"]["cost"] / plan_cost == pytest.approx(steps)
    assert explained["searched"]["cost"] > plan_cost * 1.001
    # The way back is better.
    code, printed, _ = invoke("explain", other, "--why-not", "remat=none", *SHORT)
    assert "Better than the plan" in printed
    code, printed, _ = invoke("explain", file, "--why-not", "microbatches=2", *SHORT)
    assert "microbatches = 2 instead of 1" in printed
    code, printed, _ = invoke("explain", file, "--why-not", "remat=auto", *SHORT)
    assert code == 0
    assert "remat = auto instead of none" in printed
    for words, message in (
        ("microbatches=many", "--why-not 'microbatches=many': write a number, such as 4"),
        ("remat=half", "remat 'half': neither a policy nor a preset"),
        ("microbatches=7", "7"),
        (
            "gathered=quary",
            "gathered=quary: no argument of a block is named quary; those of scan (",
        ),
        ("gather=x", "--why-not 'gather=x': write params['wq']=P('model', None), or remat=, micro"),
    ):
        code, _, errors = invoke("explain", file, "--why-not", words, *SHORT)
        assert code == 2
        assert message in errors


STEP = """
import jax, jax.numpy as jnp, toast

@toast.checkpoint
def layer(x, up, down):
    hidden = x @ up
    gate = jnp.sin(hidden)
    return x + gate @ down

def step(x, up, down):
    def loss(up):
        y = layer(layer(layer(x, up, down), up, down), up, down)
        return y.sum()

    return jax.grad(loss)(up)

def forward(x, up, down):
    return layer(x, up, down)

saved = jax.checkpoint_policies.save_only_these_names("gate")
kept = jax.checkpoint(lambda x, up: x * (x @ up).sum(), policy=saved)

def own_policy(x, up, down):
    return jax.grad(lambda up: kept(x, up).sum())(up)

@jax.custom_vjp
def logged(x):
    return jnp.sin(x)

def logged_forward(x):
    jax.experimental.io_callback(lambda _: None, None, x)
    return jnp.sin(x), x

logged.defvjp(logged_forward, lambda x, g: (g * jnp.cos(x),))

def custom(x, up, down):
    block = toast.checkpoint(lambda x, up: logged(x @ up), name="block")
    return jax.grad(lambda up: block(x, up).sum())(up)
"""
#: The same for a small function.
SMALL = [
    "small_remat_step:step", "--arg", "f32[512,64]", "--arg", "f32[64,128]", "--arg",
    "f32[128,64]",
]  # fmt: skip


@pytest.fixture
def small_plan(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Plans ``SMALL``; the result is the file of the plan."""
    (tmp_path / "small_remat_step.py").write_text(STEP)
    monkeypatch.syspath_prepend(str(tmp_path))

    def planned(*options: str) -> str:
        file = str(tmp_path / "plan.json")
        code, _, errors = invoke("plan", *SMALL, "--mesh", "data=4", *options, "--json", file)
        assert code == 0, errors
        return file

    return planned


def test_another_choice_for_some_values_is_an_alternative(
    small_plan: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    file, other = small_plan("--remat", "layer: keep=hidden"), str(tmp_path / "other.json")
    code, printed, _ = invoke(
        "explain", file, *SMALL[:1], "--why-not", "offload=hidden", "-o", other
    )
    assert code == 0
    assert "offload = hidden instead of keep = hidden" in printed
    (changed,), (before,) = (
        json.loads(pathlib.Path(each).read_text())["remat"]["policy"].values()
        for each in (other, file)
    )
    assert (before["keep"][-1], before["offload"]) == ("hidden", [])
    assert changed["offload"] == ["hidden"]
    assert changed["recompute"] == before["recompute"]
    code, printed, _ = invoke("explain", other, *SMALL[:1], "--why-not", "keep=@product")
    assert "keep = @product instead of offload = @product" in printed
    for words, message in (
        ("keep=quary", "keep=quary: no residual is named quary; those of layer ("),
        ("keep=hidden", "keep=hidden: the plan has hidden kept already"),
        ("recompute=x", "recompute=x: x is an argument of its block, which exists anyway"),
    ):
        code, _, errors = invoke("explain", file, *SMALL[:1], "--why-not", words)
        assert (code, errors.count("\n")) == (2, 1)
        assert errors.startswith(f"toast: {message}")


def test_policies_beyond_the_users_limit_are_priced(
    small_plan: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    page, batch = tmp_path / "report.html", ("--fix", "x:0=data")
    peak = json.loads(pathlib.Path(small_plan("--remat", "full", *batch)).read_text())["after"]
    limit = str(1.001 * peak["peak_bytes"] / 2**30)
    file = small_plan("--remat", "full", *batch, "--memory", limit, "--report", str(page))
    assert "everything kept" in page.read_text()
    assert "full recomputation" not in page.read_text()  # that is the plan
    words = ["--why-not", "remat=none", "--budget", "0"]
    code, printed, _ = invoke("explain", file, *SMALL[:1], *words)
    assert code == 0
    assert "remat = none instead of full" in printed
    assert "not fit" in printed


def test_other_policies_are_drawn_for_the_very_shardings(small_plan: Callable[..., str]) -> None:
    """Those of a baseline or of a hand have no actions."""
    file = small_plan("--remat", "full", "--pin", "x=P('data',None)", "--pin", "up=P(None,'data')")
    applied, source = load_plan_and_source(Source(file, {}, (), (), cache=False), SMALL[0])
    plan = dataclasses.replace(applied.plan, actions=(), steps=())
    (kept,) = policy_plans(source, plan, lambda _: None)
    assert kept.policy is not None
    assert kept.policy.preset == "none"
    assert kept.arguments == plan.arguments
    assert kept.shardings.results == plan.shardings.results
    assert kept.after.step_seconds < plan.after.step_seconds
    assert [c.count for c in kept.after.collectives] == [c.count for c in plan.after.collectives]


def test_choices_need_a_policy_and_a_link_to_the_host(
    small_plan: Callable[..., str], tmp_path: pathlib.Path
) -> None:
    asked = ["explain", small_plan(), *SMALL[:1], "--why-not", "offload=gate"]
    assert invoke(*asked) == (
        2,
        "",
        "toast: --why-not offload=gate: the plan has no memory policy, which this would change; "
        "use --why-not 'remat=*: keep=* offload=gate', or make the plan with --remat\n",
    )
    whole, bare = pathlib.Path("hardware/tpu-v5e.toml").read_text(), tmp_path / "bare.toml"
    bare.write_text(re.sub(r"\[host\].*\n.*\n|(?m:^host = .*\n)", "", whole))
    small_plan("--remat", "full", "--hardware", str(bare))
    code, _, errors = invoke(*asked)
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("toast: --why-not offload=gate: the file of ")
    assert "no [host] with the speed of the link to the memory of the host" in errors


def test_plans_without_them_record_neither(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "plan.json"
    invoke("plan", *MODEL, *SHORT, "--json", str(file))
    data = json.loads(file.read_text())
    assert "remat" not in data
    assert not {"remat", "microbatches"} & {*data["origin"]}


def test_auto_tries_several_policies(tmp_path: pathlib.Path) -> None:
    file = str(tmp_path / "plan.json")
    code, printed, _ = invoke("plan", *MODEL, *SHORT, "--remat", "auto", "--json", file)
    assert code in (0, 1)
    assert "remat=auto chose the first of" in printed
    assert invoke("explain", file, "--why-not", "remat=auto") == (
        2,
        "",
        "toast: --why-not remat=auto: the plan has the policy that remat=auto chose; name another "
        "one, such as remat=minimal\n",
    )


@pytest.mark.parametrize("model", ["t2b-scan", "t2b"])
def test_the_input_of_a_layer_is_offloaded_by_name(model: str) -> None:
    """In a scan, it is what the loop carries; in repeated layers, what one passes to the next."""
    program = toast.analyze(
        toast.models.build(model, small=True, layers=2), remat="*: offload=layer_input"
    ).program
    assert program.memory is not None
    assert program.memory.policy is not None
    (block,), (decision,) = program.memory.blocks, program.memory.policy.blocks
    (moved,) = (residual for residual in block.residuals if residual.name in decision.offload)
    assert moved.kind == "input"
    assert len(moved.types[0].split(",")) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["plan", "mlp", "--mesh", "data=4", "--remat", "full"],
            "toast: mlp: remat full: nothing is differentiated in it, so that there is nothing to "
            "recompute; leave out remat, or plan the train step\n",
        ),
        (
            ["plan", *MODEL, "--microbatches", "3"],
            "toast: microbatches 3: does not divide the batch of 16 rows (argument 1); use 1, 2, "
            "4, 8, 16\n",
        ),
        (
            ["plan", *MODEL, "--microbatches", "0"],
            "toast: microbatches 0: use a whole number from 1\n",
        ),
        (
            ["plan", *MODEL, "--remat", "scan: keep=quary"],
            "toast: remat scan: keep=quary: no residual is named quary; those of scan (",
        ),
        (
            ["plan", *MODEL, "--remat", "most"],
            "toast: remat 'most': neither a policy nor a preset; use auto, none, named, full, ",
        ),
        (
            ["analyze", "t2b-scan", "--remat", "auto"],
            "toast: remat auto: is for toast.plan, which chooses one; use a preset (",
        ),
        (
            ["analyze", "facts/attention.lp", "--remat", "full"],
            "toast: --remat full: facts/attention.lp is not traced again, which this needs; use a "
            "model or module:function\n",
        ),
        (
            ["analyze", "facts/attention.lp", "--microbatches", "2"],
            "toast: --microbatches 2: facts/attention.lp is not traced again, which this needs; "
            "use a model or module:function\n",
        ),
    ],
)  # fmt: skip
def test_errors(words: list[str], message: str) -> None:
    code, _, errors = invoke(*words)
    assert code == 2
    assert errors.startswith(message)
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "remat", "message"),
    [
        ("forward", "auto", "forward: remat auto: nothing is differentiated in it, so that there"),
        (
            "own_policy", "full",
            "own_policy: remat full: there is no scan and no repeated layer that may be recomputed; "
            "what stays as it is: <lambda> at small_remat_step.py:21 has a jax.checkpoint of its "
            "own with policy save_only_these_names; use toast.checkpoint(layer) around other "
            "layers, or in place of jax.checkpoint\n",
        ),
        (
            "custom", "full",
            "custom: remat full: there is no scan and no repeated layer that may be recomputed; what "
            "stays as it is: block has side effects in the custom gradient of logged at "
            "small_remat_step.py:37 ",
        ),
        ("step", "layer: offload=gate,hidden", "remat layer: offload=hidden,gate: the file of "),
        ("step", "minimal_offloaded", "remat minimal_offloaded: the file of "),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_of_one_line(
    small_plan: Callable[..., str], tmp_path: pathlib.Path, function: str, remat: str, message: str
) -> None:
    whole, bare = pathlib.Path("hardware/tpu-v5e.toml").read_text(), tmp_path / "bare.toml"
    bare.write_text(re.sub(r"\[host\].*\n.*\n|(?m:^host = .*\n)", "", whole))
    target, output = f"small_remat_step:{function}", str(tmp_path / "none.json")
    words = ["--mesh", "data=4", "--hardware", str(bare), "--remat", remat, "--json", output]
    code, printed, errors = invoke("plan", target, *SMALL[1:], *words)
    assert (code, printed, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"toast: {message}")
    assert not pathlib.Path(output).exists()


@pytest.mark.parametrize(
    ("function", "stays"),
    [
        ("own_policy", "a jax.checkpoint of its own with policy save_only_these_names"),
        ("custom", "block has side effects in the custom gradient of logged at "),
    ],
)
def test_what_auto_leaves_alone_is_said(
    small_plan: Callable[..., str], function: str, stays: str
) -> None:
    words = ["--mesh", "data=4", "--hardware", "tpu-v5e", "--remat", "auto"]
    code, printed, errors = invoke("plan", f"small_remat_step:{function}", *SMALL[1:], *words)
    assert (code, errors) == (0, "")
    folded = " ".join(printed.split())
    assert "Note: left as it is: " in folded
    assert stays in folded
    assert "Note: remat=auto chose none " in folded  # not: the first of 1 policies
