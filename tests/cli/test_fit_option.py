"""``--fit``, ``--strict``, sizes of functions, and what a plan that does not fit needs."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from typing import Any

import pytest

from tests.cli.test_cli import run
from toast.resources import directory

FACTS = directory("facts")
MODULE = """
import jax, jax.numpy as jnp, toast
from toast.models import Model

def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

def forward(x, w):
    return jnp.tanh(x @ w)

def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()

def whole(w, x):
    return jax.grad(loss)(w, x)

def cut(w, x):
    return toast.accumulate(jax.value_and_grad(loss), batch_argnums=1)(w, x)[1]

def trained(batch=64):
    return Model("trained", cut, (f32(512, 2048), f32(batch, 512)))

def model(batch=64, width=512):
    return Model("mine", forward, (f32(batch, width), f32(width, 2048)))
"""
SHAPES = ["--arg", "f32[batch,512]", "--arg", "f32[512,2048]"]
LIMIT = ["--mesh", "data=4", "--memory", "0.0078125", "--uneven", "0"]


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "fitting_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fitting_module", raising=False)
    return tmp_path


def test_a_dimension_with_a_name_is_found(here: pathlib.Path) -> None:
    found = run(
        "plan", "fitting_module:forward", *SHAPES, "--batch", 1024, "--fit", "batch", *LIMIT,
        "--json", here / "fit.json",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("Largest batch of forward that fits on mesh data=4 of tpu-v5e")
    data = json.loads((here / "fit.json").read_text())
    assert data["value"] >= 2048
    commands = [row["command"] for row in data["rows"]]
    assert commands[0].startswith("toast plan fitting_module:forward --batch ")
    assert f"The first: {commands[0]}" in " ".join(found.stdout.split())
    again = run(*commands[0].replace("'", "").split()[1:])
    assert again.exit_code == 0, again.output


def test_so_is_a_parameter_of_a_function_that_returns_a_model(here: pathlib.Path) -> None:
    found = run("plan", "fitting_module:model", "--fit", "batch", "--mesh", "data=4", "--budget", 0)
    assert found.exit_code == 0, found.output
    assert "Largest batch of mine that fits on mesh data=4" in found.stdout
    assert "The search is not complete, as its budget ran out" in found.stdout
    wide = run("plan", "fitting_module:model", "--set", "width=1024", "--mesh", "data=4")
    assert "f32[64,1024]" in wide.stdout


def test_the_command_of_a_row_has_its_microbatches(here: pathlib.Path) -> None:
    def run_row(*words: object) -> dict[str, Any]:
        found = run("plan", "fitting_module:trained", *words, "--json", here / "out.json")
        assert found.exit_code == 0, found.output
        return json.loads((here / "out.json").read_text())

    # Without --microbatches, the joint decision might cut the batch.
    where = ("--batch", 256, "--mesh", "data=4", "--remat", "none", "--memory", 0.005)
    row = run_row("--fit", "batch", *where)["rows"][-1]
    assert " --mesh data=4 --remat none --microbatches 1 " in row["command"]
    again = run_row(*row["command"].split()[3:])
    assert again["after"]["step_seconds"] == row["step_seconds"]
    assert again["after"]["peak_bytes"] == row["peak_bytes"]


def test_a_plan_that_does_not_fit_lists_what_it_takes(here: pathlib.Path) -> None:
    words = (
        "plan", "t2b-scan", "--layers", 2, "--sequence", 2048, "--batch", 64, "--mesh", "data=4",
        "--hardware", "tpu-v5e", "--budget", 0,
    )  # fmt: skip
    found = run(*words)
    assert found.exit_code == 0
    assert "\nDoes not fit: the plan needs " in found.stdout
    end = found.stdout[found.stdout.index("What it takes to fit") :]
    for change in ("--fit batch", "--fit devices"):  # without time, nothing is planned
        assert change in end
    assert "larger mesh" not in found.stdout
    assert run(*words, "--strict").exit_code == 1


@pytest.mark.parametrize(
    ("function", "remedy", "other"),
    [
        ("whole", "toast.accumulate", "--microbatches 2"),
        ("cut", "--microbatches", "toast.accumulate"),
        ("forward", "--fit devices", "toast.accumulate"),
    ],
)
def test_a_step_that_accumulates_nothing_is_told_how(
    here: pathlib.Path, function: str, remedy: str, other: str
) -> None:
    shapes = ["f32[512,2048]", "f32[8388608,512]"]
    if function == "forward":
        shapes.reverse()
    found = run(
        "plan", f"fitting_module:{function}", *(word for s in shapes for word in ("--arg", s)),
        "--mesh", "data=4", "--hardware", "tpu-v5e", "--budget", 5,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "Does not fit" in found.stdout
    end = found.stdout[found.stdout.index("What it takes to fit") :]
    assert remedy in end
    assert other not in end


def test_the_fastest_remedy_comes_first_and_its_command_gives_its_figures(
    here: pathlib.Path,
) -> None:
    words = ("plan", "fitting_module:trained", "--batch", 2**23, "--hardware", "tpu-v5e")
    found = run(*words, "--mesh", "data=4")
    end = found.stdout[found.stdout.index("What it takes to fit") :]
    cells = [[c.strip() for c in line.split("│")[1:-1]] for line in end.splitlines() if "│" in line]
    planned = [row for row in cells if row[2]]
    assert len(planned) >= 3
    rates = [float(row[3].strip("~").replace(",", "")) for row in planned]
    changes = [row[0] for row in planned]
    assert changes[-1].startswith("--mesh")  # more devices are another question
    assert rates[:-1] == sorted(rates[:-1], reverse=True)
    for row in planned:
        assert row[2].startswith("~") == ("--remat auto" in row[0])
    command = " ".join(end.split()).partition("The first: toast ")[2].split(" The fewest")[0]
    assert changes[0] in command
    again = run(*shlex.split(command))
    assert again.exit_code == 0, again.output
    step, reached = planned[0][2], again.stdout.split(" per step")[0]
    assert reached == step if not step.startswith("~") else again.stdout.count("fits")


def test_the_question_for_devices_is_a_command_that_works(here: pathlib.Path) -> None:
    words = ("plan", "fitting_module:forward", *SHAPES, "--batch", 2**22)
    where = ("--mesh", "data=4", "--hardware", "tpu-v5e", "--budget", 0)
    found = " ".join(run(*words, *where).stdout.split())
    command = found.partition("The fewest devices: toast ")[2].split("Note:")[0]
    assert "--mesh" not in command
    again = run(*shlex.split(command))
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith("Fewest devices that forward fits on: 4 of tpu-v5e")
    pinned = run(*words, *where, "--pin", "x=P('data')")
    assert "--fit batch" in pinned.stdout
    assert "--fit devices" not in pinned.stdout  # other meshes have no such axis


def test_the_memory_limit_may_have_a_unit(here: pathlib.Path) -> None:
    words = ("plan", "fitting_module:model", "--fit", "batch", "--mesh", "data=4", "--budget", 0)
    found = run(*words, "--memory", "600MiB", "--json", here / "fit.json")
    assert found.exit_code == 0, found.output
    data = json.loads((here / "fit.json").read_text())
    assert data["memory_bytes"] == 600 * 2**20
    # The command has the same limit, to the last byte.
    assert shlex.split(data["rows"][0]["command"])[-1] == "0.5859375"
    refused = run(*words, "--memory", "600XB")
    assert refused.exit_code == 2
    assert "'600XB' is no size; write GiB (14), or a size with its unit (600MiB)" in refused.stderr


def test_strict_is_about_the_odds_if_these_are_set(here: pathlib.Path) -> None:
    words = ("plan", "fitting_module:model", "--mesh", "data=4", "--budget", 0, "--strict")
    assert run(*words).exit_code == 0
    assert run(*words, "--safety", 0.9).exit_code == 0
    nothing = run(*words, "--fit", "batch", "--memory", 1e-4)
    assert nothing.exit_code == 1
    assert nothing.stdout.startswith("Nothing fits: no batch of mine fits on")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mlp", "--fit", "sequence", "--mesh", "data=4"],
         "--fit sequence: mlp has no such size; use one of batch, devices"),
        ([FACTS / "mlp.lp", "--fit", "batch", "--mesh", "data=4"],
         "has one size, with which it was lowered; use a model or module:function"),
        (["mlp", "--fit", "devices", "--mesh", "data=4"],
         "--mesh data=4: --fit devices looks for the number of devices; remove it"),
        (["mlp", "--fit", "batch"], "use either --mesh data=4,model=4 or --devices 16"),
        (["mlp", "--fit", "batch", "--mesh", "data=4", "--report", "out.html"],
         "--report out.html: is for one plan, and --fit makes several"),
        (["mlp", "--fit", "batch", "--mesh", "data=4", "--confirm"],
         "--confirm: is for one plan, and --fit makes several; remove it, and plan a row of"),
        (["mlp", "--mesh", "data=4", "--hardware", "h100", "--confirm"],
         "no TPU compiler for h100; use tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e"),
        (["fitting_module:forward", *SHAPES, "--fit", "batch", "--mesh", "data=4"],
         "--arg f32[batch,512]: batch has no value; add --batch 8"),
        (["fitting_module:forward", *SHAPES, "--sequence", 8, "--mesh", "data=4"],
         "--sequence: no --arg has a dimension of that name"),
        (["fitting_module:forward", "--arg", "f32[8,512]", "--arg", "f32[512,2048]", "--fit",
          "batch", "--mesh", "data=4"],
         "has no such size; use one of devices, or name it in a shape, such as --arg f32[batch,4]"),
        (["fitting_module:model", "--set", "depth=3", "--mesh", "data=4"],
         "--set depth: fitting_module:model has no parameter depth"),
    ],
)  # fmt: skip
def test_errors(here: pathlib.Path, words: list[object], message: str) -> None:
    found = run("plan", *words)
    assert found.exit_code == 2
    assert message in found.stderr
    assert found.stderr.count("\n") == 1
