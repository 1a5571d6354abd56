"""Converts what JAX has traced, lowered or exported to a :class:`Program`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import mlir, stablehlo
from toast.frontend.jax import Calling
from toast.frontend.jax_lowering import Lowering, check_platform, lower, read
from toast.ports import HardwarePlatform
from toast.program import Program

#: The types of targets.
STAGES = (jax.stages.Traced, jax.stages.Lowered, jax.export.Exported)


def from_stage(stage: Any, *, platform: str | None = None) -> Program:
    """The program of a ``jax.stages.Traced`` or ``Lowered`` or of a ``jax.export.Exported``.

    Arguments have the names in the module, which are those of the traced function.  JAX leaves
    unused arguments out of the module; a plan takes them all the same and ignores them.

    :param platform: the platform to lower a ``Traced`` for, by default that of ``jax.jit``; or one
        of the platforms of an ``Exported``, by default its only one.
    :raises toast.errors.TargetError: if it is lowered for several platforms and ``platform`` does
        not choose one of them, or TOAST cannot shard its module.
    """
    check_platform(platform)
    if not isinstance(stage, jax.stages.Traced) and isinstance(platform, HardwarePlatform):
        platform = None  # it is lowered already
    if isinstance(stage, jax.export.Exported):
        return _exported(stage, platform)
    name = str(getattr(stage, "fun_name", ""))
    lowering = None
    if isinstance(stage, jax.stages.Traced):
        lowering = _lowered(stage, name, platform)
        stage = lowering.lowered
    elif platform is not None and _platforms(stage) != (platform,):
        raise TargetError(
            f"platform {platform!r}: the function is lowered already; use "
            f"jax.jit(f).trace(x).lower(lowering_platforms=({platform!r},))"
        )
    # That of the stage stays as it is.
    module = lowering.module if lowering else mlir.clone(stage.compiler_ir())
    if not name:
        name = mlir.module_name(module).removeprefix("jit_") or "function"
    infos = jax.tree.leaves(stage.args_info)
    used = getattr(getattr(stage, "_lowering", None), "compile_args", {}).get("kept_var_idx")
    outputs, out_tree = jax.tree.flatten(stage.out_info)
    calling = _calling(module, jax.tree.structure(stage.args_info), infos, used, out_tree, outputs)
    if calling is not None:
        calling = dataclasses.replace(calling, callbacks=mlir.callbacks_of(stage))
    if lowering:
        return read(lowering, name, calling)
    platforms = _platforms(stage)
    return stablehlo.from_module(
        module, name=name, calling=calling, platform=platforms[0] if len(platforms) == 1 else ""
    )


def _lowered(traced: Any, name: str, platform: str | None) -> Lowering:
    try:
        return lower(traced, name, platform)
    except TargetError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise TargetError(
            f"{name}: JAX cannot lower it: {type(error).__name__}: {lines[0]}"
        ) from error


def _platforms(lowered: Any) -> tuple[str, ...]:
    """The platforms of a ``Lowered``; empty where JAX does not say them."""
    return tuple(getattr(getattr(lowered, "_lowering", None), "_platforms", None) or ())


def _exported(exported: Any, platform: str | None) -> Program:
    name, platforms = exported.fun_name, exported.platforms
    listed = ", ".join(platforms)
    if platform is None and len(platforms) > 1:
        raise TargetError(
            f"{name}: it is exported for several platforms ({listed}); pass one of them, as in "
            f"platform={platforms[0]!r} (--platform {platforms[0]})"
        )
    if platform is not None and platform not in platforms:
        raise TargetError(
            f"{name}: platform {platform!r}: it is exported for {listed}; use one of these, or "
            "export it for this one"
        )
    module = mlir.parse(exported.mlir_module_serialized, name)
    chosen = platforms[0] if platform is None else platform
    if len(platforms) > 1:
        mlir.choose_platform(module, platforms.index(chosen), name)
    calling = _calling(
        module, exported.in_tree, exported.in_avals, exported.module_kept_var_idx,
        exported.out_tree, exported.out_avals,
    )  # fmt: skip
    return stablehlo.from_module(module, name=name, calling=calling, platform=chosen)


def _calling(
    module: Any,
    in_tree: Any,
    inputs: Sequence[Any],
    used: Any,
    out_tree: Any,
    outputs: Sequence[Any],
) -> Calling | None:
    """The pytrees; ``None`` if the module has arguments that are no leaves, such as tokens."""
    leaves = tuple(range(len(inputs)) if used is None else sorted(used))
    if (len(leaves), len(outputs)) != mlir.counts(module):
        return None
    return Calling(
        in_tree=in_tree,
        in_avals=tuple(jax.ShapeDtypeStruct(i.shape, i.dtype) for i in inputs),
        out_tree=out_tree,
        out_avals=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs),
        leaves=None if len(leaves) == len(inputs) else leaves,
    )
