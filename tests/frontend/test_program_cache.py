"""Kept programs: equal to lowered ones, of their model or file only, never trusted."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from tests.helpers import FORMS, f32
from toast import api, disk_cache, targets
from toast.errors import TargetError
from toast.frontend import program_cache
from toast.models import build
from toast.program import Program


@pytest.fixture(autouse=True)
def kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOAST_CACHE", "")
    return tmp_path / "cache" / "toast" / "program"


def same(one: Program, other: Program) -> bool:
    """Equal, down to the types of attributes and the places of ops."""
    ops = range(len(one.ops))
    return (
        one == other
        and one.digest == other.digest
        and repr(dataclasses.replace(one, source=None))
        == repr(dataclasses.replace(other, source=None))
        and [one.location(op) for op in ops] == [other.location(op) for op in ops]
    )


@pytest.mark.parametrize("model", FORMS)
def test_a_kept_program_is_the_lowered_one(model: str, kept: pathlib.Path) -> None:
    lowered = targets.load(model, small=True)
    assert not kept.exists()
    first = targets.load(model, small=True, module=False)
    (entry,) = kept.iterdir()
    again = targets.load(model, small=True, module=False)
    assert isinstance(again.source, program_cache.CachedLocations)
    assert not isinstance(first.source, program_cache.CachedLocations)
    assert same(lowered, again)
    assert [*kept.iterdir()] == [entry]


def test_who_needs_the_module_gets_it() -> None:
    for _ in range(2):
        targets.load("mlp", module=False)
    assert targets.load("mlp").source.module is not None


def test_another_size_is_another_entry(kept: pathlib.Path) -> None:
    for batch in (64, 128, None):
        targets.load("mlp", options={"batch": batch}, module=False)
    again = targets.load("mlp", options={"batch": 64}, module=False)
    assert isinstance(again.source, program_cache.CachedLocations)
    assert again.values[0].type.shape[0] == 64
    assert len([*kept.iterdir()]) == 3


def test_a_file_is_known_by_its_content(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "f.mlir"
    for size in (8, 16):
        program = api.program_of(lambda x: x + 1.0, f32(size))
        path.write_text(str(program.source.module))
        lowered = targets.load(str(path))
        for _ in range(2):
            assert same(lowered, found := targets.load(str(path), module=False))
        assert isinstance(found.source, program_cache.CachedLocations)
        assert found.location(1).file == str(path)


def test_what_cannot_be_known_is_not_kept(kept: pathlib.Path) -> None:
    targets.load("toast.models.zoo:mlp", module=False)
    targets.load("facts/mlp.lp", module=False)
    with pytest.raises(TargetError, match="no model named mlpp"):
        targets.load("mlpp", module=False)
    with pytest.raises(TargetError, match="has no option layers"):
        targets.load("mlp", options={"layers": 2}, module=False)
    assert not kept.exists()


def test_settings_and_code_are_part_of_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").write_text("one")

    def load() -> bool:
        made = program_cache.lowered(["m"], [code], lambda: api.program_of(build("mlp")))
        return isinstance(made.source, program_cache.CachedLocations)

    assert [load(), load()] == [False, True]
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    assert [load(), load()] == [False, True]
    (code / "model.py").write_text("two")
    assert [load(), load()] == [False, True]
    monkeypatch.setenv("TOAST_CACHE", "off")
    assert not load()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-100],
        lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
    ],
)  # fmt: skip
def test_a_damaged_entry_is_lowered_anew(damage, kept: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    first = targets.load("mlp", module=False)
    (path,) = kept.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    again = targets.load("mlp", module=False)
    assert not isinstance(again.source, program_cache.CachedLocations)
    assert same(first, again)
    assert isinstance(targets.load("mlp", module=False).source, program_cache.CachedLocations)


def test_signed_entries_of_another_content_count_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has the key may sign anything."""
    made = targets.load("t2b-tiny", module=False)
    plain, arrays = program_cache._packed(made)
    plain = json.loads(json.dumps(plain))

    def kept(plain: object, arrays: object) -> bool:
        monkeypatch.setattr(disk_cache, "load", lambda *_: (plain, arrays))
        return program_cache.lowered(["m"], [], lambda: made) is not made

    monkeypatch.setattr(disk_cache, "keep", lambda *_: None)
    assert kept(plain, arrays)
    for name, array in arrays.items():
        damaged = [array.astype(np.float64), array[:-1], array[::-1], np.stack([array, array])]
        for value in (-5, 2**31 - 1):
            damaged.append(array.copy())
            damaged[-1].flat[array.size // 2] = value
        for other in damaged:
            if np.array_equal(other, array) and other.dtype == array.dtype:
                continue
            # Any other number of times, or another line, is as good.
            free = name in ("location", "repeats") and other.dtype.kind == "i"
            free = free and other.shape == array.shape and other.min() >= 0
            free = free and (name == "repeats" or other.max() <= array.max())
            assert free or not kept(plain, {**arrays, name: other}), name
        assert not kept(plain, {n: a for n, a in arrays.items() if n != name})
    for key, value in plain.items():
        damaged = [None, 7.5, {"a": 1}]
        damaged += [value[:-1], [*value, *value[-1:]]] if isinstance(value, list) and value else []
        for other in damaged:
            free = key in ("ties", "labels", "constraints", "locations", "types") and other
            assert free or not kept({**plain, key: other}, arrays) or key == "signatures", key
        assert not kept({k: v for k, v in plain.items() if k != key}, arrays)
    for signature in (
        ["dot", [["a", 1.5]], [0], [0]], ["dot", [["a", None]], [0], [0]], ["dot", [], [-1], [0]],
        ["dot", [], [10**6], [0]], ["dot", [], [0]], [1, [], [0], [0]],
    ):  # fmt: skip
        assert not kept({**plain, "signatures": [signature, *plain["signatures"][1:]]}, arrays)
