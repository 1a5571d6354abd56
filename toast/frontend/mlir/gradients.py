"""Where JAX differentiates a function: a place at which the function can still be changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api

#: Changes a function that ``jax.vjp`` is about to differentiate at primals.
Change = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def changed_before_gradients(change: Change) -> Iterator[None]:
    """Applies ``change`` to functions that this thread differentiates with ``jax.vjp``.

    ``jax.grad`` and ``jax.value_and_grad`` call it by its name in their module, so that functions
    that were made from these earlier are covered, too.  Gradients inside a function that is being
    changed stay as they are.
    """
    thread, inside = threading.get_ident(), False
    original = api.vjp

    def vjp(fun: Callable[..., Any], *primals: Any, **options: Any) -> Any:
        nonlocal inside
        if inside or threading.get_ident() != thread:
            return original(fun, *primals, **options)
        inside = True
        try:
            return original(change(fun, primals), *primals, **options)
        finally:
            inside = False

    with _ONE_AT_A_TIME:
        public = jax.vjp
        api.vjp = jax.vjp = vjp
        try:
            yield
        finally:
            api.vjp, jax.vjp = original, public
