"""Tables kept on disk, by the program, rules and op classes that they follow from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse

from toast import kept
from toast.cost.liveness import Liveness
from toast.cost.overlap import Windows
from toast.cost.tables import Tables, build
from toast.space import Space

#: Another one makes kept entries void.
_FORMAT = "1"
_KIND = "tables"

#: Programs of fewer ops have their tables sooner than a file is read.
_LEAST_OPS = 1000


def tables(space: Space, *, product_operands: str = "") -> Tables:
    """:func:`toast.cost.tables.build`, or what it made the last time of an equal space.

    What cannot be kept is a :class:`toast.errors.CacheWarning`.
    """
    key = None
    if kept.enabled() and len(space.analysis.program.ops) >= _LEAST_OPS:
        with contextlib.suppress(OSError):
            key = _key(space, product_operands)
    if key is not None:
        with contextlib.suppress(*kept.DAMAGE):
            if entry := kept.load(_KIND, key):
                return _unpacked(*entry)
    found = build(space, product_operands=product_operands)
    if key is not None:
        kept.keep(_KIND, key, *_packed(found), "cost tables")
    return found


def _key(space: Space, product_operands: str) -> bytes:
    analysis, classes = space.analysis, space.classes
    names = analysis.names
    arrays = (
        names.use_op, names.use_index, names.use_value, names.signature, classes.of_op,
        classes.representative, classes.count, classes.divisor,
    )  # fmt: skip
    return kept.digest([
        _FORMAT, np.__version__, importlib.metadata.version("scipy"), _code(), product_operands,
        analysis.program.digest, repr(analysis.program.repeats), repr(analysis.rules),
        *(part for array in arrays for part in (str(array.dtype), array.tobytes())),
    ])  # fmt: skip


@functools.cache
def _code() -> bytes:
    top = pathlib.Path(__file__).parents[1]
    stages = ("frontend", "facts", "analysis", "space", "cost")
    files = (path for stage in stages for path in sorted(top.glob(f"{stage}/**/*.py")))
    return kept.digest_of_files([top / "graphs.py", *files])


# -- what an entry holds -------------------------------------------------------------------------

#: Fields that are neither arrays nor sparse; in pairs of arrays, one pair behind the other.
_NESTED: dict[str, Any] = {"windows": Windows, "live": Liveness}


def _packed(found: Tables) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = dict(_arrays("", found))
    for number, (later, earlier) in enumerate(found.pairs):
        arrays[f"pairs/{number}"] = np.stack([later, earlier])
    return {"peak_dtype": found.peak_dtype, "pairs": len(found.pairs)}, arrays


def _arrays(prefix: str, found: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(found):
        name, value = prefix + field.name, getattr(found, field.name)
        if field.name in _NESTED:
            yield from _arrays(f"{name}/", value)
        elif isinstance(value, sparse.csr_array):
            shape = np.array(value.shape, dtype=np.int64)
            parts = (value.data, value.indices, value.indptr, shape)
            yield from zip((f"{name}/{part}" for part in _PARTS), parts, strict=True)
        elif isinstance(value, np.ndarray):
            yield name, value


#: Of a sparse array.
_PARTS = ("data", "indices", "indptr", "shape")


def _unpacked(plain: Any, arrays: dict[str, Any]) -> Tables:
    pairs = tuple((rows[0], rows[1]) for rows in (
        arrays[f"pairs/{number}"] for number in range(plain["pairs"])
    ))  # fmt: skip
    given = {"peak_dtype": tuple(plain["peak_dtype"]), "pairs": pairs}
    return Tables(**_fields("", Tables, arrays, given))


def _fields(prefix: str, kind: Any, arrays: dict[str, Any], given: Any) -> dict[str, Any]:
    found = dict(given)
    for field in dataclasses.fields(kind):
        name = prefix + field.name
        if field.name in _NESTED:
            inner = _NESTED[field.name]
            found[field.name] = inner(**_fields(f"{name}/", inner, arrays, {}))
        elif field.name not in given and f"{name}/data" in arrays:
            data, indices, indptr, shape = (arrays[f"{name}/{part}"] for part in _PARTS)
            sizes = tuple(shape.tolist())
            found[field.name] = sparse.csr_array((data, indices, indptr), shape=sizes)
        elif field.name not in given:
            found[field.name] = arrays[name]
    return found
