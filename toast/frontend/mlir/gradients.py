"""Where JAX differentiates a function: a place at which the function can still be changed."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api

#: Changes a function that ``jax.vjp`` is about to differentiate at primals.
Change = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]


def argument_names(function: Callable[..., Any], primals: tuple[Any, ...]) -> list[str]:
    """The paths of the arrays in primals, in the words of the function: ``params['wq']``.

    An argument without a known name has an empty path.

    :param function: as :data:`Change` has it.
    """
    own, numbers = function, tuple(range(len(primals)))
    code = getattr(function, "__code__", None)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) if code else {}
    if {"f", "dyn_argnums"} <= cells.keys():  # jax.grad differentiates some arguments of a function
        own, numbers = cells["f"].cell_contents, cells["dyn_argnums"].cell_contents
    try:
        parameters = [*inspect.signature(own).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in plain]
    first = [names[n] if 0 <= n < len(names) else "" for n in numbers]
    return [
        f"{first[path[0].idx]}{jax.tree_util.keystr(path[1:])}" if first[path[0].idx] else ""
        for path, _ in jax.tree_util.tree_flatten_with_path(primals)[0]
    ]


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
