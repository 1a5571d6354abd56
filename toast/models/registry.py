"""Named models: what ``toast plan NAME`` looks up before files and modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
