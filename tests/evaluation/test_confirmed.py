"""Plans that XLA's TPU compiler confirms.  The compiler is played here: it needs more than predicted."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.cli.test_cli import run
from toast.errors import HardwareError, PlanError, SearchError
from toast.evaluation import confirmed
from toast.evaluation.oracle import Verdict
from toast.hardware import load


def forward(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w1) @ w2


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


ARGUMENTS = (shape(4096, 512), shape(512, 2048), shape(2048, 512))


def plan(**options: Any) -> toast.Plan:
    return toast.plan(forward, *ARGUMENTS, mesh="data=4", hardware="tpu-v5e", **options)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """Sets what the compiler needs for each plan, in bytes; returns what it has been asked for."""

    def needs(*peaks: float, out_of_memory: bool = False) -> list[float]:
        answers: Iterator[float] = iter(peaks)
        asked: list[float] = []

        def judge(*_: Any, **options: Any) -> Verdict:
            asked.append(options["timeout"])
            return Verdict(0, 0, 0, next(answers), 0, out_of_memory, (), 1.0)

        monkeypatch.setattr(confirmed, "check", lambda hardware: None)
        monkeypatch.setattr(confirmed, "judge", judge)
        return asked

    return needs


def test_a_plan_that_fits_is_confirmed(compiler: Callable[..., list[float]]) -> None:
    asked = compiler(2.0**30)
    found = plan(confirm=True)
    assert len(asked) == 1
    assert found.note.splitlines()[0] == "XLA's TPU compiler needs 1 GiB of 15.8 GiB"
    assert dataclasses.replace(found, note="").shardings.values == plan().shardings.values


def test_a_plan_that_does_not_fit_is_planned_within_less(
    compiler: Callable[..., list[float]],
) -> None:
    limit = 1.5 * plan().after.peak_bytes
    peak = plan(memory_bytes=limit).after.peak_bytes
    compiler(1.1 * limit, 0.9 * limit)
    found = plan(confirm=True, memory_bytes=limit)
    assert found.memory_bytes == limit
    assert found.after.peak_bytes <= peak / 1.1 * 0.99
    assert found.fits
    first = found.note.splitlines()[0]
    assert first.startswith("XLA's TPU compiler needs ")
    assert "; an earlier plan needed " in first
    assert first.endswith(
        f" were predicted, so this one was planned within {peak / 1.1 * 0.99 / 2**20:.3g} MiB"
    )


def test_it_is_an_error_if_no_plan_fits(compiler: Callable[..., list[float]]) -> None:
    asked = compiler(2.0**40, 2.0**40)
    with pytest.raises(SearchError) as error:
        plan(confirm=True)
    assert len(asked) == 1  # no plan is predicted to fit within so much less
    assert str(error.value).startswith(
        "XLA's TPU compiler needs 1024 GiB of 15.8 GiB for the plan, predicted to need "
    )
    compiler(*[15.9 * 2**30] * 4, out_of_memory=True)
    with pytest.raises(SearchError, match="for the best of 4 plans"):
        confirmed.confirmed_plan(lambda _: plan(), load("tpu-v5e"))


def test_the_compiler_may_know_better_than_the_prediction(
    compiler: Callable[..., list[float]],
) -> None:
    small = dataclasses.replace(load("tpu-v5e"), memory_limit_bytes=2.0**20)
    for needed, text in ((2.0**19, "512 KiB of 1 MiB"), (2.0**21, "2 MiB of 1 MiB")):
        asked = compiler(needed)
        found = toast.plan(forward, *ARGUMENTS, mesh="data=4", hardware=small, confirm=True)
        assert not found.fits
        assert len(asked) == 1
        assert found.note.splitlines()[0] == f"XLA's TPU compiler needs {text}"
    with pytest.raises(SearchError, match=r"^memory limit of "):
        plan(confirm=True, memory_bytes=2.0**20)


def test_the_limit_is_at_most_that_of_the_device() -> None:
    with pytest.raises(HardwareError) as error:
        plan(confirm=True, memory_bytes=20 * 2.0**30)
    assert str(error.value) == (
        "memory limit of 20 GiB: tpu-v5e has 15.8 GiB, and the compiler knows no other; leave out "
        "the limit, or set a smaller one"
    )


def test_it_is_a_truth_value() -> None:
    for value in (1, None, "yes"):
        with pytest.raises(PlanError, match=r"^confirm=.*: use True or False$"):
            plan(confirm=value)


def test_a_device_local_program_is_compiled_as_it_is(
    compiler: Callable[..., list[float]],
) -> None:
    compiler(2.0**20)
    found = plan(confirm=True, lowering="local", safety=0.9)
    assert found.note.startswith("XLA's TPU compiler needs 1 MiB of 15.8 GiB")


def test_the_command_plans_within_less(
    compiler: Callable[..., list[float]], tmp_path: pathlib.Path
) -> None:
    words = ["plan", "t2b-scan", "--layers", "2", "--mesh", "data=4", "--remat", "auto"]
    words += ["--budget", "1", "--confirm", "--json", str(tmp_path / "plan.json")]
    compiler(2.0**34, 2.0**33)
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "Note: XLA's TPU compiler needs 8 GiB of 15.8 GiB; an earlier plan" in done.stdout
    assert "of 15.8 GiB: " in done.stdout  # the limit that was asked for
    compiler(*[2.0**34] * 4)
    refused = run(*words)
    assert refused.exit_code == 2
    assert "XLA's TPU compiler needs 16 GiB of 15.8 GiB for the best of " in refused.output


def test_hardware_needs_a_compiler() -> None:
    with pytest.raises(HardwareError) as error:
        toast.plan(forward, *ARGUMENTS, mesh="data=4", hardware="h100", confirm=True)
    assert str(error.value).startswith("no TPU compiler for h100; use tpu-v4, ")


def test_policies_are_confirmed_with_their_shardings(
    compiler: Callable[..., list[float]],
) -> None:
    def loss(w: Any, x: jax.Array) -> jax.Array:
        for one in w:
            x = toast.checkpoint(lambda x, one: jnp.sin(x @ one), name="layer")(x, one)
        return jnp.mean(x)

    weights = [shape(256, 256)] * 2
    compiler(2.0**34, 2.0**20)
    found = toast.plan(
        jax.grad(loss), weights, shape(4096, 256), mesh="data=2", hardware="tpu-v5e",
        remat="auto", confirm=True, settings=toast.Settings(rounds=1),
    )  # fmt: skip
    first, second = found.note.splitlines()[:2]
    assert "; an earlier plan needed 16 GiB where " in first
    assert second.startswith("remat=auto chose ")
    assert found.memory_bytes == 15.75 * 2**30


def test_an_argument_may_have_the_name() -> None:
    def named(x: jax.Array, confirm: jax.Array) -> jax.Array:
        return x + confirm

    found = toast.plan(
        named, shape(8, 8), confirm=shape(8, 8), mesh="data=2", hardware="tpu-v5e"
    )  # fmt: skip
    assert [*found.arguments] == ["x", "confirm"]
