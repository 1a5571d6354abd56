"""Tables kept on disk, by the program, rules and op classes that they follow from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from toast import disk_cache
from toast.cost.gathering import Buffered, build
from toast.cost.tables import Tables
from toast.space import Space

#: Another one makes kept entries void.
_FORMAT = "2"
_KIND = "tables"

#: Programs of fewer ops have their tables sooner than a file is read.
_LEAST_OPS = 1000


def tables(space: Space, terms: Sequence[Buffered], *, product_operands: str = "") -> Tables:
    """:func:`toast.cost.gathering.build`, or what it made the last time of an equal space.

    ``terms`` are always the same ones: what is kept is kept by the code that says them.  What
    cannot be kept is a :class:`toast.errors.CacheWarning`.
    """
    key = None
    if disk_cache.enabled() and len(space.analysis.program.ops) >= _LEAST_OPS:
        with contextlib.suppress(OSError):
            key = _key(space, product_operands)
    if key is not None:
        with contextlib.suppress(*disk_cache.DAMAGE):
            if entry := disk_cache.load(_KIND, key):
                unpacked: Tables = _unpacked(*entry)
                return unpacked
    built = build(space, terms, product_operands=product_operands)
    if key is not None:
        disk_cache.keep(_KIND, key, *_packed(built), "cost tables")
    return built


def _key(space: Space, product_operands: str) -> bytes:
    analysis, classes = space.analysis, space.classes
    names = analysis.names
    arrays = (
        names.use_op, names.use_index, names.use_value, names.signature, classes.of_op,
        classes.representative, classes.count, classes.divisor,
    )  # fmt: skip
    return disk_cache.digest([
        _FORMAT, np.__version__, importlib.metadata.version("scipy"), _code(), product_operands,
        analysis.program.digest, repr(analysis.program.repeats), repr(analysis.rules),
        *(part for array in arrays for part in (str(array.dtype), array.tobytes())),
    ])  # fmt: skip


@functools.cache
def _code() -> bytes:
    top = pathlib.Path(__file__).parents[1]
    stages = ("program", "facts", "analysis", "space", "cost")
    files = (path for stage in stages for path in sorted(top.glob(f"{stage}/**/*.py")))
    return disk_cache.digest_of_files([top / "graphs.py", *files])


# -- what an entry holds -------------------------------------------------------------------------

#: Of a sparse array.
_PARTS = ("data", "indices", "indptr", "shape")


def _packed(record: Any, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The texts, and the arrays, of a record of arrays, texts and records of these."""
    texts: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        name, value = prefix + field.name, getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            for all_of, inner in zip((texts, arrays), _packed(value, f"{name}/"), strict=True):
                all_of.update(inner)
        elif isinstance(value, sparse.csr_array):
            shape = np.array(value.shape, dtype=np.int64)
            parts = (value.data, value.indices, value.indptr, shape)
            arrays.update(zip((f"{name}/{part}" for part in _PARTS), parts, strict=True))
        elif isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            texts[name] = value
    return texts, arrays


def _unpacked(texts: Any, arrays: dict[str, Any], kind: Any = Tables, prefix: str = "") -> Any:
    fields: dict[str, Any] = {}
    for field, type_ in typing.get_type_hints(kind).items():
        name = prefix + field
        if dataclasses.is_dataclass(type_):
            fields[field] = _unpacked(texts, arrays, type_, f"{name}/")
        elif f"{name}/data" in arrays:
            data, indices, indptr, shape = (arrays[f"{name}/{part}"] for part in _PARTS)
            fields[field] = sparse.csr_array((data, indices, indptr), shape=tuple(shape.tolist()))
        else:
            fields[field] = arrays[name] if name in arrays else tuple(texts[name])
    return kind(**fields)
