"""Plans on several hosts: processes with CPU devices, which ``jax.distributed`` connects."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toast
from tests.helpers import f32, mlp
from toast.apply.hosts import check_hosts, plan_digest
from toast.errors import PlanError
from toast.resources import directory

ROOT = directory("rules").parent
EXAMPLE = ROOT / "examples" / "multihost.py"
DEVICES = 8

#: Every host passes whole numpy arrays to the step, and plans on its own.
SEARCHING = """
import sys
import jax, jax.numpy as jnp, numpy as np
import toast
hosts, host, address, width = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.distributed.initialize(address, hosts, host)
def step(w, x):
    return jax.tree.map(lambda w: w - 0.1 * (x.T @ jnp.tanh(x @ w)), w), x.sum()
function = toast.jit(step, mesh=f"data={8 // int(width)},model={width}", hardware="tpu-v5e", donate_argnums=0)
w = {"a": np.full((64, 64), 0.1, np.float32)}
for _ in range(2):
    w, total = function(w, np.ones((256, 64), np.float32))
print("total", float(total), w["a"].sharding.mesh.size)
"""


def started(arguments: Sequence[object], hosts: int) -> subprocess.Popen[str]:
    flags = f"--xla_force_host_platform_device_count={DEVICES // hosts}"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
        "TOAST_CACHE": "off",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tempfile.gettempdir(),
    )  # fmt: skip


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of each; none is left."""
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, out, error)
        for process, (out, error) in zip(processes, texts, strict=True)
    ]


def on_hosts(plans: Sequence[pathlib.Path], save: pathlib.Path) -> list[tuple[int, str, str]]:
    """The example with one host for each plan file."""
    count, address = len(plans), free_address()
    return ended([
        started((
            EXAMPLE, "--plan", plan, "--save", save, "--hosts", count, "--host", host,
            "--address", address,
        ), count)
        for host, plan in enumerate(plans)
    ])  # fmt: skip


@functools.cache
def plan_file() -> pathlib.Path:
    path = pathlib.Path(tempfile.mkdtemp()) / "step.json"
    ((code, _, error),) = ended([started((EXAMPLE, "--plan", path, "--make"), 1)])
    assert code == 0, error
    return path


@functools.cache
def on_one_host() -> dict[str, np.ndarray]:
    save = plan_file().with_name("one.npz")
    ((code, out, error),) = on_hosts([plan_file()], save)
    assert code == 0, error
    assert "1 hosts, 8 devices: loss" in out
    return dict(np.load(save))


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_train_as_one_process(hosts: int, tmp_path: pathlib.Path) -> None:
    save = tmp_path / "several.npz"
    for code, _, error in on_hosts([plan_file()] * hosts, save):
        assert code == 0, error
    whole = on_one_host()
    assert {*whole} == {"losses", "w1", "w2"}
    assert len(whole["losses"]) == 5
    for name, several in np.load(save).items():
        np.testing.assert_allclose(several, whole[name], rtol=1e-6, atol=1e-6)


def test_hosts_with_different_plans_are_told(tmp_path: pathlib.Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(plan_file().read_text().replace('"data"', '"rows"'))
    results = on_hosts([plan_file(), other], tmp_path / "none.npz")
    for host, (code, _, error) in enumerate(results):
        assert code != 0
        assert "train: the hosts have different plans: " in error
        assert " on host 0; " in error
        assert f"this is host {host}; load the same plan file" in error
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize("widths", [("2", "2"), ("2", "4")])
def test_hosts_that_search_find_the_same_plan(widths: tuple[str, str]) -> None:
    address = free_address()
    results = ended([
        started(("-c", SEARCHING, 2, host, address, width), 2) for host, width in enumerate(widths)
    ])  # fmt: skip
    for code, out, error in results:
        if len({*widths}) == 1:
            assert code == 0, error
            assert f"total {256 * 64.0} 8" in out
        else:
            assert code != 0
            assert "the hosts have different plans" in error


def test_a_digest_is_that_of_program_and_shardings() -> None:
    def plan(pin: str, add: bool = False) -> toast.Plan:
        return toast.plan(
            lambda *a: mlp(*a) + mlp(*a) if add else mlp(*a), f32(512, 64), f32(64, 256), f32(256, 64),
            mesh="data=4,model=2", hardware="tpu-v5e",
            constraints=toast.Constraints(pin={"a[0]": jax.P(pin)}), settings=toast.Settings(rounds=0),
        )  # fmt: skip

    digests = [
        plan("data").digest,
        plan("data").digest,
        plan("model").digest,
        plan("data", True).digest,
    ]
    assert digests[0] == digests[1]
    assert len({*digests}) == 3


def test_one_host_exchanges_nothing() -> None:
    plan = toast.plan(mlp, f32(512, 64), f32(64, 256), f32(256, 64), mesh="data=8", hardware="h100")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    check_hosts(plan.analysis.program, mesh, plan.shardings)
    assert plan_digest(plan.analysis.program, plan.shardings) == plan.digest
    with pytest.raises(PlanError, match="needs 8 devices"):
        dataclasses.replace(plan).jit(jax.devices()[:1])
    assert jnp.isfinite(plan.jit()(*(jnp.ones(s) for s in ((512, 64), (64, 256), (256, 64))))).all()
