"""Runs a program sharded and unsharded on random inputs and compares the outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from toast.apply.annotate import annotate
from toast.apply.callbacks import callbacks_in
from toast.apply.device_meshes import jax_mesh
from toast.apply.execute import Runnable
from toast.apply.module_functions import collectives_in, flat_jit, numpy_dtype, word_size
from toast.boundary.printable import shortened
from toast.errors import PlanError, ToastError
from toast.frontend import mlir
from toast.frontend.mlir import ModuleSource
from toast.hardware import Mesh
from toast.program import Program, Shardings, TensorType
from toast.space import region_axes
from toast.units import size_text

#: The largest relative error of equal outputs, by the coarsest element type of the program: sums in
#: another order differ by a few roundings.  Integers and booleans must be identical.
TOLERANCE = {"f64": 1e-12, "c128": 1e-12, "f32": 1e-5, "c64": 1e-5, "f16": 1e-2, "bf16": 3e-2}
_COARSEST = 0.2  # 8-bit floats and smaller

#: Ops that exchange data with a host program, which a run here does not have.
_WAITS = frozenset({"infeed", "outfeed", "send", "recv"})

#: The most bytes of arguments and results of a run on this machine.
_LARGEST_RUN = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class OutputCheck:
    """The comparison of one output of the sharded and the unsharded program."""

    #: The path of the output, such as ``result[0]['wq']``.
    path: str
    #: The largest absolute difference of two elements.
    max_abs_error: float
    #: The largest absolute error divided by the largest absolute value.
    relative_error: float
    #: Whether the two outputs are equal, as far as rounding allows.
    equal: bool
    #: The largest absolute value in the unsharded program.
    magnitude: float = 0.0
    #: The fraction of elements that are NaN in the unsharded program; they must be NaN in both.
    nan: float = 0.0
    #: The fraction of elements that are neither NaN nor infinite there: only they have an error.
    finite: float = 1.0

    @property
    def proves(self) -> bool:
        """Whether the comparison proves anything: outputs without a finite element do not."""
        return self.finite > 0.0


@dataclasses.dataclass(frozen=True)
class Verification:
    """The comparison of all outputs, and the number of collectives that XLA compiled, by kind."""

    #: The comparison of each output.
    outputs: tuple[OutputCheck, ...]
    #: The number of collectives that XLA compiled, by kind.
    collectives: dict[str, int]

    @property
    def equal(self) -> bool:
        """Whether every output is equal within tolerance, and an output proves anything.

        Elements that are NaN or infinite in both programs count as equal: :attr:`not_finite` says
        how many there are, :attr:`inconclusive` which outputs have no others.
        """
        proves = not self.outputs or any(output.proves for output in self.outputs)
        return proves and all(output.equal for output in self.outputs)

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """The paths of equal outputs that are NaN or infinite everywhere and prove nothing."""
        return tuple(o.path for o in self.outputs if o.equal and not o.proves)

    @property
    def not_finite(self) -> dict[str, float]:
        """The fractions of elements that are NaN or infinite, of the outputs that have any."""
        return {o.path: 1.0 - o.finite for o in self.outputs if o.finite < 1.0}

    def __str__(self) -> str:
        equal = sum(output.equal for output in self.outputs)
        empty = [output for output in self.outputs if output.path in self.inconclusive]
        what = "NaN" if all(output.nan == 1.0 for output in empty) else "NaN or infinite"
        proven = f", {len(empty)} of them all {what} and inconclusive" if empty else ""
        return f"{equal} of {len(self.outputs)} outputs equal{proven}"


def random_arguments(program: Program, seed: int, *, block: int | None = None) -> list[Any]:
    """Random arguments for a program (:func:`random_operands`), and its captured arrays.

    Arguments with more than ``block`` elements repeat as many, since random numbers take long.
    """
    types = [program.values[v].type for v in program.argument_values]
    drawn = [
        type_ if block is None or math.prod(type_.shape) <= block
        else TensorType((block,), type_.dtype)
        for type_ in types
    ]  # fmt: skip
    arguments = [
        array if array.shape == type_.shape else np.resize(array, type_.shape)
        for array, type_ in zip(random_operands(drawn, seed), types, strict=True)
    ]
    captured = program.captured_arrays
    return [*arguments[: len(arguments) - len(captured)], *captured]


def random_operands(types: Iterable[TensorType], seed: int) -> list[Any]:
    """Random arrays of these types: floats from 0.01 to 0.11, integers from 0 to 7.

    Floats of 4 and 6 bits are from 0.5 to 1.5, integers of 2 bits at most the largest.

    Small integers are valid indices.  Positive numbers do not cancel, so that sums in another order
    differ by rounding only; square roots and divisions stay in their domain.
    """
    random = np.random.default_rng(seed)
    arguments: list[Any] = []
    for type_ in types:
        dtype = numpy_dtype(type_.dtype)
        if type_.dtype == "i1":
            arguments.append(random.random(type_.shape) < 0.5)
        elif integer := re.fullmatch(r"(ui|i)(\d+)", type_.dtype):
            values = 2 ** (int(integer[2]) - (integer[1] == "i"))
            arguments.append(random.integers(0, min(8, values), type_.shape).astype(dtype))
        elif type_.dtype.startswith(("f4", "f6")):  # 0.1 would be 0
            arguments.append((0.5 + random.random(type_.shape)).astype(dtype))
        else:
            arguments.append((0.01 + 0.1 * random.random(type_.shape)).astype(dtype))
    return arguments


def verify(
    program: Program,
    shardings: Shardings,
    *,
    seed: int = 0,
    rtol: float | None = None,
    module_of: Callable[[Program, Shardings], Any] = annotate,
) -> Verification:
    """Runs ``program`` unsharded on one device and sharded on the mesh, and compares the outputs.

    A program with manual regions (``jax.shard_map``) has no form for one device: it runs on its own
    mesh, with values outside of the regions whole on every device.  If there are fewer devices, it
    runs on a mesh of the axes that its regions take.

    A padded program is compared with the program without padding.

    :param seed: the seed of the random arguments.
    :param rtol: the largest relative error of equal outputs; by default :data:`TOLERANCE`.
    :param module_of: writes the sharded module, as for :class:`toast.apply.Runnable`.
    :raises toast.errors.PlanError: if the program is a fact base or too large for this machine, if
        there are too few devices, or if XLA cannot run it on CPU devices.
    """
    reference = UnshardedRun.of(program, seed)
    return reference.verify(shardings, rtol=rtol, module_of=module_of)


@dataclasses.dataclass(frozen=True)
class UnshardedRun:
    """What a program computes from random arguments without shardings, to compare plans with."""

    program: Program
    arguments: list[Any] = dataclasses.field(repr=False)
    #: The results, flat.
    expected: list[Any] = dataclasses.field(repr=False)

    @staticmethod
    def of(program: Program, seed: int = 0) -> UnshardedRun:
        """Runs ``program`` unsharded.  Parameters and errors are those of :func:`verify`.

        If results are NaN or infinite, which no comparison sees through, the inputs are smaller.
        """
        _check_runs(program)
        assert isinstance(program.source, ModuleSource)
        arguments = random_arguments(program, seed)
        with _named_errors(program), word_size(program):
            run = _reference(program, program.source.whole or program.source)
            expected = [np.asarray(array) for array in run(*arguments)]
            if (lost := _not_finite(expected)) > 0:
                smaller = _smaller(program, arguments)
                others = [np.asarray(array) for array in run(*smaller)]
                if _not_finite(others) < lost:
                    arguments, expected = smaller, others
        return UnshardedRun(program, arguments, expected)

    def verify(
        self,
        shardings: Shardings,
        *,
        rtol: float | None = None,
        module_of: Callable[[Program, Shardings], Any] = annotate,
        count: bool = True,
    ) -> Verification:
        """Runs the program sharded, and compares the outputs.

        Parameters and errors are those of :func:`verify`; without ``count``, the collectives of the
        compiled program are not counted, which spares compiling it once more.
        """
        program = self.program
        with _named_errors(program):
            sharded = Runnable(program, shardings, module_of=module_of)
            actual = sharded.run_flat(self.arguments)
        limit = tolerance(program) if rtol is None else rtol
        outputs = tuple(
            check_output(path, np.asarray(a), e, limit)
            for path, a, e in zip(program.results, actual, self.expected, strict=True)
        )
        collectives = collectives_in(sharded.compiled_text()) if count else {}
        return Verification(outputs, collectives)


def _not_finite(arrays: Iterable[Any]) -> int:
    """The number of elements that are NaN or infinite."""
    return sum(
        int((~np.isfinite(array.astype(_wide(array.dtype)))).sum())
        for array in arrays if array.dtype.kind not in "biu"
    )  # fmt: skip


def _smaller(program: Program, arguments: list[Any]) -> list[Any]:
    """Arguments whose products do not grow from layer to layer, as those of 0.01 to 0.11 may.

    The largest dimension of an array may be summed over: 16 elements add up to about 1.
    """
    free = len(arguments) - len(program.captured_arrays)
    types = [program.values[value].type for value in program.argument_values]
    wide = [
        number < free and len(type_.shape) > 1 and type_.dtype in TOLERANCE
        for number, type_ in enumerate(types)
    ]
    return [
        (array * min(1.0, 16 / max(1, *array.shape))).astype(array.dtype) if shrinks else array
        for array, shrinks in zip(arguments, wide, strict=True)
    ]


def _check_runs(program: Program) -> None:
    """Raises :class:`toast.errors.PlanError` if a program cannot run on this machine."""
    if not isinstance(program.source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to run")
    waits = next((s.kind for s in program.signatures if s.kind in _WAITS), None)
    if waits is not None:
        raise PlanError(
            f"{program.name}: its op {waits} waits for the host, and nothing answers here; verify "
            "a program without it"
        )
    callbacks_in(program)
    values = (*program.argument_values, *program.result_values)
    size = sum(
        int(np.prod(t.shape, dtype=np.int64)) * numpy_dtype(t.dtype).itemsize
        for t in (program.values[v].type for v in values)
    )
    if size > _LARGEST_RUN:
        raise PlanError(
            f"{program.name} has {size_text(size)} of arguments and results, which is too "
            "much for CPU devices; verify a smaller form"
        )


@contextlib.contextmanager
def _named_errors(program: Program) -> Iterator[None]:
    """Errors of XLA, for example of an op or a custom call that it lacks on CPU, in one line."""
    try:
        yield
    except ToastError:
        raise
    except Exception as error:
        raise PlanError(
            f"{program.name}: XLA cannot run it on CPU devices: {shortened(str(error), 300)}"
        ) from error


def _reference(program: Program, source: ModuleSource) -> Any:
    """The program without shardings as a function of flat arguments, on as few devices as it needs.

    That is one device.  Manual regions run on the program's own mesh, with whole arguments; if it
    has more devices than there are, on a mesh of the axes that the regions take.
    """
    module = mlir.without_shardings(source.module)
    regions = mlir.Regions(module)
    if not regions:
        return flat_jit(program, module, None, None)
    mesh = Mesh(regions.mesh().axes)
    whole = tuple(((),) * len(program.values[v].type.shape) for v in program.result_values)
    if mesh.devices > len(jax.devices()):
        taken = {axis.name for axis in region_axes(program)}
        mesh = Mesh(tuple(axis for axis in mesh.axes if axis[0] in taken))
        shardings = Shardings(mesh, {}, {}, whole, manual_axes={name: name for name in taken})
        module = annotate(program, shardings)
    shardings = Shardings(mesh, {}, {}, whole)
    return flat_jit(program, module, jax_mesh(shardings), shardings)


def tolerance(program: Program) -> float:
    """The largest relative error of equal outputs of a program (:data:`TOLERANCE`)."""
    return tolerance_of(value.type.dtype for value in program.values)


def tolerance_of(dtypes: Iterable[str]) -> float:
    """As :func:`tolerance`, for values of these element types."""
    floats = {name for name in dtypes if name[0] in "fbc"}
    return max((TOLERANCE.get(name, _COARSEST) for name in floats), default=0.0)


def check_output(path: str, actual: Any, expected: Any, limit: float) -> OutputCheck:
    """Compares an output with the expected one; ``limit`` is the largest relative error."""
    if expected.dtype.kind in "biu":
        same = bool((actual == expected).all())
        error = 0.0 if same else np.inf
        magnitude = float(np.abs(expected.astype(np.float64)).max(initial=0.0))
        return OutputCheck(path, error, error, same, magnitude)
    wide = _wide(expected.dtype)
    a, e = actual.astype(wide), expected.astype(wide)
    finite = np.isfinite(e)
    # Infinities and NaNs have no error; they must be equal.
    alike = np.array_equal(a[~finite], e[~finite], equal_nan=True) and np.isfinite(a[finite]).all()
    error = float(np.abs(a[finite] - e[finite]).max(initial=0.0)) if alike else np.inf
    scale = float(np.abs(e[finite]).max(initial=0.0))
    relative = error / scale if scale else error
    nan, known = (float(np.isnan(e).mean()), float(finite.mean())) if e.size else (0.0, 1.0)
    return OutputCheck(path, error, relative, relative <= limit, scale, nan, known)


def _wide(dtype: Any) -> Any:
    """The type in which elements of a type of floats are compared."""
    return np.complex128 if dtype.kind == "c" else np.float64
