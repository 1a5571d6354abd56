"""Shardy's own local programs: the reference for those of TOAST.

jaxlib 0.12 has passes that turn a program with shardings of all its values into the program of one
device.  This module runs them, and the result on CPU devices as replicas, in a process of its own:
the passes crash where they do not know an op.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toast.apply import annotate
from toast.frontend import mlir
from toast.hardware import Mesh
from toast.lower.device_groups import tiles
from toast.program import Program, Shardings, Spec, element_bytes

#: The passes, for a number of devices.
PASSES = (
    "func.func(sdy-sharding-constraint-to-reshard)",
    "sdy-resolve-permutation-factors{{replica-count={devices} partition-count=1}}",
    "func.func(sdy-insert-explicit-reshards{{enable-full-version=true}},sdy-reshard-to-collectives)",
    "sdy-pad-for-divisibility",
    "canonicalize,cse",
    "sdy-convert-global-to-local{{replica-count={devices} partition-count=1}}",
    "sdy-drop-sharding-and-mesh",
)  # fmt: skip

#: Kinds of collectives.
KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


@dataclasses.dataclass(frozen=True)
class Job:
    """A module with shardings as text, and for each device its shards of the arguments."""

    text: str
    devices: int
    #: ``[arguments][devices]``
    shards: list[list[Any]]


#: A collective: its kind, its devices, and its bytes as :data:`toast.hardware.COLLECTIVES` counts
#: them.
Collective = tuple[str, int, float]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A local program that has run."""

    #: How often each collective occurs in a step.
    counts: collections.Counter[Collective]
    #: ``[results][devices]``
    shards: list[list[Any]]


def sent(counts: Mapping[Collective, int]) -> float:
    """The bytes that a device sends in a step, on rings."""
    total = 0.0
    for (kind, devices, size), times in counts.items():
        share = 1.0 if kind == "collective_permute" else (devices - 1) / devices
        total += times * size * share * (2 if kind == "all_reduce" else 1)
    return total


def job(program: Program, shardings: Shardings, arguments: Sequence[Any]) -> Job:
    """A request: the annotated program of a plan, and the arguments."""
    specs = [shardings.of(program, value) for value in program.argument_values]
    shards = [
        [np.asarray(array)[place] for place in places(shardings.mesh, np.shape(array), spec)]
        for array, spec in zip(arguments, specs, strict=True)
    ]
    return Job(str(annotate(program, shardings)), shardings.mesh.devices, shards)


def places(mesh: Mesh, shape: Sequence[int], spec: Spec) -> list[tuple[slice, ...]]:
    """The part of an array that each device has."""
    sizes = dict(mesh.axes)
    rows = []
    for size, axes in zip(shape, spec, strict=True):
        part = size // math.prod(sizes[axis] for axis in axes)
        rows.append([slice(n * part, n * part + part) for n in tiles(mesh, axes).tolist()])
    return [tuple(row[device] for row in rows) for device in range(mesh.devices)]


def assembled(mesh: Mesh, type_: Any, spec: Spec, shards: Sequence[Any]) -> Any:
    """A result from its shards; devices with the same part must agree on it."""
    whole: Any = np.full(type_.shape, np.nan, dtype=shards[0].dtype)
    for place, shard in zip(places(mesh, type_.shape, spec), shards, strict=True):
        known = whole[place]
        assert np.isnan(known).all() or np.allclose(known, shard, rtol=1e-5, atol=1e-5)
        whole[place] = shard
    return whole


def run(jobs: Sequence[Job]) -> list[Answer | str]:
    """The answers to jobs, or the errors of the passes or of XLA, from another process."""
    top = pathlib.Path(__file__).parents[2]
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main()"], cwd=top, env=environment,
        input=pickle.dumps(list(jobs)), capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    answers: list[Answer | str] = pickle.loads(ran.stdout)
    return answers


def lowered(job: Job) -> Any:
    """The module of one device."""
    module = mlir.parse(job.text, "the reference")
    for passes in PASSES:
        mlir.run_passes(module, f"builtin.module({passes.format(devices=job.devices)})")
    return module


def counted(module: Any, devices: int) -> collections.Counter[Collective]:
    """How often each collective runs in a step of a local program."""
    counts: collections.Counter[Collective] = collections.Counter()
    read = mlir.TypeReader()
    sizes = {name: int(size) for name, size in re.findall(r'"(\w+)"=(\d+)', str(module))}

    def group(operation: Any) -> int:
        """The number of devices that communicate."""
        if "replica_groups" not in operation.attributes:
            return devices
        axes = re.findall(
            r'name = "(\w+)"(?:, sub_axis_info = \(\d+\)(\d+))?',
            str(operation.attributes["replica_groups"]),
        )
        assert axes, operation
        return math.prod(int(part) if part else sizes[axis] for axis, part in axes)

    def visit(operation: Any, times: int) -> None:
        kind = operation.name.removeprefix("stablehlo.")
        if kind in KINDS:
            moved = (operation.operands if kind == "reduce_scatter" else operation.results)[0]
            type_ = read(moved.type)
            size = float(math.prod(type_.shape) * element_bytes(type_.dtype))
            counts[kind, group(operation), size] += times
        if kind == "while":
            times *= mlir.trip_count(operation) or 1
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    visit(inner.operation, times)

    visit(module.operation, 1)
    return counts


def execute(module: Any, job: Job) -> list[list[Any]]:
    """Runs a local program on CPU devices, as replicas: ``[results][devices]``."""
    import jax
    from jaxlib import xla_client

    devices = jax.devices()[: job.devices]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = job.devices, 1
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.arange(job.devices).reshape(job.devices, 1)
    )
    text = re.sub(r"mhlo.num_replicas = \d+", f"mhlo.num_replicas = {job.devices}", str(module))
    loaded = devices[0].client.compile_and_load(
        text.encode(), xla_client.DeviceList(tuple(devices)), options
    )
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))

    def whole(shards: list[Any]) -> Any:
        """An array with these shards, one after the other."""
        placed = [
            jax.device_put(shard, device) for shard, device in zip(shards, devices, strict=True)
        ]
        spec, shape = jax.sharding.PartitionSpec(), placed[0].shape
        if shape:
            spec, shape = jax.sharding.PartitionSpec("d"), (len(placed) * shape[0], *shape[1:])
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)

    arguments = [whole(shards) for shards in job.shards]
    results = loaded.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return [[np.asarray(shard) for shard in shards] for shards in results]


def main() -> None:
    """Answers the jobs on standard input."""
    answers: list[Answer | str] = []
    for job in pickle.load(sys.stdin.buffer):
        try:
            module = lowered(job)
            answers.append(Answer(counted(module, job.devices), execute(module, job)))
        except Exception as error:  # of MLIR or XLA
            answers.append(f"{type(error).__name__}: {error}"[:500])
    sys.stdout.buffer.write(pickle.dumps(answers))
