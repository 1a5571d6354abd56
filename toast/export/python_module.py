"""A plan as a Python module that needs JAX alone: its mesh, and the shardings of its arrays."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from toast.export.exported_text import comments
from toast.hardware import Mesh
from toast.plan import Plan, Saved, spec_text
from toast.program import Spec

_HEAD = """
from __future__ import annotations

import math
import warnings
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: The axes of the mesh, from major to minor.
AXES = {axes}

#: The positional arguments of the step, in order.
PARAMETERS = {parameters}

"""

_FUNCTIONS = '''

def make_mesh(devices: Any = None) -> Mesh:
    """The mesh of the plan, on the first of ``devices`` (default: ``jax.devices()``)."""
    every = list(jax.devices() if devices is None else devices)
    count = math.prod(AXES.values())
    if len(every) < count:
        raise ValueError(f"the mesh {AXES} needs {count} devices, not {len(every)}")
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), types, devices=every[:count])


def in_shardings(mesh: Mesh, *arguments: Any) -> tuple[Any, ...]:
    """Shardings for ``jax.jit(in_shardings=...)`` and ``jax.device_put``.

    ``arguments`` are those of the step, or ``jax.ShapeDtypeStruct``s in their place.
    """
    if len(arguments) != len(PARAMETERS):
        raise ValueError(f"in_shardings takes {', '.join(PARAMETERS)}, not {len(arguments)} values")
    pairs = zip(PARAMETERS, arguments, strict=True)
    return tuple(_shardings(mesh, name, value, ARGUMENTS) for name, value in pairs)


def out_shardings(mesh: Mesh, result: Any) -> Any:
    """Shardings for ``jax.jit(out_shardings=...)``; ``result`` is ``jax.eval_shape(step, ...)``."""
    return _shardings(mesh, "result", result, RESULTS)


def _shardings(mesh: Mesh, root: str, tree: Any, specs: dict[str, P]) -> Any:
    def sharding(keys: Any, leaf: Any) -> NamedSharding:
        path = root + jax.tree_util.keystr(keys)
        if path not in specs:
            warnings.warn(f"{path} is not in the plan, and is not sharded", stacklevel=2)
        spec = P(*specs.get(path, P())[: len(leaf.shape)])
        for dimension, axes in enumerate(spec):
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            count = math.prod(mesh.shape[axis] for axis in axes)
            if leaf.shape[dimension] % count:
                raise ValueError(
                    f"{path}: dimension {dimension} has {leaf.shape[dimension]} elements, which "
                    f"{count} devices ({' x '.join(axes)}) do not divide; use a mesh whose axes "
                    "divide it, or plan again for this mesh"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)
'''


@dataclasses.dataclass(frozen=True)
class ShardedArrays:
    """What a plan, or a plan file, says of arguments and results."""

    program: str
    mesh: Mesh
    hardware: str
    #: The sharding of each argument.
    arguments: Mapping[str, Spec]
    results: Mapping[str, Spec]
    #: The number of ops that the plan shards.
    ops: int

    @staticmethod
    def of(source: Plan | Saved) -> ShardedArrays:
        """Those of a plan, or of the contents of a plan file."""
        if isinstance(source, Saved):
            return ShardedArrays(
                source.program, source.mesh, source.hardware,
                {path: own.spec for path, own in source.arguments.items()}, source.results,
                sum(run.count for runs in source.ops.values() for run in runs if run.held),
            )  # fmt: skip
        program = source.analysis.program
        last = len(program.ops) - len(program.results)
        held = source.op_state[len(program.arguments) : last] >= 0
        return ShardedArrays(
            program.name, source.mesh, source.hardware.name, source.arguments,
            dict(zip(program.results, source.shardings.results, strict=True)),
            int(held.any(axis=1).sum()),
        )  # fmt: skip


def python_module(source: Plan | Saved) -> str:
    """The text of the module for a plan, or for the contents of a plan file."""
    arrays = ShardedArrays.of(source)
    arguments = {path: spec_text(spec) for path, spec in arrays.arguments.items()}
    parameters = dict.fromkeys(re.split(r"[.\[]", path, maxsplit=1)[0] for path in arguments)
    results = {path: spec_text(spec) for path, spec in arrays.results.items()}
    header = comments([
        f"Shardings of {arrays.program} on mesh {arrays.mesh} of {arrays.hardware}, written by "
        "toast export.",
        "They are those of arguments and results, for jax.jit and jax.device_put. The plan also "
        f"shards {arrays.ops} ops inside of the step, where XLA chooses with these shardings "
        "alone; plan.jit and toast.jit run the plan with both.",
    ])  # fmt: skip
    axes = repr(dict(arrays.mesh.axes))
    head = _HEAD.format(axes=axes, parameters=repr(tuple(parameters)))
    return (
        f"{header}{head}#: The sharding of each argument, by its path.\n"
        f"{_table('ARGUMENTS', arguments)}\n"
        "#: The sharding of each result, by its path; updated modules have those of arguments.\n"
        f"{_table('RESULTS', results)}{_FUNCTIONS}"
    )


def _table(name: str, rows: Mapping[str, str]) -> str:
    lines = "".join(f"    {path!r}: {text},\n" for path, text in rows.items())
    return f"{name}: dict[str, P] = {{\n{lines}}}\n"


__all__ = ["ShardedArrays", "python_module"]
