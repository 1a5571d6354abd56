"""The environment in which torchax computes PyTorch's ops with JAX, and errors inside it.

Errors name the module and the user's source line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax
import jax.extend.source_info_util as source_info

from toast.errors import TargetError, ToastError

#: Where tensors of a program get their values from while it is traced.
_DATA_DEPENDENT = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@functools.cache
def environment() -> Any:
    """The environment of torchax.

    Raises :class:`toast.errors.TargetError` if torchax cannot be imported.
    """
    try:
        with _removed_overloads():
            torchax = importlib.import_module("torchax")
            loaded = torchax.default_env()
    except ImportError as error:
        raise TargetError(
            f"torchax cannot be imported ({error}); install it by "
            "pip install 'toast-partitioner[torch]'"
        ) from None
    except AttributeError as error:
        raise TargetError(
            f"this torchax does not fit this PyTorch ({error}); update both by "
            "pip install -U 'toast-partitioner[torch]'"
        ) from None
    for place in _places_without_ops():
        source_info.register_exclusion(place)
    return loaded


@contextlib.contextmanager
def _removed_overloads() -> Iterator[None]:
    """Lets torchax register ops for overloads that this PyTorch no longer has.

    torchax 0.0.13 lists those of named dimensions, which PyTorch 2.13 has removed.  In this block,
    a placeholder stands for each.
    """
    packet = importlib.import_module("torch._ops").OpOverloadPacket
    original = packet.__getattr__

    def overload(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if "dimname" in key.lower() or "names" in key:
                return object()
            raise

    packet.__getattr__ = overload
    try:
        yield
    finally:
        packet.__getattr__ = original


def _places_without_ops() -> Iterator[str]:
    """Files and folders whose lines are not those of ops: an op belongs to the user's line.

    Those of PyTorch's optimizers are; the user's code has no line for each of their ops.
    """
    torch, *others = _library_folders()
    yield from others
    for name in os.listdir(torch):
        if name != "optim":
            yield os.path.join(torch, name)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """The folders of libraries whose source lines are not the user's."""
    names = ("torch", "torchax", "jax")
    files = [str(importlib.import_module(name).__file__) for name in names]
    own = os.path.dirname(os.path.abspath(__file__))
    return (*(os.path.dirname(file) + os.sep for file in files), own + os.sep)


def jax_type(tensor: Any) -> jax.ShapeDtypeStruct:
    """The shape and the element type of a PyTorch tensor as JAX computes with it."""
    mappings = importlib.import_module("torchax.ops.mappings")
    dtype = jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


@contextlib.contextmanager
def torch_ops() -> Iterator[None]:
    """Ops of PyTorch in this block are ops of JAX.

    Random numbers come from one fixed key, so that the program is the same in each trace.
    """
    loaded = environment()
    with loaded.override_property(prng=jax.random.key(0)), loaded:
        yield


@contextlib.contextmanager
def optimizer_errors(name: str, optimizer: Any) -> Iterator[None]:
    """Errors in this block become a :class:`toast.errors.TargetError` about the optimizer."""
    try:
        yield
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        kind = type(optimizer).__name__
        raise TargetError(
            f"{name}: the step of {kind} cannot be traced, for example since it reads values of "
            f"tensors ({type(error).__name__}: {first}); plan with an optimizer such as "
            "torch.optim.AdamW, or without one"
        ) from error


@contextlib.contextmanager
def located_errors(name: str, model: Any) -> Iterator[None]:
    """Errors in this block become a :class:`toast.errors.TargetError` of one line.

    :param name: the name of the program.
    :param model: the ``torch.nn.Module`` of which the error names a part.
    """
    try:
        yield
    except ToastError:
        raise
    except Exception as error:
        place = _place(error.__traceback__, model) or "the step"
        raise TargetError(f"{name}: {_problem(error, place)}") from error


def _problem(error: Exception, place: str) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    if isinstance(error, _DATA_DEPENDENT):
        return (
            f"{place} depends on the values of a tensor (data-dependent control flow or shape), "
            "and one program must serve all values; use torch.where or a fixed size"
        )
    if type(error).__name__ == "OperatorNotFound":
        return f"{place}: torchax has no JAX form of an op: {first}; use other ops"
    if "mixed math between" in text:
        return (
            f"{place} uses a tensor that is neither a parameter, a buffer nor an argument; "
            "register it as a buffer, or make it on the device of an input"
        )
    return f"{place} cannot be traced: {type(error).__name__}: {first}"


def _place(traceback: TracebackType | None, model: Any) -> str:
    """The innermost module and the innermost line of the user in a traceback."""
    paths = {id(module): path for path, module in model.named_modules()}
    module, line = "", ""
    while traceback is not None:
        frame = traceback.tb_frame
        own = frame.f_locals.get("self")
        if id(own) in paths:
            kind = type(own).__name__
            module = f"{paths[id(own)]} ({kind})" if paths[id(own)] else kind
        file = frame.f_code.co_filename
        if not file.startswith((*_library_folders(), "<")):
            short = file.removeprefix(os.path.join(os.getcwd(), ""))
            line = f"{short}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return " at ".join(part for part in (module, line) if part)
