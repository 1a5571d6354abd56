"""What TARGET may be on the command line: a model's name, a file, or ``module:object``."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from toast.errors import TargetError
from toast.frontend import Program, store

_SUFFIXES = {".mlir", ".mlirbc", ".bc", ".stablehlo", ".lp", ".txt"}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,\s]*)\]")

#: StableHLO names of element types that JAX calls otherwise.
_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i1": "bool",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "ui8": "uint8", "ui16": "uint16", "ui32": "uint32", "ui64": "uint64",
}  # fmt: skip


def load(
    target: str,
    *,
    options: dict[str, int | None] | None = None,
    shapes: Sequence[str] = (),
    small: bool = False,
    module: bool = True,
) -> Program:
    """The program that TARGET names.

    ``options`` (layers, batch, edges ...) change a model's size, ``shapes`` (``f32[8,4]``) are the
    example arguments of a ``module:function``, ``small`` asks for a model's small form.  Without
    its MLIR ``module``, which says how to run it and how to write shardings into it, a program may
    be one that was kept (:mod:`toast.frontend.store`): of a model or a StableHLO file, since what a
    ``module:function`` follows from is not known.
    """
    chosen = {key: value for key, value in (options or {}).items() if value is not None}
    path = pathlib.Path(target)

    def lower() -> Program:
        return _lowered(target, path, chosen, shapes, small)

    there = path.is_file()
    if module or shapes or path.suffix == ".lp" or (":" in target and not there):
        return lower()
    try:
        content = path.read_bytes() if there else b""
    except OSError:
        return lower()  # which says so
    parts: list[str | bytes] = [target, repr((sorted(chosen.items()), small)), content]
    here = pathlib.Path(__file__).parent
    return store.lowered(parts, [here, here / "models"], lower)


def _lowered(
    target: str,
    path: pathlib.Path,
    chosen: dict[str, int],
    shapes: Sequence[str],
    small: bool,
) -> Program:
    # These import JAX, which a kept program does without.
    from toast import api
    from toast.models import ZOO, build

    if target in ZOO:
        if shapes:
            raise TargetError(f"--arg is for module:function targets, {target} is a model; drop it")
        return api.program_of(build(target, small=small, **chosen))
    is_file = path.suffix in _SUFFIXES or path.is_file()
    if not is_file and ":" not in target:
        return api.program_of(build(target))  # unknown name: the error lists the known
    if chosen:
        raise TargetError(f"--{next(iter(chosen))} is for models, {target} is none; drop it")
    return api.program_of(path) if is_file else _from_module(target, shapes)


def references(texts: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions that stand for custom calls, by target: ``target=module:function``."""
    found = {}
    for text in texts:
        target, equals, name = text.partition("=")
        if not equals or ":" not in name:
            raise TargetError(f"--reference {text}: write target=module:function")
        found[target] = _imported(name)
        if not callable(found[target]):
            raise TargetError(f"--reference {text}: {name} is no function")
    return found


def _imported(target: str) -> Any:
    """The object that ``module:object`` names."""
    module_name, _, attribute = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise TargetError(f"{target}: cannot import {module_name}: {error}") from None
    except Exception as error:
        raise TargetError(
            f"{target}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{target}: module {module_name} has no {attribute}")
        found = getattr(found, part)
    return found


def _from_module(target: str, shapes: Sequence[str]) -> Program:
    from toast import api
    from toast.models import Model

    found = _imported(target)
    arguments = [parse_shape(text) for text in shapes]
    if isinstance(found, Model):
        return api.program_of(found)
    if not callable(found):
        raise TargetError(f"{target}: neither a function nor a toast.models.Model")
    if arguments:
        return api.program_of(found, *arguments)
    try:
        made = found()
    except TypeError as error:
        raise TargetError(
            f"{target}: needs example arguments: pass --arg f32[8,4] once per argument, or name "
            f"a function without parameters that returns a toast.models.Model ({error})"
        ) from None
    if isinstance(made, Model):
        return api.program_of(made)
    raise TargetError(
        f"{target}: called without arguments it returned {type(made).__name__}, not a "
        "toast.models.Model; pass --arg f32[8,4] once per argument"
    )


def parse_shape(text: str) -> Any:
    """``f32[8,4]`` or ``float32[8,4]`` as a ``jax.ShapeDtypeStruct``."""
    import jax
    import numpy as np

    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise TargetError(f"--arg {text}: not a shape; write for example f32[256,32]")
    name, sizes = found.groups()
    try:
        dtype = jax.numpy.dtype(_DTYPES.get(name, name))
    except TypeError:
        raise TargetError(f"--arg {text}: no element type {name}; write for example f32") from None
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
