"""The form of a train step that all production models share: precision, recomputation, scans."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from toast.errors import TargetError
from toast.models.optimizers import adam_moments, adamw, train_step
from toast.models.recomputation import checkpointed
from toast.models.registry import Model, training

#: The element types of products and of weights.
PRECISIONS = {
    "mixed": ("bfloat16", "float32"), "bf16": ("bfloat16", "bfloat16"),
    "f32": ("float32", "float32"),
}  # fmt: skip


#: The element type of gradients of weights in products that are being traced; empty for that of
#: products.
_GRADIENTS = contextvars.ContextVar("_GRADIENTS", default="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """Options of a train step; each model adds its sizes."""

    batch: int = 16
    #: Whether every layer has ops and arguments of its own, instead of scans over equal layers.
    unroll: int = 0
    #: Recomputation (:func:`toast.models.recomputation.checkpointed`).
    remat: str = "names"
    offload: str = ""
    #: A key of :data:`PRECISIONS`.
    precision: str = "mixed"
    #: ``compute`` if products compute the gradients of weights in their own element type, ``f32``
    #: if in float32: devices then add up float32 numbers, too.
    gradients: str = "compute"
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise TargetError(f"precision {self.precision}: use one of {', '.join(PRECISIONS)}")
        if self.gradients not in ("compute", "f32"):
            raise TargetError(f"gradients {self.gradients}: use compute or f32")

    @property
    def compute(self) -> str:
        """The element type of products."""
        return PRECISIONS[self.precision][0]

    @property
    def weights(self) -> str:
        """The element type of parameters."""
        return PRECISIONS[self.precision][1]

    def checkpointed(
        self, layer: Callable[..., Any], names: tuple[str, ...], *, scanned: bool
    ) -> Callable[..., Any]:
        """The layer with the recomputation of this form; ``names`` are those of its values."""
        return checkpointed(layer, self.remat, self.offload, names, scanned=scanned)

    def run(
        self, layer: Callable[[Any, Any], Any], x: Any, layers: Any, names: tuple[str, ...]
    ) -> Any:
        """Equal layers in turn: ``x = layer(x, parameters)``.

        ``layers`` are stacked parameters or, if unrolled, a list.
        """
        body = self.checkpointed(layer, names, scanned=not self.unroll)
        if not self.unroll:
            return jax.lax.scan(lambda x, one: (body(x, one), None), x, layers)[0]
        for one in layers:
            x = body(x, one)
        return x

    def train(self, name: str, loss: Callable[..., jax.Array], params: Any, *batch: Any) -> Model:
        """The train step with AdamW that minimizes ``loss(params, *batch)``; abstract arguments."""
        update = functools.partial(adamw, rate=self.learning_rate)

        @functools.wraps(loss)
        def traced(*args: Any) -> jax.Array:
            token = _GRADIENTS.set("float32" if self.gradients == "f32" else "")
            try:
                return loss(*args)
            finally:
                _GRADIENTS.reset(token)

        return training(name, train_step(traced, update), params, adam_moments(params), *batch)


def product(spec: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """An einsum in the element type of ``x``, whatever that of the weights is."""
    if _GRADIENTS.get():
        wide: jax.Array = _product(spec, _GRADIENTS.get(), x, weights)
        return wide
    return jnp.einsum(spec, x, weights.astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(spec: str, gradients: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, weights.astype(x.dtype))


def _product_forward(
    spec: str, gradients: str, x: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.einsum(spec, x, weights.astype(x.dtype)), (x, weights)


def _product_backward(
    spec: str, gradients: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weights = residuals
    left, right, result = spec.replace("->", ",").split(",")
    of_x = jnp.einsum(f"{result},{right}->{left}", gradient, weights.astype(x.dtype))
    of_weights = jnp.einsum(
        f"{left},{result}->{right}", x, gradient, preferred_element_type=gradients
    )
    return of_x, of_weights.astype(weights.dtype)


_product.defvjp(_product_forward, _product_backward)
