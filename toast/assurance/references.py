"""Functions that compute custom calls, which XLA may lack on this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from toast.program import Signature

#: Custom calls that only annotate their operand.
ANNOTATIONS = (
    "Sharding", "annotate_device_placement", "InspectSharding", "LayoutConstraint", "MoveToHost",
    "MoveToDevice", "xla.megascale.provide_metadata",
)  # fmt: skip

#: Functions of the operands (arrays) that compute custom calls, by target.
References = Mapping[str, Callable[..., Any]]


def _halves(x: Any) -> tuple[Any, Any]:
    return jax.numpy.uint32(x >> 32), jax.numpy.uint32(x & 0xFFFFFFFF)


def _best(x: Any, *_rest: Any, count: int) -> Any:
    return jax.lax.top_k(x, count)


#: The functions for custom calls with rules that XLA may lack on this machine.
_COMPUTED: References = {
    **{target: lambda x: x for target in ANNOTATIONS},
    "mhlo.erf": jax.lax.erf,
    "X64Combine": lambda low, high: jax.numpy.uint64(low) | jax.numpy.uint64(high) << 32,
    "X64SplitHigh": lambda x: _halves(x)[0],
    "X64SplitLow": lambda x: _halves(x)[1],
    "Cholesky": lambda x: np.linalg.cholesky(x @ x.mT + np.eye(x.shape[-1])),
    "Eigh": lambda x: np.linalg.eigh(x @ x.mT)[::-1],
    "LuDecomposition": jax.lax.linalg.lu,
    "ProductOfElementaryHouseholderReflectors": jax.lax.linalg.householder_product,
    "Qr": lambda x: (x, np.diagonal(np.linalg.qr(x, mode="r"), axis1=-2, axis2=-1)),
}


def reference_of(signature: Signature) -> Callable[..., Any] | None:
    """The function that computes a custom call; None for other ops and unknown targets."""
    target = str(signature.attribute("call_target_name") or "")
    if target in ("TopK", "mhlo.topk", "ApproxTopK", "PartialReduce"):
        return functools.partial(_best, count=signature.results[0].shape[-1])
    return _COMPUTED.get(target)
