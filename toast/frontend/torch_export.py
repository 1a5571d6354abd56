"""Converts programs of ``torch.export`` to a :class:`Program`: forward passes, captured earlier."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import jax as jax_frontend
from toast.frontend.torch_environment import environment, jax_type, located_errors, torch_ops
from toast.frontend.torch_modules import renamed
from toast.program import Program


def from_exported(
    exported: Any,
    arguments: tuple[Any, ...],
    *,
    donate: int | Sequence[int] | None = (),
    name: str | None = None,
    platform: Any = None,
    **keywords: Any,
) -> Program:
    """The program of a ``torch.export.ExportedProgram``, at its own example inputs.

    :raises toast.errors.TargetError: if it is given arguments or donation, has dynamic sizes, or
        has an op that torchax cannot express.
    """
    loaded = environment()
    name = name or "exported"
    extra = "arguments" if arguments or keywords else "donate" if donate else ""
    if extra:
        raise TargetError(
            f"{name}: {extra} of a torch.export program: it has its own inputs; remove them"
        )
    if exported.range_constraints:
        raise TargetError(
            f"{name}: the exported program has dynamic sizes; export it without dynamic_shapes"
        )
    export = importlib.import_module("torchax.export")
    root = exported.graph_module
    with located_errors(name, root):
        names, states, function = export.exported_program_to_jax(exported, export_raw=True)
        inputs = export.extract_avals(exported)
    names = [*names, *(f"constant[{n}]" for n in range(len(states) - len(names)))]
    types = [jax_type(state) for state in states]
    inputs = [jax.ShapeDtypeStruct(i.shape, jax.dtypes.canonicalize_dtype(i.dtype)) for i in inputs]

    def call(states: list[Any], *inputs: Any) -> Any:
        with located_errors(name, root), loaded.override_property(prng=jax.random.key(0)):
            return function(states, inputs)

    with torch_ops():
        pass  # the environment is complete before JAX traces
    program = jax_frontend.from_function(call, types, *inputs, name=name, platform=platform)
    batch = [str(path) for path in exported.graph_signature.user_inputs]
    return renamed(program, [*names, *batch], (), {})


__all__ = ["from_exported"]
