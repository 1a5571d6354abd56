"""Named models: what ``toast plan NAME`` looks up before files and modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from toast import ports
from toast.models.parameters import count
from toast.program import Program

#: What experts write for a model, by name: dimensions of arguments (paths with ``*``; negative
#: ones count from the last) with the mesh axes they lie on, ``"first"``, ``"last"`` or ``"all"``.
Strategies = Mapping[str, Sequence[tuple[str, int, str]]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A JAX function with example arguments and the arguments it may overwrite."""

    name: str
    function: Callable[..., Any]
    #: Example arguments: pytrees of arrays or ``jax.ShapeDtypeStruct``.
    arguments: tuple[Any, ...]
    #: Positions of arguments whose buffers the function may reuse.
    donate: tuple[int, ...] = ()
    #: Positions of arguments that are learned.
    learned: tuple[int, ...] = (0,)

    @property
    def parameter_count(self) -> int:
        """How many numbers are learned."""
        return sum(count(self.arguments[position]) for position in self.learned)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model by name: what it is, how to build it, and its small form for running."""

    summary: str
    build: Callable[..., Model]
    small: Callable[..., Model]
    #: Options that ``build`` takes from the command line.
    options: tuple[str, ...] = ()
    #: What experts write for it.
    strategies: Strategies = dataclasses.field(default_factory=dict)


def training(name: str, step: Callable[..., Any], params: Any, moments: Any, *batch: Any) -> Model:
    """A train step as a model: it may overwrite parameters, moments and the number of steps."""
    count = jax.ShapeDtypeStruct((), jnp.int32)
    return Model(name, step, (params, moments, count, *batch), donate=(0, 1, 2))


def entry(
    model: Callable[[Any, str], Model],
    name: str,
    summary: str,
    sizes: tuple[Any, Any],
    options: tuple[str, ...],
    strategies: Strategies,
    **changes: Any,
) -> Entry:
    """The models of two configurations, in full and small size, with ``changes`` to both."""
    full, small = (dataclasses.replace(config, **changes) for config in sizes)
    return Entry(
        summary,
        builder(model, full, name),
        builder(model, small, f"{name}-tiny"),
        options,
        strategies,
    )


def builder(model: Callable[[Any, str], Model], config: Any, name: str) -> Callable[..., Model]:
    """A function of options that change ``config``, a frozen dataclass, and build its model."""

    def build(**options: Any) -> Model:
        return model(dataclasses.replace(config, **options), name)

    return build


class _Models:
    """The frontend for models: their functions, traced at their example arguments."""

    name = "models"
    suffixes: frozenset[str] = frozenset()
    takes_arguments = False
    cacheable = False

    def accepts(self, target: Any) -> bool:
        return isinstance(target, Model)

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        frontend = ports.frontend_of(target.function)
        return frontend.program(
            target.function, *target.arguments, donate=target.donate, name=target.name
        )


# Whoever has a model has imported this module.
ports.register_frontend(_Models())
