"""Lowers a traced function for this machine, for another platform, or for the hardware of a plan.

JAX lowers some operations differently on each platform: linear algebra becomes LAPACK's routines
on CPUs, and others on GPUs and TPUs; only devices have Pallas kernels.  A plan for a TPU that is
made on a CPU machine must see the form for the TPU, and the form for the CPU is needed to run
there.  So both are lowered, in one module.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import mlir, stablehlo
from toast.ports import HardwarePlatform
from toast.program import Program

#: Moves a value to a memory, such as that of the host; on CPUs, JAX lowers it to nothing.
_MOVED = "device_put to a memory"

#: Primitives that JAX lowers to other ops on some platform.
_OWN_FORMS = frozenset({
    _MOVED, "approx_top_k", "cholesky", "cholesky_update", "cumsum", "eig", "eigh", "fft", "geqp3",
    "geqrf", "hessenberg", "householder_product", "lu", "lu_pivots_to_permutation", "ormqr",
    "pallas_call", "platform_index", "ragged_dot_general", "random_gamma", "scaled_matmul", "schur",
    "select_and_gather_add", "svd", "symmetric_product", "threefry2x32", "triangular_solve",
    "tridiagonal", "tridiagonal_solve",
})  # fmt: skip

#: The platforms that JAX lowers for.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A function lowered for one platform."""

    #: The ``jax.stages.Lowered``.
    lowered: Any
    module: Any
    platform: str
    #: The module for this machine, if it is another one.
    here: Any = None


def lower(traced: Any, name: str, platform: str | None) -> Lowering:
    """Lowers a ``jax.stages.Traced``.

    :param name: the function's name, for errors.
    :param platform: one of :data:`PLATFORMS`; ``None`` for that of ``jax.jit``.  For a
        :class:`toast.ports.HardwarePlatform`, the form for this machine and that for the hardware
        are lowered.  The latter is the result if the two differ, or if JAX has no form for this
        machine.
    :raises Exception: what JAX raises.
    """
    host = str(jax.export.default_export_platform())
    if not isinstance(platform, HardwarePlatform):
        return _alone(traced, platform, platform or host)
    names = _primitives(traced.jaxpr.jaxpr)
    # JAX has no module for two platforms with composites or manual regions: they are lowered twice,
    # composites only if that may make a difference.
    apart = not names.isdisjoint({"composite", "shard_map"})
    if platform in (host, "") or ("composite" in names and names.isdisjoint(_OWN_FORMS)):
        return _here_or_there(traced, host, str(platform))
    try:
        if apart:
            forms = _alone(traced, None, host), _alone(traced, str(platform), str(platform))
        else:
            both = _lowered(traced, (host, str(platform)))
    except Exception:  # for example a kernel without a form here, or a callback
        return _here_or_there(traced, host, str(platform))
    return _chosen(name, *forms) if apart else _split(name, both, host, platform)


def _here_or_there(traced: Any, host: str, platform: str) -> Lowering:
    """The form for this machine or, if JAX has none, that for the hardware."""
    try:
        return _alone(traced, None, host)
    except Exception as error:
        if platform in (host, ""):
            raise
        try:
            return _alone(traced, platform, platform)
        except Exception:
            raise error from None


def _split(name: str, both: Any, host: str, platform: str) -> Lowering:
    """The form for the hardware, from a module for both, or that for this machine if equal."""
    module = both.compiler_ir()
    mlir.inline_calls(module, name)
    if not mlir.differs(module, name):
        mlir.choose_platform(module, 0, name)
        return Lowering(both, module, host)
    here = mlir.clone(module)
    mlir.choose_platform(here, 0, name)
    mlir.choose_platform(module, 1, name)
    return Lowering(both, module, str(platform), here)


def _chosen(name: str, here: Lowering, there: Lowering) -> Lowering:
    """The form for the hardware, or that for this machine if they are equal."""
    for form in (here, there):
        stablehlo.inlined(form.module, name)
    if mlir.outline(here.module) == mlir.outline(there.module):
        return here
    return dataclasses.replace(there, here=here.module)


def _primitives(jaxpr: Any) -> set[str]:
    """The names of the primitives of a jaxpr and of those inside it."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = [jaxpr]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for equation in current.eqns:
            name = str(equation.primitive.name)
            if name == "device_put" and any(equation.params.get("devices", ())):
                name = _MOVED
            names.add(name)
            for value in equation.params.values():
                inner = value if isinstance(value, tuple | list) else (value,)
                inner = [getattr(part, "jaxpr", part) for part in inner]
                waiting += [part for part in inner if hasattr(part, "eqns")]
    return names


def _alone(traced: Any, platform: str | None, shown: str) -> Lowering:
    lowered = _lowered(traced, (platform,) if platform else None)
    return Lowering(lowered, lowered.compiler_ir(), shown)


def _lowered(traced: Any, platforms: tuple[str, ...] | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # unusable donated buffers
        return traced.lower(lowering_platforms=platforms, _private_parameters=mlir.keeping_names())


def read(lowering: Lowering, name: str, calling: Any) -> Program:
    """The program of a lowered function.

    Its ``source`` has the program for this machine as well, if it is another one.

    :param calling: the :class:`toast.frontend.jax.Calling` of the function.
    :raises toast.errors.TargetError: for a module that TOAST cannot shard.
    """
    program = stablehlo.from_module(
        lowering.module, name=name, calling=calling, platform=lowering.platform
    )
    if lowering.here is None:
        return program
    host = str(jax.export.default_export_platform())
    here = stablehlo.from_module(lowering.here, name=name, calling=calling, platform=host)
    source = dataclasses.replace(program.source, here=here)
    return dataclasses.replace(program, source=source)


def check_platform(platform: str | None) -> None:
    """Raises :class:`toast.errors.TargetError` unless JAX lowers for ``platform``."""
    if platform is not None and platform not in (*PLATFORMS, HardwarePlatform()):
        raise TargetError(
            f"platform {platform!r}: JAX does not lower for it; use one of {', '.join(PLATFORMS)}"
        )
