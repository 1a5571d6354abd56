"""Equations of jaxprs in place of others: those of a function, and a scan in several parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core

from toast.frontend.residual_names import with_inner_jaxpr


def split_scan(equation: Any, lengths: Sequence[int], bodies: Sequence[Any]) -> list[Any]:
    """The equations of a scan in parts, one after the other, each with a body of its own.

    :param equation: the equation of the scan.
    :param lengths: how many iterations each part has.
    :param bodies: the jaxpr of each part.
    """
    if len(lengths) == 1:
        return [with_body(equation, bodies[0])]
    first, last = _carried(equation.params)
    backwards = equation.params["reverse"]

    def in_parts(*inputs: Any) -> list[Any]:
        constants, carried, stacked = inputs[:first], inputs[first:last], inputs[last:]
        results: list[Sequence[Any]] = []
        for (begin, end), body in zip(_ranges(lengths), bodies, strict=True):
            here = _turned(begin, end, sum(lengths)) if backwards else (begin, end)
            part = with_body(equation, body)
            outputs = part.primitive.bind(
                *constants, *carried, *(jax.lax.slice_in_dim(x, *here) for x in stacked),
                **{**part.params, "length": end - begin},
            )  # fmt: skip
            carried, new = outputs[: last - first], outputs[last - first :]
            results.append(new)
        if backwards:
            results.reverse()
        return [*carried, *(jax.lax.concatenate(parts, 0) for parts in zip(*results, strict=True))]

    new = jax.make_jaxpr(in_parts)(*map(like, equation.invars))
    parts = spliced(getattr(new, "jaxpr", new), equation.invars, equation.outvars)
    assert parts is not None, "the results of a scan are new"
    return parts


def _carried(parameters: Any) -> tuple[int, int]:
    """The number of the first input of a scan that it carries, and of the first after these."""
    if "ft_in" in parameters:  # since JAX 0.12
        constants, carried, _ = (len([*part]) for part in parameters["ft_in"].unpack())
    else:
        constants, carried = parameters["num_consts"], parameters["num_carry"]
    return constants, constants + carried


def with_body(equation: Any, body: Any) -> Any:
    """A scan with another body: a jaxpr, or a ``ClosedJaxpr``."""
    if getattr(body, "jaxpr", body) is body:
        return with_inner_jaxpr(equation, body)
    return equation.replace(params={**equation.params, "jaxpr": body})


def _ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [*itertools.pairwise(itertools.accumulate(lengths, initial=0))]


def _turned(begin: int, end: int, length: int) -> tuple[int, int]:
    """Where elements are in an array that a scan reads from its end."""
    return length - end, length - begin


def spliced(jaxpr: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any] | None:
    """The equations of a jaxpr with other variables; ``None`` if it returns an argument."""
    if jaxpr.constvars:
        return None
    replaced = {id(v): new for v, new in zip(jaxpr.invars, inputs, strict=True)}
    for variable, new in zip(jaxpr.outvars, outputs, strict=True):
        if isinstance(variable, jax.extend.core.Literal) or id(variable) in replaced:
            return None
        replaced[id(variable)] = new

    def read(variable: Any) -> Any:
        return replaced.get(id(variable), variable)

    return [
        e.replace(invars=[*map(read, e.invars)], outvars=[*map(read, e.outvars)])
        for e in jaxpr.eqns
    ]


def like(variable: Any) -> jax.ShapeDtypeStruct:
    """The type of a variable."""
    aval = variable.aval
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False))
    )


__all__ = ["like", "spliced", "split_scan", "with_body"]
