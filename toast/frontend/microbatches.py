"""``toast.accumulate``: gradients of a batch that is cut into microbatches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend.core
import jax.numpy as jnp

from toast.errors import TargetError
from toast.frontend import memory_tracing

#: How the results of microbatches are combined.
Reduction = Literal["mean", "sum"]


def accumulate(
    function: Callable[..., Any],
    *,
    batch_argnums: int | Sequence[int],
    microbatches: int = 1,
    reduce: Any = "mean",
    weight: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function of a batch that runs on one microbatch after the other and combines the results.

    ``function`` is, for example, ``jax.value_and_grad(loss)``.  Each microbatch has every
    ``microbatches``-th row of the batch, so that a batch that is sharded along its first dimension
    stays where it is.  A loop adds up the results, those of less than four bytes in float32.

    :param function: a function whose results are means, or sums, over the rows of its batch.
    :param batch_argnums: positions of the arguments whose arrays have the batch as their first
        dimension.
    :param microbatches: their number, unless a plan chooses it
        (``toast.plan(..., microbatches=N)``).  It must divide the batch.
    :param reduce: ``"mean"`` or ``"sum"``, for all results or as a tree prefix of them.
    :param weight: for means over something else than rows, such as tokens that a mask selects: a
        function of the same arguments that returns the number of a microbatch.
    :raises toast.errors.TargetError: when called, if the number does not divide the batch, or a
        mean of whole numbers is asked for.

    >>> import jax, jax.numpy as jnp, toast
    >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
    >>> whole = jax.value_and_grad(loss)
    >>> parts = toast.accumulate(whole, batch_argnums=1, microbatches=4)
    >>> w, x = jnp.ones(3), jnp.arange(24.0).reshape(8, 3)
    >>> [bool(jnp.allclose(a, b)) for a, b in zip(whole(w, x), parts(w, x))]
    [True, True]
    """
    places = (batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums)
    _check(microbatches, "microbatches")

    @functools.wraps(function)
    def accumulated(*arguments: Any, **keywords: Any) -> Any:
        trace = memory_tracing.current()
        count = microbatches
        if trace is not None:
            count = trace.microbatches or microbatches
            trace.accumulated.append(count)
        if count == 1:
            return function(*arguments, **keywords)
        batch_places = {_place(place, len(arguments)) for place in places}
        batch = {place: arguments[place] for place in sorted(batch_places)}
        _check_batch(batch, count)

        def of_part(part: dict[int, Any]) -> tuple[Any, Any]:
            every = [part.get(number, whole) for number, whole in enumerate(arguments)]
            counted = jnp.float32(1) if weight is None else weight(*every, **keywords)
            return function(*every, **keywords), jnp.asarray(counted, jnp.float32)

        parts = jax.tree.map(functools.partial(_parts, count=count), batch)
        first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), parts)
        with memory_tracing.repeated(count):
            closed, (shapes, _) = jax.make_jaxpr(of_part, return_shape=True)(first)
        rules = _rules(reduce, shapes)
        run = jax.extend.core.jaxpr_as_fun(closed)

        def step(carried: tuple[list[Any], Any], part: dict[int, Any]) -> tuple[Any, None]:
            totals, weights = carried
            *result, counted = run(*jax.tree.leaves(part))
            added = [
                total + _wide(leaf) * (counted.astype(total.dtype) if rule == "mean" else 1)
                if weight is not None else total + _wide(leaf)
                for total, leaf, rule in zip(totals, result, rules, strict=True)
            ]  # fmt: skip
            return (added, weights + counted), None

        zeros = [jnp.zeros(leaf.shape, _wide_type(leaf.dtype)) for leaf in jax.tree.leaves(shapes)]
        (totals, weights), _ = jax.lax.scan(step, (zeros, jnp.float32(0)), parts)
        combined = [
            (total / weights.astype(total.dtype) if rule == "mean" else total).astype(leaf.dtype)
            for total, rule, leaf in zip(totals, rules, jax.tree.leaves(shapes), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), combined)

    return accumulated


def _check(number: Any, name: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise TargetError(f"{name} {number!r}: use a whole number from 1")


def check_microbatches(number: int | None) -> None:
    """Raises :class:`toast.errors.TargetError` unless it is a number of microbatches or None."""
    if number is not None:
        _check(number, "microbatches")


def _place(place: int, count: int) -> int:
    if not -count <= place < count:
        raise TargetError(
            f"batch_argnums {place}: the function got {count} arguments; use the position of one"
        )
    return place % count


def _check_batch(batch: dict[int, Any], count: int) -> None:
    """Checks that all arrays have a batch of one size, which ``count`` divides."""
    sizes: dict[str, int] = {}
    for place, argument in batch.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            label = f"argument {place}{jax.tree_util.keystr(path)}"
            if not jnp.shape(leaf):
                raise TargetError(
                    f"batch_argnums: {label} is a number and has no batch; leave it out, or give "
                    "it a first dimension"
                )
            sizes[label] = jnp.shape(leaf)[0]
    if len({*sizes.values()}) > 1:
        (one, small), (other, large) = [
            next((label, size) for label, size in sizes.items() if size == wanted)
            for wanted in (min(sizes.values()), max(sizes.values()))
        ]
        raise TargetError(
            f"batch_argnums: {one} has {small} rows, and {other} has {large}; use arguments with "
            "one batch as their first dimension"
        )
    for label, size in sizes.items():
        if size % count:
            divisors = [str(n) for n in range(1, size + 1) if size % n == 0]
            raise TargetError(
                f"microbatches {count}: does not divide the batch of {size} rows ({label}); use "
                f"{', '.join(divisors[:12])}"
            )


def _parts(leaf: Any, count: int) -> Any:
    """``[batch, ...]`` as ``[count, batch / count, ...]``; part ``i`` has rows ``i::count``."""
    rows, *rest = jnp.shape(leaf)
    return jnp.swapaxes(jnp.reshape(leaf, (rows // count, count, *rest)), 0, 1)


def _rules(reduce: Any, shapes: Any) -> list[Reduction]:
    """The reduction of each result."""
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    rules: list[Reduction]
    try:
        rules = jax.tree.leaves(
            jax.tree.map(lambda rule, tree: [rule] * len(jax.tree.leaves(tree)), reduce, shapes)
        )
    except ValueError:
        rules = []
    if len(rules) != len(leaves) or not {*rules} <= {"mean", "sum"}:
        raise TargetError(
            f"reduce {reduce!r}: use 'mean' or 'sum', or a tree of these that fits the results"
        )
    for rule, (path, leaf) in zip(rules, leaves, strict=True):
        if rule == "mean" and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TargetError(
                f"reduce: result{jax.tree_util.keystr(path)} is {leaf.dtype}, which has no mean; "
                "use 'sum' for it"
            )
    return rules


def _wide_type(dtype: Any) -> Any:
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype("float32") if small else dtype


def _wide(leaf: Any) -> Any:
    return leaf.astype(_wide_type(leaf.dtype))
