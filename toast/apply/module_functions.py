"""Modules as functions of flat arguments that ``jax.jit`` compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from toast.apply.callbacks import callbacks_in, calling
from toast.apply.device_meshes import mesh_platform
from toast.apply.partition_specs import is_key, named_sharding
from toast.errors import PlanError
from toast.frontend import mlir
from toast.program import Program, Shardings, TensorType

#: Collectives in XLA's compiled text.
_COLLECTIVE = re.compile(
    r"\s(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r"(?:[^\n]*?channel_id=(\d+))?"
)

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

_NUMPY = {"i1": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a StableHLO element type."""
    if name not in _NUMPY:
        if number := re.fullmatch(r"(ui|i|f)(\d+)", name):
            kinds = {"ui": "uint", "i": "int", "f": "float"}
            name = kinds[number.group(1)] + number.group(2)
        elif number := re.fullmatch(r"f([468])(e\w+)", name):
            name = f"float{number.group(1)}_{number.group(2)}"
    dtype: np.dtype[Any] = np.dtype(jax.numpy.dtype(_NUMPY.get(name, name)))
    return dtype


def aval(type_: TensorType) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a type as a ``jax.ShapeDtypeStruct``."""
    return jax.ShapeDtypeStruct(type_.shape, numpy_dtype(type_.dtype))


def word_size(program: Program) -> contextlib.AbstractContextManager[Any]:
    """A context in which 64-bit arguments and results stay 64-bit, whatever JAX's setting is.

    Results of :func:`flat_jit` must be lowered and called in it.
    """
    return jax.enable_x64(True) if is_wide(program) else contextlib.nullcontext()


def is_wide(program: Program) -> bool:
    """Whether an argument or a result has 64-bit elements."""
    outside = {*program.argument_values, *program.result_values}
    dtypes = {program.values[v].type.dtype for v in outside}
    return any(numpy_dtype(dtype).name in _WIDE for dtype in dtypes)


def module_function(
    program: Program, module: Any, mesh: jax.sharding.Mesh | None
) -> Callable[..., list[Any]]:
    """A module as a function of flat arguments, which ``jax.jit`` traces and compiles.

    The module replaces that of a ``jax.export.Exported`` of a stub with the same signature, so that
    JAX compiles, places and donates as for any function.  It is serialized as a portable artifact,
    which JAX can read and which may contain ops of other dialects (CHLO, Shardy).

    :param program: the program of the module.
    :param module: the MLIR module, for example from :func:`toast.apply.annotate`.
    :param mesh: the mesh with devices; ``None`` for one device.
    :raises toast.errors.PlanError: if the program calls Python functions of another process.
    """
    callbacks = callbacks_in(program)
    if mesh_platform(mesh) == "tpu":
        module = mlir.without_unset(module)
    types = [program.values[v].type for v in program.argument_values]
    outs = [aval(program.values[v].type) for v in program.result_values]

    def stub(*_arguments: Any) -> list[Any]:
        return [jax.numpy.zeros(o.shape, o.dtype) for o in outs]

    with word_size(program):
        exported = jax.export.export(
            jax.jit(stub, keep_unused=True), platforms=[mesh_platform(mesh)]
        )(*map(aval, types))
    exported = dataclasses.replace(
        exported,
        fun_name=re.sub(r"\W", "_", program.name),
        mlir_module_serialized=mlir.portable_artifact(module),
        nr_devices=1 if mesh is None else mesh.size,
    )

    def run(*arguments: Any) -> list[Any]:
        return calling(exported.call(*arguments), callbacks)

    run.__name__ = exported.fun_name
    return run


def flat_jit(
    program: Program, module: Any, mesh: jax.sharding.Mesh | None, shardings: Shardings | None
) -> Any:
    """``jax.jit`` of a module with flat arguments, sharded on a mesh or on one device.

    :param program: the program of the module.
    :param module: the MLIR module (:func:`module_function`).
    :param mesh: the mesh with devices; ``None`` for one device.
    :param shardings: the shardings of arguments and results; ``None`` for one device.
    :raises toast.errors.PlanError: if the program calls Python functions of another process.
    """
    return flat_function_jit(program, module_function(program, module, mesh), mesh, shardings)


def flat_function_jit(
    program: Program,
    run: Callable[..., list[Any]],
    mesh: jax.sharding.Mesh | None,
    shardings: Shardings | None,
) -> Any:
    """``jax.jit`` of a function of :func:`module_function`, as :func:`flat_jit`."""
    if mesh is None or shardings is None:
        return jax.jit(run)
    return jax.jit(
        run,
        in_shardings=[
            named_sharding(mesh, shardings.of(program, v)) for v in program.argument_values
        ],
        out_shardings=[named_sharding(mesh, spec) for spec in shardings.results],
        donate_argnums=tuple(sorted(program.donated)),
    )


def untransformed(program: Program, arguments: Sequence[Any]) -> Sequence[Any]:
    """Arguments of a planned program, for which ``jax.grad`` and ``jax.vmap`` raise a clear error.

    Without it, the derivatives of the stub, which are zero, would be taken for those of the
    program, and arguments of ``vmap`` would be placed as if they were not mapped.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in arguments):
        return arguments

    def refuse_derivative(primals: Any, tangents: Any) -> Any:
        raise PlanError(
            f"{program.name}: a planned program cannot be differentiated; plan the function that "
            "computes the gradient, such as the train step"
        )

    def refuse_map(*_: Any) -> Any:
        raise PlanError(
            f"{program.name}: jax.vmap cannot map a planned program, whose shapes are fixed; plan "
            "the function that vmap returns"
        )

    mapped = jax.custom_batching.custom_vmap(lambda *leaves: leaves)
    mapped.def_vmap(refuse_map)
    guard = jax.custom_jvp(lambda *leaves: mapped(*leaves))
    guard.defjvp(refuse_derivative)
    return list(guard(*arguments))


@contextlib.contextmanager
def quiet_donation() -> Iterator[None]:
    """Suppresses JAX's warning that a backend did not reuse a donated buffer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*donated buffers were not usable.*")
        yield


def wrapped_key(result: Any, aval: Any) -> Any:
    """A flat result as the function returns it: the words of random keys become keys."""
    if not is_key(aval):
        return result
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(result, impl=implementation[0])


def collectives_in(text: str) -> dict[str, int]:
    """The number of collectives of each kind in XLA's compiled text, by StableHLO name.

    An asynchronous pair counts once, as do copies of one collective (with one channel) that the TPU
    compiler puts into fusions.  A collective may carry several arrays that XLA combined.
    """
    matches = enumerate(_COLLECTIVE.findall(text))
    distinct = {(kind, channel or f"line {number}") for number, (kind, channel) in matches}
    counts = collections.Counter(kind.replace("-", "_") for kind, _ in distinct)
    return dict(sorted(counts.items()))
