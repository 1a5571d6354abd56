"""The devices of this machine as the reference: a plan is compiled for them, run and timed.

XLA compiles for more GPUs than there are here, too, if one of their kind is; nothing runs then.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from toast.apply import annotate
from toast.apply.device_meshes import jax_mesh, platform_of
from toast.apply.module_functions import aval, flat_jit
from toast.apply.verify import random_arguments
from toast.errors import HardwareError, PlanError
from toast.evaluation.measure import devices_of
from toast.evaluation.oracle.hlo import communication_in
from toast.evaluation.oracle.schedule import Schedule
from toast.evaluation.oracle.tpu import Verdict
from toast.frontend.mlir import ModuleSource
from toast.hardware import Hardware, Mesh
from toast.program import Program, Shardings

#: Timed runs of a plan, after one that is not timed.
_RUNS = 5
#: Elements of the block that large random arguments repeat.
_BLOCK = 2**22
#: What XLA's errors say if memory does not suffice.
_EXHAUSTED = "RESOURCE_EXHAUSTED"


def check_devices(hardware: Hardware, mesh: Mesh) -> list[Any]:
    """The devices of this machine that a mesh of ``hardware`` takes.

    If there are fewer GPUs than that, they are descriptions of as many, for which XLA can compile.

    Raises :class:`toast.errors.HardwareError` for other devices than those of the hardware file,
    and for TPUs; :class:`toast.errors.PlanError` for too few devices that are no GPUs.
    """
    if hardware.platform == "tpu":
        raise HardwareError(f"{hardware.name} is not a GPU; use --oracle tpu, which needs no TPU")
    devices = devices_of(hardware)
    if len(devices) < mesh.devices and hardware.platform == "cuda":
        return _described(hardware, mesh.devices)
    if len(devices) < mesh.devices:
        raise PlanError(
            f"mesh {mesh} needs {mesh.devices} devices, but there are {len(devices)} "
            f"{devices[0].device_kind} here; use a smaller mesh"
        )
    return devices[: mesh.devices]


def _described(hardware: Hardware, count: int) -> list[Any]:
    """Descriptions of GPUs of the kind here, in nodes of ``hardware``."""
    nodes = math.ceil(count / hardware.interconnect.devices_per_node)
    if count % nodes:
        raise PlanError(
            f"{count} devices do not fill {nodes} nodes of {hardware.name} evenly; use a mesh "
            f"whose size is a multiple of {nodes}"
        )
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x{nodes}x{count // nodes}")
    return list(topology.devices)


def judge_here(
    program: Program,
    shardings: Shardings,
    hardware: Hardware,
    *,
    local: Any = None,
    seed: int = 0,
) -> Verdict:
    """Compile ``program`` with ``shardings`` for the devices here, and time its runs.

    The schedule of the verdict has the median time of a step; its other times are unknown (NaN).
    There is none if there are fewer GPUs here than the mesh takes: XLA compiles, and nothing runs.
    ``local`` is the MLIR module of the device-local program, as for
    :func:`toast.evaluation.oracle.judge`; ``seed`` is that of the random arguments.  Raises
    :class:`toast.errors.PlanError` for a fact base and if XLA fails, and the errors of
    :func:`check_devices`.
    """
    if not isinstance(program.source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to compile")
    devices = check_devices(hardware, shardings.mesh)
    start = time.perf_counter()
    try:
        mesh = jax_mesh(shardings, devices)
        module = annotate(program, shardings) if local is None else local
        function = flat_jit(program, module, mesh, shardings)
        arguments = [aval(program.values[v].type) for v in program.argument_values]
        lowered = function.trace(*arguments).lower(lowering_platforms=(platform_of(mesh),))
        compiled = lowered.compile()
        memory, taken = compiled.memory_analysis(), time.perf_counter() - start
        used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        schedule = None
        if set(devices) <= set(devices_of(hardware)):
            try:
                seconds = _step_seconds(
                    compiled, random_arguments(program, seed, block=_BLOCK), program.donated
                )
            except jax.errors.JaxRuntimeError as error:
                if _EXHAUSTED not in str(error):
                    raise
                return Verdict(0.0, 0.0, 0.0, float(used), float(used), True, (), taken)
            schedule = Schedule(seconds, float("nan"), float("nan"))
    except jax.errors.JaxRuntimeError as error:
        raise PlanError(f"XLA failed: {' '.join(str(error).split())[:300]}") from None
    return Verdict(
        float(memory.argument_size_in_bytes), float(memory.output_size_in_bytes),
        float(memory.alias_size_in_bytes), float(memory.temp_size_in_bytes),
        float(used), False, communication_in(compiled.as_text()), taken,
        schedule,
    )  # fmt: skip


def _step_seconds(compiled: Any, arguments: Sequence[Any], donated: Collection[int]) -> float:
    """The median time of a step; donated arguments are placed each time, as runs overwrite them."""
    shardings = compiled.input_shardings[0]

    def placed(index: int) -> Any:
        return jax.device_put(arguments[index], shardings[index])

    kept = {index: placed(index) for index in range(len(arguments)) if index not in donated}
    times = []
    for _ in range(_RUNS + 1):
        operands = [kept[i] if i in kept else placed(i) for i in range(len(arguments))]
        jax.block_until_ready(operands)
        start = time.perf_counter()
        results = jax.block_until_ready(compiled(*operands))
        times.append(time.perf_counter() - start)
        del operands, results
    return statistics.median(times[1:])
