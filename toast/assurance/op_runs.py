"""Runs single ops on lists of arguments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from toast.apply.module_functions import flat_jit
from toast.errors import PlanError, TargetError
from toast.frontend import mlir, stablehlo
from toast.program import TensorType


@dataclasses.dataclass(frozen=True)
class OpRun:
    """An op (text, operand types, result types), and the argument lists of its runs."""

    op: tuple[str, tuple[TensorType, ...], tuple[TensorType, ...]]
    runs: list[list[Any]]
    #: A function that computes the op instead of XLA.
    reference: Callable[..., Any] | None = None


#: The results of each run of a job, or the reason why it did not run.
Outputs = list[list[Any]] | str

#: The number of ops that are compiled together: compilation takes most of the time.
_BATCH = 48


def run_all(jobs: Sequence[OpRun]) -> list[Outputs]:
    """The outputs of each job; several jobs without a reference are compiled together."""
    plain = [job for job in jobs if job.reference is None]
    outputs: list[Outputs] = []
    with jax.enable_x64(True):  # ops may have 64-bit types
        for start in range(0, len(plain), _BATCH):
            outputs += _run(plain[start : start + _BATCH])
        rest = iter(outputs)
        return [next(rest) if job.reference is None else _run_reference(job) for job in jobs]


def _run_reference(job: OpRun) -> Outputs:
    """Runs a job by its reference."""
    assert job.reference is not None
    try:
        trees = [job.reference(*arguments) for arguments in job.runs]
        outputs = [[np.asarray(r) for r in jax.tree.leaves(results)] for results in trees]
    except (Exception, SystemExit) as error:  # raised by a user's function
        return f"its reference fails: {type(error).__name__}: {_first_line(error)}"
    shapes = [type_.shape for type_ in job.op[2]]
    for row in outputs:
        returned = [r.shape for r in row]
        if returned != shapes or any(r.dtype.kind not in _NUMBERS for r in row):
            listed = ", ".join(f"{r.dtype}{list(r.shape)}" for r in row) or "nothing"
            return f"its reference returns {listed}, and the op has results of shapes " + ", ".join(
                str(list(shape)) for shape in shapes
            )
    return outputs


#: Kinds of numpy's number types; V is that of JAX's additional types.
_NUMBERS = "biufcV"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _run(jobs: Sequence[OpRun]) -> list[Outputs]:
    """Runs jobs as one program; if that fails, in halves, to isolate the failing job."""
    try:
        module = mlir.module_of_ops([job.op for job in jobs])
        program = stablehlo.from_module(module, name="ops")
        call = flat_jit(program, program.source.module, None, None)
        outputs: list[list[list[Any]]] = [[] for _ in jobs]
        for run in range(max(len(job.runs) for job in jobs)):
            arguments = [a for job in jobs for a in job.runs[run % len(job.runs)]]
            results = iter([np.asarray(r) for r in call(*arguments)])
            for job, runs in zip(jobs, outputs, strict=True):
                runs.append([next(results) for _ in job.op[2]])
        return [runs[: len(job.runs)] for job, runs in zip(jobs, outputs, strict=True)]
    except (TargetError, PlanError) as error:
        reason = f"cannot be built in parts: {error}"
    except Exception as error:  # XLA's own: no kernel for this op here
        reason = f"does not run here: {_first_line(error)}"
    if len(jobs) == 1:
        return [reason]
    target = re.search(r"No registered implementation for .*custom call to (\S+)", reason)
    without = [bool(target) and f'"{target[1]}"' in job.op[0] for job in jobs]  # type: ignore[index]
    if any(without):
        others = [job for job, lacks in zip(jobs, without, strict=True) if not lacks]
        rest = iter(_run(others) if others else [])
        return [reason if lacks else next(rest) for lacks in without]
    half = len(jobs) // 2
    return _run(jobs[:half]) + _run(jobs[half:])
