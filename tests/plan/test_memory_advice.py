"""Advice for programs that cannot be traced again: what to recompute and to offload."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import toast
from tests.helpers import f32
from toast.cli import app
from toast.hardware import load
from toast.plan import MemoryAdvice, Plan, memory_advice
from toast.report import summaries
from toast.search import Polishing

LAYERS, ROWS, WIDTH = 4, 2**21, 64


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = x @ up
    wave = jnp.sin(hidden)
    return x + wave @ down


def scanned(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, *w), None), x, weights)[0] ** 2)

    return jax.grad(loss)((up, down))


def unrolled(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
    def loss(up: Any, down: Any) -> Any:
        y = x
        for number in range(LAYERS):
            y = layer(y, up[number], down[number])
        return jnp.mean(y**2)

    return jax.grad(loss, argnums=(0, 1))(up, down)


def lowered(step: Any) -> str:
    shapes = f32(LAYERS, WIDTH, 8 * WIDTH), f32(LAYERS, 8 * WIDTH, WIDTH), f32(ROWS, WIDTH)
    return str(jax.jit(step).lower(*shapes).as_text(debug_info=True))


@functools.cache
def planned(step: Any, folder: pathlib.Path) -> Plan:
    path = folder / f"{step.__name__}.mlir"
    path.write_text(lowered(step))
    return toast.plan(
        path, mesh="data=4", hardware="tpu-v5e", settings=toast.Settings(rounds=1),
        stages=(Polishing(),),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("programs")


def advice(plan: Plan, share: float, **machine: Any) -> MemoryAdvice:
    hardware = dataclasses.replace(plan.hardware, **machine)
    limited = dataclasses.replace(
        plan, memory_bytes=share * plan.after.peak_bytes, hardware=hardware
    )
    found = memory_advice(limited)
    assert found is not None
    return found


@pytest.mark.parametrize("step", [scanned, unrolled])
def test_alike_layers_have_one_decision(step: Any, folder: pathlib.Path) -> None:
    plan = planned(step, folder)
    assert memory_advice(plan) is None  # it fits
    found = advice(plan, 0.6, host_bytes_per_s=float("inf"))
    assert found.fits
    assert found.peak_bytes <= 0.6 * plan.after.peak_bytes
    assert found.freed_bytes == pytest.approx(plan.after.peak_bytes - found.peak_bytes)
    # The loop has stacks of sines and cosines; else XLA computes both from the product.
    kind, later = ("sine", 2) if step is scanned else ("dot_general", 1)
    (hidden,) = (v for v in found.values if v.value == f"{kind} f32[{ROWS},{8 * WIDTH}]")
    assert hidden.count == LAYERS
    # The buffer of a device, for all layers; only products read sines, so that they are rounded.
    size = 2 if step is scanned else 4
    assert hidden.bytes == pytest.approx(LAYERS * ROWS * 8 * WIDTH * size / 4)
    line = layer.__code__.co_firstlineno + later
    assert hidden.place.endswith(f"tests/plan/test_memory_advice.py:{line}")
    assert {v.choice for v in found.values} == {"keep", "recompute"}
    assert found.freed_bytes == pytest.approx(sum(v.bytes for v in found.of("recompute")))


def test_less_memory_recomputes_more(folder: pathlib.Path) -> None:
    plan = planned(unrolled, folder)
    every = [advice(plan, share, host_bytes_per_s=float("inf")) for share in (0.9, 0.5, 0.01)]
    assert [a.fits for a in every] == [True, True, False]
    freed = [a.freed_bytes for a in every]
    assert freed == sorted(freed)
    seconds = [a.seconds for a in every]
    assert seconds == sorted(seconds)
    assert "still does not fit" in every[-1].text


def test_a_fast_link_offloads(folder: pathlib.Path) -> None:
    found = advice(planned(scanned, folder), 0.5, host_bytes_per_s=1e15)
    assert found.of("offload")
    assert found.seconds == pytest.approx(0.0, abs=1e-9)
    # Outside of loops, XLA moves values to the host just before it moves them back.
    assert not advice(planned(unrolled, folder), 0.5, host_bytes_per_s=1e15).of("offload")


def test_the_command_prints_the_advice(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    plan = planned(scanned, folder)
    machine = tmp_path / "small.toml"
    whole = pathlib.Path("hardware/tpu-v5e.toml").read_text()
    limit = int(0.7 * plan.after.peak_bytes)
    text, count = re.subn(r"(?m)^limit_bytes = .*$", f"limit_bytes = {limit}", whole)
    assert count == 1
    machine.write_text(text)
    words = [str(folder / "scanned.mlir"), "--mesh", "data=4", "--hardware", str(machine)]
    result = CliRunner().invoke(app, ["plan", *words, "--budget", "0"])
    assert result.exit_code == 0, result.stderr
    assert "Recomputation and offload that would help" in result.stdout
    assert re.search(r"recompute\W+\w+ f32\[", result.stdout)


def test_a_file_without_debug_information_says_what_is_missing(tmp_path: pathlib.Path) -> None:
    gradient = jax.jit(jax.grad(lambda x, *w: layer(x, *w).sum()))
    lowered = gradient.lower(f32(64, 64), f32(64, 64), f32(64, 64))
    (tmp_path / "plain.mlir").write_text(lowered.as_text())
    small = dataclasses.replace(load("tpu-v5e"), memory_limit_bytes=2**10)
    plan = toast.plan(
        tmp_path / "plain.mlir", mesh="data=4", hardware=small, settings=toast.Settings(rounds=1)
    )
    assert not plan.fits
    (missing, _) = summaries.advice(plan)
    assert "as_text(debug_info=True)" in str(missing)


def test_programs_without_a_backward_pass_get_none() -> None:
    small = dataclasses.replace(load("tpu-v5e"), memory_limit_bytes=2**10)
    forward = jax.jit(layer).lower(f32(64, 64), f32(64, 64), f32(64, 64))
    plan = toast.plan(forward, mesh="data=4", hardware=small, settings=toast.Settings(rounds=1))
    assert not plan.fits
    assert memory_advice(plan) is None
