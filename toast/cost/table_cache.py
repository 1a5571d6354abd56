"""Cache of tables on disk, by program, rules and op classes."""

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
from toast.cost.tables import EntityTable, Tables
from toast.program import QUANTITIES
from toast.space import Space

#: Version of the entries; a new one invalidates all.
_FORMAT = "7"
_KIND = "tables"

#: Ops below which building the tables is faster than reading a file.
_LEAST_OPS = 1000


def tables(
    space: Space,
    terms: Sequence[Buffered],
    *,
    product_operands: str = "",
    grouped_operands: str = "",
    lanes: int = 1,
    vector_bytes: float = 0.0,
    relayout_bytes: float = 0.0,
    flops_beside: float = 0.0,
    elements_beside: float = 0.0,
    loops: bool = False,
    partitioned: bool = True,
    delays: bool = False,
    recomputes_images: bool = False,
) -> Tables:
    """:func:`toast.cost.gathering.build`, with a cache on disk.

    ``terms`` must be TOAST's own: the key contains only their names and their code.  If the tables
    cannot be stored, a :class:`toast.errors.CacheWarning` is issued.
    """
    key = None
    if disk_cache.enabled() and len(space.analysis.program.ops) >= _LEAST_OPS:
        with contextlib.suppress(OSError):
            names = " ".join(term.name for term in terms)
            passes = " ".join(space.analysis.program.passes) if lanes > 1 else ""
            key = _key(
                space,
                f"{product_operands} {grouped_operands} {lanes} {vector_bytes} "
                f"{relayout_bytes} {flops_beside} {elements_beside} {loops} {partitioned} "
                f"{delays} {recomputes_images} {passes} {names}",
            )
    if key is not None:
        with contextlib.suppress(*disk_cache.DAMAGE):
            if entry := disk_cache.load(_KIND, key):
                unpacked: Tables = _unpacked(*entry)
                _check(unpacked, space)
                return unpacked
    built = build(
        space, terms, product_operands=product_operands, grouped_operands=grouped_operands,
        lanes=lanes, vector_bytes=vector_bytes, relayout_bytes=relayout_bytes,
        flops_beside=flops_beside, elements_beside=elements_beside, loops=loops,
        partitioned=partitioned, delays=delays, recomputes_images=recomputes_images,
    )  # fmt: skip
    if key is not None:
        disk_cache.keep(_KIND, key, *_packed(built), "cost tables")
    return built


def _key(space: Space, options: str) -> bytes:
    analysis, classes = space.analysis, space.classes
    names = analysis.names
    arrays = (
        names.use_op, names.use_index, names.use_value, names.signature, classes.of_op,
        classes.representative, classes.count, classes.divisor,
    )  # fmt: skip
    return disk_cache.digest([
        _FORMAT, np.__version__, importlib.metadata.version("scipy"), _code(), options,
        analysis.program.digest, repr(analysis.program.repeats),
        repr(analysis.program.condition_reads), repr(analysis.rules),
        *(part for array in arrays for part in (str(array.dtype), array.tobytes())),
    ])  # fmt: skip


@functools.cache
def _code() -> bytes:
    top = pathlib.Path(__file__).parents[1]
    stages = ("program", "facts", "analysis", "space", "cost")
    files = (path for stage in stages for path in sorted(top.glob(f"{stage}/**/*.py")))
    return disk_cache.digest_of_files([top / "graphs.py", top / "distinct.py", *files])


# -- entries ----------------------------------------------------------------------------------

#: Parts of a sparse array.
_PARTS = ("data", "indices", "indptr", "shape")


def _packed(record: Any, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """The texts and the arrays of a record of arrays, texts and records."""
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
            if {indices.dtype.kind, indptr.dtype.kind, shape.dtype.kind} != {"i"}:
                raise ValueError(f"{name}: no places")
            fields[field] = sparse.csr_array((data, indices, indptr), shape=tuple(shape.tolist()))
            fields[field].check_format(full_check=True)
            if data.dtype != np.float64 or np.isnan(data).any():
                raise ValueError(f"{name}: no numbers")
        elif name in arrays:
            fields[field] = arrays[name]
            if arrays[name].dtype != _dtype(type_) or np.isnan(arrays[name]).any():
                raise ValueError(f"{name}: of another type")
        else:
            fields[field] = tuple(texts[name])
            if not all(isinstance(text, str) for text in fields[field]):
                raise ValueError(f"{name}: no texts")
    return kind(**fields)


def _dtype(annotation: Any) -> np.dtype[Any]:
    """The dtype of ``NDArray[...]``, in newer and older versions of numpy."""
    last = annotation.__args__[-1]
    dtype: np.dtype[Any] = np.dtype(getattr(last, "__args__", (last,))[0])
    return dtype


def _check(tables: Tables, space: Space) -> None:
    """Raise ``ValueError`` if tables do not fit one another, or the space."""
    program, width = space.analysis.program, tables.slots.dim.shape[1]
    slots, values, uses, products = (
        len(table) for table in (tables.slots, tables.values, tables.uses, tables.products)
    )
    ops, ranks = len(tables.ops), tables.values.sizes.shape[1]
    if ops != len(space.classes.count):
        raise ValueError("other op classes")
    for field in dataclasses.fields(tables):
        table = getattr(tables, field.name)
        if isinstance(table, EntityTable):
            rows = {len(getattr(table, each.name)) for each in dataclasses.fields(table)}
            if len(rows) != 1:
                raise ValueError(f"{field.name}: columns of different lengths")
    for array, end in (
        (tables.slots.op_class, ops), (tables.slots.dim, ranks), (tables.products.op_class, ops),
        (tables.ops.dtype, len(tables.dtypes)), (tables.products.group, 5),
        (tables.tensors.product, products), (tables.tensors.slot, slots),
        (tables.kernels.op_class, ops), (tables.kernels.quantity, len(QUANTITIES)),
        (tables.kernels.queries, width),
        (tables.kernel_tensors.op_class, ops), (tables.kernel_tensors.slot, slots),
        (tables.values.slot, slots), (tables.uses.value, values), (tables.uses.slot, slots),
        (tables.pairs.later, uses), (tables.pairs.earlier, uses),
        (tables.joint_sums.value, values), (tables.joint_sums.other, values),
        (tables.operands.value, values), (tables.operands.result, values),
        (tables.operands.last, ranks), (tables.operands.last_of_other, ranks),
        (tables.events.op, len(program.ops)), (tables.events.column, tables.columns.width),
        (tables.events.value, len(program.values)), (tables.results, uses),
        (tables.value_class, values), (tables.use_class, uses),
    ):  # fmt: skip
        least = -1 if any(array is column for column in (
            tables.slots.dim, tables.operands.last, tables.operands.last_of_other,
        )) else 0  # fmt: skip
        if array.size and not (least <= array.min() and array.max() < end):
            raise ValueError("out of range")
    windows = tables.windows
    bins, count = windows.room.shape[1], len(windows.room)
    names = space.analysis.names
    for column, shape in (
        (tables.slots.halo, (slots, width)), (tables.slots.ring, (slots, width)),
        (tables.products.size, (products, 4)),
        (tables.products.group, (products, width)), (tables.values.reduces, (values, width)),
        (tables.kernels.over, (len(tables.kernels), width)),
        (tables.values.workspace_over, (*tables.values.workspace.shape, width)),
        (tables.values.looped, (values, ranks)), (tables.uses.looped, (uses, ranks)),
        (tables.uses.sums, (uses, width)),
        (tables.operands.along, (len(tables.operands), ranks)),
        (tables.operands.contracted, (len(tables.operands), ranks)), (windows.bins, (bins,)),
        (windows.of_value, (count, values)), (windows.of_use, (count, uses)),
        (windows.beside_maker, (count, values)), (windows.beside_user, (count, uses)),
        (tables.growth[:1], (min(1, tables.growth.shape[0]), tables.columns.width)),
        (tables.buffer_growth, tables.growth.shape), (tables.gap_growth, tables.growth.shape),
        (tables.value_class, (len(names.value_op),)), (tables.use_class, (len(names.use_op),)),
        (tables.idle, (len(names.value_op),)),
        (tables.results, (len(program.results),)),
        (tables.columns.ends, (len(tables.columns.names),)),
    ):  # fmt: skip
        if column.shape != shape:
            raise ValueError(f"of shape {column.shape}, not {shape}")
    if (np.diff(tables.columns.ends, prepend=0) < 0).any():
        raise ValueError("columns that end before they begin")
