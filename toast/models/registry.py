"""Named models: what ``toast plan NAME`` looks up before files and modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A JAX function with example arguments and the arguments it may overwrite."""

    name: str
    function: Callable[..., Any]
    #: Example arguments: pytrees of arrays or ``jax.ShapeDtypeStruct``.
    arguments: tuple[Any, ...]
    #: Positions of arguments whose buffers the function may reuse.
    donate: tuple[int, ...] = ()
