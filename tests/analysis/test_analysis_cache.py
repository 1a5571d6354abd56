"""Kept analyses: equal to computed ones, of their program and rules only, never trusted."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

import toast
from tests.helpers import f32, mlp
from toast import api
from toast import disk_cache as entries
from toast.analysis import Analysis, analysis_cache, analyze_program
from toast.errors import CacheWarning, RuleError, RuleWarning
from toast.models import build
from toast.program import Program

KEPT = "analysis (cached)"


@pytest.fixture(autouse=True)
def kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOAST_CACHE", "")
    return tmp_path / "cache" / "toast" / "analysis"


def program() -> Program:
    return api.program_of(build("t2b-tiny"))


def same(one: Analysis, other: Analysis) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b)
        if dataclasses.is_dataclass(a) and not isinstance(a, type) and type(a) is type(b):
            return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
        return a == b

    fields = {f.name for f in dataclasses.fields(Analysis)} - {"program", "seconds"}
    return all(equal(getattr(one, name), getattr(other, name)) for name in fields)


@pytest.mark.parametrize("model", ["t2b-tiny", "attention", "mlp"])
def test_a_kept_analysis_is_the_computed_one(model: str, kept: pathlib.Path) -> None:
    given = api.program_of(build(model))
    first = toast.analyze(given)
    assert KEPT not in first.seconds
    assert len(list(kept.iterdir())) == 1
    again = toast.analyze(api.program_of(build(model)))
    assert KEPT in again.seconds
    assert same(first, again)
    assert same(analyze_program(given), again)
    assert again.counts() == first.counts()


def test_halos_survive(kept: pathlib.Path) -> None:
    def shifted(x):  # type: ignore[no-untyped-def]
        return x[1:] + x[:-1]

    first, again = (toast.analyze(shifted, f32(65, 8)) for _ in range(2))
    assert KEPT in again.seconds
    assert same(first, again)


def test_another_program_is_another_entry(kept: pathlib.Path) -> None:
    for sizes in (32, 64):
        found = toast.analyze(mlp, f32(8, 16), f32(16, sizes), f32(sizes, 4))
        assert KEPT not in found.seconds
    # What is called otherwise, or stands on another line, is the same program.
    renamed = toast.analyze(lambda a, b, c: mlp(a, b, c), f32(8, 16), f32(16, 64), f32(64, 4))
    assert KEPT in renamed.seconds
    assert renamed.program.arguments == ("a", "b", "c")
    donating = (
        toast.analyze(lambda a: a + 1.0, f32(8)),
        toast.analyze(lambda a: a + 1.0, f32(8), donate=(0,)),
    )
    assert all(KEPT not in found.seconds for found in donating)


def test_rules_are_part_of_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.lp"
    path.write_text("stays_whole(tanh).\n")
    plain, ruled = toast.analyze(program()), toast.analyze(program(), rules=[path])
    assert KEPT not in ruled.seconds
    again = toast.analyze(program(), rules=[path])
    assert KEPT in again.seconds
    assert same(ruled, again)
    path.write_text("elementwise(tanh).\n")
    assert KEPT not in toast.analyze(program(), rules=[path]).seconds
    assert KEPT in toast.analyze(program()).seconds
    assert plain.counts() == toast.analyze(program()).counts()
    monkeypatch.setattr(analysis_cache, "_installed", lambda: b"other rules, or another version")
    assert KEPT not in toast.analyze(program()).seconds


def test_rules_are_refused_and_remarked_on_each_time(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuleError, match="no such rule file"):
        toast.analyze(program(), rules=[tmp_path / "none.lp"])
    path = tmp_path / "r.lp"
    path.write_text("elementwise(tanh) :- colour(tanh).\n%! colour(Kind): never said.\n")
    for _ in range(2):
        with pytest.warns(RuleWarning, match="does not occur"):
            toast.analyze(program(), rules=[path])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-100],
        lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: b"no entry at all" * 100,
    ],
)  # fmt: skip
def test_a_damaged_entry_is_computed_anew(damage, kept: pathlib.Path) -> None:  # type: ignore[no-untyped-def]
    first = toast.analyze(program())
    (path,) = kept.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    again = toast.analyze(program())
    assert KEPT not in again.seconds
    assert same(first, again)
    assert path.read_bytes()[: len(whole)] == whole  # and written anew
    assert KEPT in toast.analyze(program()).seconds


def test_an_entry_of_another_key_is_not_taken(kept: pathlib.Path) -> None:
    toast.analyze(program())
    (path,) = kept.iterdir()
    entry = path.read_bytes()
    path.unlink()
    toast.analyze(mlp, f32(8, 16), f32(16, 32), f32(32, 4))
    (other,) = kept.iterdir()
    other.write_bytes(entry)
    assert KEPT not in toast.analyze(mlp, f32(8, 16), f32(16, 32), f32(32, 4)).seconds


def test_it_can_be_turned_off(kept: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toast.analyze(program(), cache=False)
    monkeypatch.setenv("TOAST_CACHE", "off")
    toast.analyze(program())
    assert not kept.exists()


def test_a_function_may_have_an_argument_of_that_name(kept: pathlib.Path) -> None:
    def decode(x, *, cache):  # type: ignore[no-untyped-def]
        return x + cache

    found = toast.analyze(decode, f32(8), cache=f32(8))
    assert found.program.arguments == ("x", "cache")
    assert len(list(kept.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_note(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(CacheWarning, match=r"cannot be cached: .*; set TOAST_CACHE=off"):
        found = toast.analyze(program())
    assert found.counts()["conflicts"] > 0


def test_the_folder_stays_bounded(kept: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(size: int) -> pathlib.Path:
        before = set(kept.iterdir()) if kept.exists() else set()
        assert KEPT not in toast.analyze(lambda x: x + 1.0, f32(size)).seconds
        ((path),) = set(kept.iterdir()) - before
        return path

    old, used = entry(3), entry(4)
    left = kept / ".crashed.part"
    left.write_bytes(b"x" * 10)
    os.utime(left, (0, 0))
    os.utime(used, (1, 1))
    os.utime(old, (2, 2))
    assert KEPT in toast.analyze(lambda x: x + 1.0, f32(4)).seconds  # and so the younger one
    monkeypatch.setattr(entries, "_LARGEST_BYTES", int(2.5 * used.stat().st_size))
    new = entry(5)
    assert {path.name for path in kept.iterdir()} == {used.name, new.name}


def test_rules_that_change_while_a_process_lives_are_others(
    kept: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    given = program()
    rules = tmp_path / "rules"
    shutil.copytree(analysis_cache.directory("rules"), rules)
    shutil.copytree(analysis_cache.directory("facts"), tmp_path / "facts")
    monkeypatch.setattr(analysis_cache, "directory", lambda name: tmp_path / name)
    toast.analyze(given)
    assert KEPT in toast.analyze(given).seconds
    with (rules / "ops" / "shape.lp").open("a") as file:
        file.write("% another line\n")
    assert KEPT not in toast.analyze(given).seconds
    assert len(list(kept.iterdir())) == 2


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = pathlib.Path("~/.cache/toast")  # as it is for a user without an entry
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: nowhere)
    with pytest.warns(CacheWarning, match="no home folder; set XDG_CACHE_HOME"):
        toast.analyze(program())


def test_signed_entries_of_another_content_count_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has the key may sign anything."""
    given = program()
    made = toast.analyze(given)
    plain, arrays = analysis_cache._packed(made)
    plain = json.loads(json.dumps(plain))
    monkeypatch.setattr(entries, "keep", lambda *_: None)

    def kept(plain: object, arrays: object) -> bool:
        monkeypatch.setattr(entries, "load", lambda *_: (plain, arrays))
        found = toast.analyze(given)
        assert same(found, made)
        return KEPT in found.seconds

    assert kept(plain, arrays)
    for name, array in arrays.items():
        damaged = [
            array.astype(np.float64), array.astype("U3"), np.stack([array, array]),
            np.array(7),
        ]  # fmt: skip
        if array.size:
            for value in (-1, 2**31 - 1, len(made.names.signature) * 100):
                damaged.append(array.copy())
                damaged[-1].flat[0] = value
            if name.endswith("group"):
                damaged.append(array[:-1])
        for other in damaged:
            assert not kept(plain, {**arrays, name: other}), name
        assert not kept(plain, {n: a for n, a in arrays.items() if n != name})
    rule, factors = plain["rules"][0]
    color, groups, orders = plain["orders"][0]
    for changed in (
        {"inconsistent": "no"}, {"inconsistent": -1}, {"rules": plain["rules"][:-1]},
        {"rules": [[rule, factors[:-1]], *plain["rules"][1:]]},
        {"rules": [[{**r, "operands": [[[99]]]}, f] for r, f in plain["rules"]]},
        {"rules": [[{**r, "results": [[[]]]}, f] for r, f in plain["rules"]]},
        {"rules": [[r, [["a", *f[1:]][:5] for f in fs]] for r, fs in plain["rules"]]},
        {"orders": [[10**9, groups, orders]]}, {"orders": [[color, groups, []]]},
        {"orders": [[color, [*groups, 10**6], [[*o, 0] for o in orders]]]},
        {"orders": [[color, groups, [[2 for _ in o] for o in orders]]]},
        {"orders": [[color, groups, [o[:-1] for o in orders]]]}, {"more": 1},
    ):  # fmt: skip
        assert not kept({**plain, **changed}, arrays), changed
    for other in (None, [], {}, "text"):
        assert not kept(other, arrays)
