"""Kept cost tables: those that are built, of their space only, never trusted."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from scipy import sparse

from tests.helpers import analyzed, model_of
from toast import disk_cache
from toast.cost import DEFAULT_TERMS, CostModel, table_cache
from toast.cost.gathering import build
from toast.cost.tables import Tables
from toast.errors import CacheWarning
from toast.hardware import Mesh
from toast.space import Space


@pytest.fixture(autouse=True)
def kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache of the test's own, for small programs, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOAST_CACHE", "")
    monkeypatch.setattr(table_cache, "_LEAST_OPS", 0)
    return tmp_path / "cache" / "toast" / "tables"


def space(name: str = "t2b-tiny", mesh: str = "data=2,model=2") -> Space:
    return Space(analyzed(name), Mesh.parse(mesh))


def tables_of(space: Space, product_operands: str = "") -> Tables:
    return table_cache.tables(space, DEFAULT_TERMS, product_operands=product_operands)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, sparse.csr_array) and isinstance(other, sparse.csr_array):
        return one.shape == other.shape and all(
            same(getattr(one, part), getattr(other, part)) for part in ("data", "indices", "indptr")
        )
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        fields = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in fields
        )
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("model", ["t2b-tiny", "attention", "mlp"])
def test_kept_tables_are_the_built_ones(model: str, kept: pathlib.Path) -> None:
    made = tables_of(space(model))
    assert len(list(kept.iterdir())) == 1
    assert same(made, build(space(model), DEFAULT_TERMS))
    assert same(tables_of(space(model)), made)
    assert len(list(kept.iterdir())) == 1


def test_prices_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model_of(analyzed("t2b-tiny"), "data=2,model=2")
    CostModel(built.space, built.hardware, keep=True)
    monkeypatch.setattr(table_cache, "build", None)  # which the kept ones do without
    again = CostModel(built.space, built.hardware, keep=True)
    states = np.stack([built.space.unsharded] + [
        built.space.apply(built.space.unsharded, action) for action in built.space.actions
    ])  # fmt: skip
    assert same(again.price(states), built.price(states))


def test_other_spaces_have_others(kept: pathlib.Path) -> None:
    tables_of(space())
    tables_of(space(), product_operands="bf16")
    tables_of(Space(analyzed("t2b-tiny"), Mesh.parse("data=2,model=2"), collapse=False))
    assert len(list(kept.iterdir())) == 3


def test_damaged_ones_are_built_anew(kept: pathlib.Path) -> None:
    made = tables_of(space())
    (path,) = kept.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert same(tables_of(space()), made)
    assert path.read_bytes() != data


def _cut(array: np.ndarray) -> np.ndarray:
    return array[:-1]


def _beyond(array: np.ndarray) -> np.ndarray:
    return np.where(np.arange(array.size).reshape(array.shape) == 0, array.max() + 2**20, array)


def _below(array: np.ndarray) -> np.ndarray:
    return np.where(np.arange(array.size).reshape(array.shape) == 0, -2, array)


def _wider(array: np.ndarray) -> np.ndarray:
    return np.stack([array, array])


def _other(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32 if array.dtype.kind == "i" else np.int32)


@pytest.mark.parametrize("damage", [_cut, _beyond, _below, _wider, _other])
def test_signed_entries_of_another_content_are_built_anew(
    damage: Callable[[np.ndarray], np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the key may sign anything."""
    given = space()
    made = tables_of(given)
    texts, arrays = table_cache._packed(made)
    monkeypatch.setattr(table_cache, "build", lambda *_, **__: made)
    monkeypatch.setattr(disk_cache, "keep", lambda *_: None)

    def built(entry: object) -> bool:
        monkeypatch.setattr(disk_cache, "load", lambda *_: entry)
        return tables_of(given) is made

    assert not built((texts, arrays))
    for name, array in arrays.items():
        numbers = name.endswith(("op_class", "slot", "value", "_class", "indices"))
        if damage is _cut and not len(array):  # this program has no kernels
            continue
        if damage in (_cut, _wider, _other) or (numbers and array.size):
            assert built((texts, {**arrays, name: damage(array)})), name
    for entry in ({}, arrays), ({**texts, "dtypes": [1]}, arrays), (texts, {}), (None, arrays):
        assert built(entry)


def test_what_is_small_or_turned_off_is_not_kept(
    kept: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOAST_CACHE", "off")
    tables_of(space())
    monkeypatch.setenv("TOAST_CACHE", "")
    monkeypatch.setattr(table_cache, "_LEAST_OPS", 10**9)
    tables_of(space())
    model_of(analyzed("t2b-tiny"), "data=2,model=2")
    assert not kept.exists()


def test_what_cannot_be_kept_is_said(tmp_path: pathlib.Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.warns(CacheWarning, match="the cost tables cannot be cached"):
        tables_of(space())
