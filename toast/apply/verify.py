"""Proof by running: sharded and unsharded outputs compared on small random inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from toast.apply.execute import Runnable, collectives_in, flat_jit, numpy_dtype
from toast.apply.shardings import Shardings
from toast.errors import PlanError
from toast.frontend import Program
from toast.frontend.mlir import Source

#: Largest relative error that counts as equal, by element type: a few roundings of sums that are
#: taken in another order.  Integers and booleans must be identical.
TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "f16": 1e-2, "bf16": 3e-2}

#: Bytes of arguments and results beyond which a run on this machine is refused.
_LARGEST_RUN = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class OutputCheck:
    """One output of the sharded program against the unsharded one."""

    path: str
    max_abs_error: float
    #: Largest absolute error over the largest absolute value.
    relative_error: float
    equal: bool


@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome for all outputs, and the collectives that XLA compiled."""

    outputs: tuple[OutputCheck, ...]
    collectives: dict[str, int]

    @property
    def equal(self) -> bool:
        """Whether every output is equal within tolerance."""
        return all(output.equal for output in self.outputs)


def random_arguments(program: Program, seed: int) -> list[Any]:
    """Small positive random arguments; integers in 0..7, so that indices are in range.

    Positive numbers do not cancel: sums in another order then differ by rounding only, and square
    roots and divisions of the program stay in their domain.
    """
    random = np.random.default_rng(seed)
    arguments: list[Any] = []
    for value in program.argument_values:
        type_ = program.values[value].type
        dtype = numpy_dtype(type_.dtype)
        if type_.dtype == "i1":
            arguments.append(random.random(type_.shape) < 0.5)
        elif dtype.kind in "iu":
            arguments.append(random.integers(0, 8, type_.shape).astype(dtype))
        else:
            arguments.append((0.01 + 0.1 * random.random(type_.shape)).astype(dtype))
    return arguments


def verify(
    program: Program, shardings: Shardings, *, seed: int = 0, rtol: float | None = None
) -> Verification:
    """Run ``program`` unsharded on one device and sharded on the mesh; compare every output.

    ``rtol`` overrides :data:`TOLERANCE`.  Raises :class:`toast.errors.PlanError` when there are
    too few devices or the program is too large to run here.
    """
    if not isinstance(program.source, Source):
        raise PlanError(f"{program.name} is a fact base: there is no program to run")
    values = (*program.argument_values, *program.result_values)
    size = sum(
        int(np.prod(t.shape, dtype=np.int64)) * numpy_dtype(t.dtype).itemsize
        for t in (program.values[v].type for v in values)
    )
    if size > _LARGEST_RUN:
        raise PlanError(
            f"{program.name} has {size / 2**30:.3g} GiB of arguments and results, too much to run "
            "on CPU devices; verify a smaller form of it"
        )
    sharded = Runnable(program, shardings)
    arguments = random_arguments(program, seed)
    expected = flat_jit(program, program.source.module, None, None)(*arguments)
    actual = sharded.run_flat(arguments)
    outputs = tuple(
        _check(path, np.asarray(a), np.asarray(e), rtol)
        for path, a, e in zip(program.results, actual, expected, strict=True)
    )
    return Verification(outputs, collectives_in(sharded.compiled_text()))


def _check(path: str, actual: Any, expected: Any, rtol: float | None) -> OutputCheck:
    name = str(expected.dtype)
    kinds = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    if expected.dtype.kind in "biu":
        same = bool((actual == expected).all())
        return OutputCheck(path, 0.0 if same else np.inf, 0.0 if same else np.inf, same)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, e = actual.astype(wide), expected.astype(wide)
    error = float(np.abs(a - e).max(initial=0.0))
    scale = float(np.abs(e).max(initial=0.0))
    relative = error / scale if scale else error
    limit = TOLERANCE.get(kinds.get(name, ""), 1e-5) if rtol is None else rtol
    finite = bool(np.isfinite(e).all())
    return OutputCheck(path, error, relative, finite and relative <= limit)
