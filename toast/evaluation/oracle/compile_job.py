"""Compiles one annotated or device-local program for a TPU topology, in a separate process.

    python -m toast.evaluation.oracle.compile_job JOB

If the compiler hangs or dies, only this process is affected.  The parent ends the process as soon
as the required files exist.  JOB is a folder with ``job.pickle``; ``result.json`` and the program,
``scheduled.txt``, are written there when the compiler returns.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import sys


def main() -> None:
    """Read the job, compile, and write the result."""
    folder = pathlib.Path(sys.argv[1])
    job = pickle.loads((folder / "job.pickle").read_bytes())
    result: dict[str, object] = {}
    try:
        result = _compiled(job, folder)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.json").write_text(json.dumps(result))


def _compiled(job: dict[str, object], folder: pathlib.Path) -> dict[str, object]:
    from jax.experimental import topologies

    from toast.apply import annotate
    from toast.apply.device_meshes import jax_mesh
    from toast.apply.module_functions import aval, flat_jit
    from toast.frontend import mlir, stablehlo
    from toast.program import Shardings

    shardings = job["shardings"]
    assert isinstance(shardings, Shardings)
    module = mlir.parse(job["module"], "job")  # type: ignore[arg-type]
    program = stablehlo.from_module(module, name=str(job["name"]))
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=job["topology"],
        **job["topology_options"],  # type: ignore[arg-type]
    )
    mesh = jax_mesh(shardings, topology.devices)
    local = job["local"]
    partitioned = mlir.parse(local, "job") if local else annotate(program, shardings)  # type: ignore[arg-type]
    function = flat_jit(program, partitioned, mesh, shardings)
    arguments = [aval(program.values[v].type) for v in program.argument_values]
    compiled = function.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    (folder / "scheduled.txt").write_text(compiled.as_text())
    return {
        "coordinates": [list(device.coords) for device in mesh.devices.flat],
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main()
