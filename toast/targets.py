"""What TARGET may be on the command line: a model's name, a file, or ``module:object``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toast import ports
from toast.boundary.printable import shortened
from toast.boundary.regular_files import beside, is_regular, read_bytes
from toast.errors import ArgumentWarning, PlanError, TargetError, ToastError
from toast.files import is_plan
from toast.frontend import program_cache
from toast.program import MemoryPolicy, Program

if TYPE_CHECKING:
    from toast.plan import Saved

#: The largest values of sizes that multiply the number of ops.
_LARGEST_SIZES = {"layers": 1000, "experts": 10_000}

_SHAPE = re.compile(r"([a-z]\w*)\[([\w,\s]*)\]")
_SIZE_NAME = re.compile(r"[a-zA-Z_]\w*")

#: The names of ``toast.models.ZOO``, which imports JAX; a test checks that they are equal.
MODEL_NAMES = (
    "t2b", "t2b-scan", "t2b-tiny", "t7b", "t7b-scan", "llama3-8b", "llama3-8b-scan", "gns",
    "gns-scan", "unet", "itx", "itx-scan", "itx-decode", "moe", "moe-scan", "mlp", "attention",
    "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama2-7b", "mistral-7b", "qwen3-8b",
    "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "gemma3-4b", "gemma3-12b",
    "gemma3-27b", "vit-l", "vit-h", "dit-xl", "whisper-large", "mamba2-1.3b", "resnet50",
)  # fmt: skip

#: The numpy names of StableHLO's element types.
_DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i1": "bool",
    "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "ui8": "uint8", "ui16": "uint16", "ui32": "uint32", "ui64": "uint64",
}  # fmt: skip


def load(
    target: str,
    *,
    options: Mapping[str, int | str | None] | None = None,
    shapes: Sequence[str] = (),
    small: bool = False,
    module: bool = True,
    donate: Sequence[int] = (),
    platform: str | None = None,
    remat: str | MemoryPolicy | None = None,
    microbatches: int | None = None,
) -> Program:
    """The program of a TARGET.

    :param target: a model's name, the path of a file, or ``module:function``.
    :param options: options of a model: ``layers``, ``batch``, ``step`` and so on; or sizes of a
        ``module:function``, which ``shapes`` or its parameters name.
    :param shapes: the example arguments of a ``module:function``, such as ``f32[8,4]`` or
        ``f32[batch,4]``.
    :param small: whether to load the small form of a model.
    :param module: whether the program needs its MLIR module, for running or annotating it.
        Otherwise the program of a model or a StableHLO file may come from the cache
        (:mod:`toast.frontend.program_cache`).  That of a ``module:function`` never does, because
        its dependencies are unknown.
    :param donate: positions of arguments that results may overwrite, in addition to those of a
        model.
    :param platform: the platform to lower a model or a function for (:func:`toast.analyze`).
    :param remat: the memory policy of a model or a function, and ``microbatches`` their number.
    :raises toast.errors.TargetError: if the target cannot be loaded, or an option does not apply.
    """
    if not target.strip():
        raise TargetError(
            f"TARGET {target!r} is empty; write a model's name, a file or module:function"
        )
    chosen = {key: value for key, value in (options or {}).items() if value is not None}
    path = pathlib.Path(target)

    def lower() -> Program:
        tracing = _Tracing(platform, remat, microbatches)
        return _lowered(target, path, chosen, shapes, small, donate, tracing)

    there = is_regular(path)
    if there and not ports.frontend_of(path).cacheable:
        return lower()
    if module or shapes or remat or microbatches is not None or (":" in target and not there):
        return lower()
    content = read_bytes(path, TargetError) if there else b""
    options_text = repr((sorted(chosen.items()), small, *donate, platform))
    parts: list[str | bytes] = [target, options_text, content]
    here = pathlib.Path(__file__).parent
    return program_cache.lowered(parts, [here, here / "models"], lower)


def _option(name: str) -> str:
    """An option of a model as the command line has it."""
    from toast.plan.origin import SIZES

    return f"--{name}" if name in SIZES else f"--set {name}"


def _gap(name: str) -> str:
    """What stands between an option of a model and its value."""
    return "=" if _option(name).startswith("--set") else " "


def is_stablehlo(target: str) -> bool:
    """Whether TARGET is a StableHLO file."""
    path = pathlib.Path(target)
    return (
        is_regular(path)
        and not _is_python(target, path)
        and ports.frontend_of(path).name == "stablehlo"
    )


def _is_python(target: str, path: pathlib.Path) -> bool:
    """Whether TARGET is a file of Python without the name of a function."""
    return path.suffix == ".py" and ":" not in target and not ports.reads(path)


@contextlib.contextmanager
def importing_jax() -> Iterator[None]:
    """Raises :class:`toast.errors.TargetError` if an import of JAX fails.

    For example, JAX_ENABLE_X64 has an invalid value.
    """
    try:
        yield
    except (ImportError, ValueError) as error:
        raise TargetError(
            f"JAX cannot be imported: {shortened(str(error))}; check its installation and JAX_ "
            "variables"
        ) from None


@dataclasses.dataclass(frozen=True)
class _Tracing:
    """How a model or a function is traced and lowered."""

    platform: str | None
    #: The memory policy and the number of microbatches.
    remat: str | MemoryPolicy | None
    microbatches: int | None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of :func:`toast.api.program_of`."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def check_untraced(self, target: str) -> None:
        """Refuses a memory policy for a target that is not traced."""
        for name in ("remat", "microbatches"):
            if getattr(self, name) is not None:
                raise TargetError(
                    f"--{name} {getattr(self, name)}: {target} is not traced again, which this "
                    "needs; use a model or module:function"
                )


def _lowered(
    target: str,
    path: pathlib.Path,
    chosen: Mapping[str, int | str],
    shapes: Sequence[str],
    small: bool,
    donate: Sequence[int],
    tracing: _Tracing,
) -> Program:
    for size, number in chosen.items():
        if isinstance(number, int) and number > _LARGEST_SIZES.get(size, number):
            raise TargetError(
                f"--{size} {number}: the limit is {_LARGEST_SIZES[size]:,}, as each has its own "
                "ops; use fewer"
            )
    if _is_python(target, path):
        raise TargetError(f"{target}: a Python file; write {target}:FUNCTION")
    is_file = target not in MODEL_NAMES and (ports.reads(path) or os.path.exists(path))
    if not is_file and (target in MODEL_NAMES or ":" not in target):
        return _from_zoo(target, chosen, shapes, small, donate, tracing)
    if is_file and chosen:
        raise TargetError(
            f"{_option(next(iter(chosen)))} is for models, and {target} is a file; remove it"
        )
    if is_file and shapes:
        raise TargetError(
            f"--arg is for module:function targets, and {target} is a file; remove it"
        )
    if is_file and donate:
        raise TargetError(
            f"--donate {donate[0]}: {target} is a file, which sets its own donation; lower "
            "it with donate_argnums"
        )
    if is_file:
        tracing.check_untraced(target)
    if is_file and not isinstance(tracing.platform, ports.HardwarePlatform | None):
        raise TargetError(
            f"--platform {tracing.platform}: {target} is a file, which is lowered already; remove "
            "it"
        )
    if is_file and path.suffix == ".json" and is_plan(path):
        raise TargetError(
            f"{target}: is a plan; use toast explain, report, query or apply, or the TARGET of the "
            "plan"
        )
    if is_file:  # which may need no JAX
        return ports.frontend_of(path).program(path)
    return _from_module(target, chosen, shapes, donate, tracing)


def _from_zoo(
    name: str,
    chosen: Mapping[str, int | str],
    shapes: Sequence[str],
    small: bool,
    donate: Sequence[int],
    tracing: _Tracing,
) -> Program:
    with importing_jax():
        from toast import api
        from toast.models import build

    if name not in MODEL_NAMES:
        build(name)  # the error lists the known names
    if shapes:
        raise TargetError(f"--arg is for module:function targets, and {name} is a model; remove it")
    model = _donating(build(name, small=small, **chosen), donate)
    return api.program_of(model, **tracing.options)


def _donating(model: Any, donate: Sequence[int]) -> Any:
    """A model with further donated arguments."""
    places = tuple(dict.fromkeys((*model.donate, *donate)))
    for place in donate:
        if place >= len(model.arguments):
            raise TargetError(
                f"--donate {place}: {model.name} has {len(model.arguments)} arguments, counted "
                "from 0; use the position of one"
            )
    return dataclasses.replace(model, donate=places)


def of_plan(saved: Saved) -> tuple[str, bool]:
    """The TARGET that a plan file records, and whether it is a file.

    A plan file is untrusted data.  Its TARGET is used only if it is a model of TOAST or a file in
    the folder of the plan file.  A ``module:function`` would be run and other paths would be
    opened, so the user must pass these.

    Raises :class:`toast.errors.PlanError` for other targets, and if the file records none.
    """
    origin = saved.origin
    if origin is None:
        raise PlanError(
            f"{saved.name}: the file does not record its TARGET; add TARGET after the file name"
        )
    if origin.target in MODEL_NAMES:
        return origin.target, False
    if saved.path is not None and ports.reads(pathlib.Path(origin.target)):
        near = beside(saved.path, origin.target)
        if near is not None:
            return str(near), True
    raise PlanError(
        f"{saved.name}: its TARGET is {shortened(origin.target)!r}, and a plan file runs no code "
        "and opens only files in its own folder; add TARGET after the file name"
    )


def rules_of_plan(saved: Saved) -> tuple[pathlib.Path, ...]:
    """The rule files that a plan file records.

    Raises :class:`toast.errors.PlanError` if one of them is not in the folder of the plan file.
    """
    files = []
    for rules in saved.origin.rules if saved.origin else ():
        near = beside(saved.path, rules) if saved.path and rules.endswith(".lp") else None
        if near is None:
            raise PlanError(
                f"{saved.name}: its rules {shortened(rules)!r} are not an .lp file in its folder; "
                "add --rules FILE"
            )
        files.append(near)
    return tuple(files)


def references(texts: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The functions that stand for custom calls, by target: ``target=module:function``."""
    functions = {}
    for text in texts:
        target, equals, name = text.partition("=")
        if not equals or ":" not in name:
            raise TargetError(f"--reference {text}: write target=module:function")
        functions[target] = _imported(name)
        if not callable(functions[target]):
            raise TargetError(f"--reference {text}: {name} is not a function")
    return functions


def _imported(target: str) -> Any:
    """The object ``module:object``, or ``file.py:object``.

    Importing a module runs it; all that it raises, also ``SystemExit``, becomes an error of one
    line.
    """
    module_name, _, attribute = target.partition(":")
    what = f"importing {module_name}"
    folder = os.getcwd()
    if module_name.endswith(".py"):
        file = pathlib.Path(module_name).absolute()
        if not file.is_file():
            raise TargetError(f"{target}: there is no file {module_name}; check the path")
        folder, module_name = str(file.parent), file.stem
    sys.path.insert(0, folder)
    try:
        value: Any = importlib.import_module(module_name)
        what = f"reading {attribute} of {module_name}"
        for part in attribute.split("."):
            if not hasattr(value, part):
                raise TargetError(f"{target}: module {module_name} has no {attribute}")
            value = getattr(value, part)
    except (KeyboardInterrupt, TargetError):
        raise
    except ImportError as error:
        raise TargetError(f"{target}: cannot import {module_name}: {error}") from None
    except BaseException as error:
        raise _failed(target, what, error) from error
    finally:
        sys.path.pop(0)
    return value


def _failed(target: str, what: str, error: BaseException) -> TargetError:
    if isinstance(error, SystemExit):
        return TargetError(f"{target}: {what} ended the program (exit code {error.code})")
    lines = str(error).strip().splitlines() or [""]
    return TargetError(f"{target}: {what} failed: {type(error).__name__}: {shortened(lines[0])}")


def _from_module(
    target: str,
    chosen: Mapping[str, int | str],
    shapes: Sequence[str],
    donate: Sequence[int],
    tracing: _Tracing,
) -> Program:
    with importing_jax():
        from toast import api
        from toast.frontend.jax_stages import STAGES
        from toast.models import Model

    value = _imported(target)
    if isinstance(value, STAGES):
        if shapes or donate:
            raise TargetError(
                f"{'--arg' if shapes else '--donate'}: {target} is traced already; remove it"
            )
        tracing.check_untraced(target)
        _check_unused(chosen, target, "is traced already")
        return api.program_of(value, **tracing.options)
    arguments = _arguments(shapes, chosen)
    if isinstance(value, Model):
        if arguments:
            raise TargetError(f"--arg: {target} is a Model, which has its own arguments; remove it")
        _check_unused(chosen, target, "is a Model, which has its own sizes")
        return api.program_of(_donating(value, donate), **tracing.options)
    if not callable(value):
        raise TargetError(f"{target}: is neither a function nor a toast.models.Model")
    if arguments:
        return api.program_of(value, *arguments, donate=donate, **tracing.options)
    model = _called(target, value, chosen)
    return api.program_of(_donating(model, donate), **tracing.options)


def _check_unused(chosen: Mapping[str, int | str], target: str, reason: str) -> None:
    """Refuses sizes for a target that has none."""
    for name in chosen:
        raise TargetError(f"{_option(name)}: {target} {reason}; remove it")


def _called(target: str, function: Callable[..., Any], chosen: Mapping[str, int | str]) -> Any:
    """The model that a function of sizes returns."""
    from toast.models import Model

    known = _parameters(function)
    for name in chosen:
        if name not in known:
            raise TargetError(
                f"{_option(name)}: {target} has no parameter {name}, and no --arg has a dimension "
                f"of that name; write for example --arg f32[{name},4]"
            )
    try:
        model = function(**chosen)
    except TypeError as error:
        raise TargetError(
            f"{target}: needs example arguments: pass --arg f32[8,4] once per argument, or use "
            f"a function without parameters that returns a toast.models.Model ({error})"
        ) from None
    except (KeyboardInterrupt, ToastError):
        raise
    except BaseException as error:
        raise _failed(target, "calling it", error) from error
    if isinstance(model, Model):
        return model
    raise TargetError(
        f"{target}: called without arguments it returned {type(model).__name__}, not a "
        "toast.models.Model; pass --arg f32[8,4] once per argument"
    )


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that a function takes by name, with their defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in parameters if p.kind in named}


def sizes_of(
    target: str, options: Mapping[str, int | str | None], shapes: Sequence[str] = ()
) -> dict[str, int]:
    """The sizes of a TARGET that its options can change, with their values.

    Those of a model of the zoo, of the parameters of a ``module:function`` that returns a model, or
    those that the shapes of its arguments name; empty for a file.  Parameters are as for
    :func:`load`.

    :raises toast.errors.TargetError: if the target cannot be loaded, or a size has no value.
    """
    chosen: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if target in MODEL_NAMES:
        with importing_jax():
            from toast.models import ZOO, build
        model = build(target, **chosen)
        return {name: n for name, n in model.sizes.items() if name in ZOO[target].options}
    if ":" not in target or os.path.exists(target):
        return {}
    if shapes:
        _arguments(shapes, chosen)  # raises errors
        return {name: size for name, size in chosen.items() if isinstance(size, int)}
    value = _imported(target)
    if not callable(value):
        return {}
    sizes = {**_parameters(value), **chosen}
    return {name: n for name, n in sizes.items() if isinstance(n, int) and type(n) is not bool}


def _arguments(shapes: Sequence[str], sizes: Mapping[str, int | str]) -> list[Any]:
    """The example arguments that shapes describe; ``sizes`` has those that they name."""
    used = {name for text in shapes for name in _names(text)}
    for name in sizes if shapes else ():
        if name not in used:
            raise TargetError(
                f"{_option(name)}: no --arg has a dimension of that name; write for example --arg "
                f"f32[{name},4]"
            )
    return [parse_shape(text, sizes) for text in shapes]


def _names(text: str) -> list[str]:
    """The named dimensions of a shape."""
    _, _, inside = text.strip().removesuffix("]").partition("[")
    return [part.strip() for part in inside.split(",") if _SIZE_NAME.fullmatch(part.strip())]


def parse_shape(text: str, sizes: Mapping[str, int | str] | None = None) -> Any:
    """``f32[8,4]`` or ``float32[batch,4]`` as a ``jax.ShapeDtypeStruct``.

    ``sizes`` has the values of names.  Raises :class:`toast.errors.TargetError` for other texts.
    """
    import jax
    import numpy as np

    shape_text = _SHAPE.fullmatch(text.strip())
    if shape_text is None:
        raise TargetError(f"--arg {text}: not a shape; write for example f32[256,32]")
    name, parts = shape_text.groups()

    def dimension(size: str) -> int:
        if size.isdecimal():
            return int(size)
        if not _SIZE_NAME.fullmatch(size):
            raise TargetError(f"--arg {text}: not a shape; write for example f32[256,32]")
        value = (sizes or {}).get(size)
        if value is None:
            raise TargetError(
                f"--arg {text}: {size} has no value; add {_option(size)}{_gap(size)}8"
            )
        if not isinstance(value, int) or value < 1:
            raise TargetError(f"{_option(size)}{_gap(size)}{value}: use a whole number from 1")
        return value

    try:
        dtype = jax.numpy.dtype(_DTYPES.get(name, name))
    except TypeError:
        raise TargetError(
            f"--arg {text}: unknown element type {name}; write for example f32"
        ) from None
    used = jax.dtypes.canonicalize_dtype(dtype)
    if used != dtype:
        warnings.warn(
            f"--arg {text}: JAX computes in {used} unless JAX_ENABLE_X64=1 is set",
            ArgumentWarning, stacklevel=2,
        )  # fmt: skip
    shape = tuple(dimension(size.strip()) for size in parts.split(",") if size.strip())
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
