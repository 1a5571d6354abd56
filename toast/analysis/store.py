"""Analyses kept on disk, by the program and the rules that they are of.

An entry holds arrays and JSON under a checksum of both and of what they are of; one that does not
agree is as good as none.  ``TOAST_CACHE=off`` turns it off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import pathlib
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from toast.analysis.analysis import Analysis, Progress, Resolution, analyze_program, silent
from toast.analysis.names import Ints, Names
from toast.analysis.rules import Factor, SignatureRule
from toast.errors import CacheWarning, RuleWarning
from toast.frontend import Program
from toast.resources import directory

#: Another one makes kept entries void.
_FORMAT = 1
#: What the folder may hold; the entries that were not used for longest go first.
_LARGEST_BYTES = 256 * 2**20
_CHECKSUM_BYTES = 32

#: What each place of a kept conflict site and box is.
_WHERE = ("def", "use")


def folder() -> pathlib.Path:
    """Where entries are: ``$XDG_CACHE_HOME/toast/analysis`` or ``~/.cache/toast/analysis``."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "toast" / "analysis"


def analyzed(
    program: Program,
    *,
    rules: Sequence[str | pathlib.Path] = (),
    progress: Progress = silent,
    cache: bool = True,
) -> Analysis:
    """:func:`analyze_program`, or what it said the last time of an equal program and equal rules.

    What cannot be kept is a :class:`toast.errors.CacheWarning`, once for a folder.
    """
    key = None
    begin = time.perf_counter()
    if cache and os.environ.get("TOAST_CACHE", "").lower() not in ("off", "0", "no"):
        with contextlib.suppress(OSError):  # a rule file that cannot be read: an error below
            key = _key(program, rules)
    if key is None:
        return analyze_program(program, rules=rules, progress=progress)
    place = folder() / f"{key.hex()}.toast"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        found = _unpacked(place.read_bytes(), key, program)
        with contextlib.suppress(OSError):
            os.utime(place)  # used now: kept longest
        found.seconds["analysis, kept from before"] = time.perf_counter() - begin
        return found
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        found = analyze_program(program, rules=rules, progress=progress)
    for remark in remarks:
        warnings.warn_explicit(
            remark.message, remark.category, remark.filename, remark.lineno, source=remark.source
        )
    if not any(issubclass(remark.category, RuleWarning) for remark in remarks):
        _keep(place, _packed(found, key))
    return found


# -- what an entry is of -------------------------------------------------------------------------


def _key(program: Program, rules: Sequence[str | pathlib.Path]) -> bytes:
    digest = hashlib.blake2b(_installed(), digest_size=_CHECKSUM_BYTES)
    for path in map(pathlib.Path, rules):
        for file in sorted(path.glob("*.lp")) if path.is_dir() else [path]:
            for part in (str(file).encode(), file.read_bytes()):
                digest.update(len(part).to_bytes(8) + part)
    ops = program.ops
    digest.update(repr(program.signatures).encode())
    digest.update(repr((program.ties, len(program.arguments), len(program.results))).encode())
    for numbers in (
        [op.signature for op in ops],
        [len(op.operands) for op in ops],
        list(itertools.chain.from_iterable([op.operands for op in ops])),
        list(itertools.chain.from_iterable([op.results for op in ops])),
    ):
        array = np.array(numbers, dtype=np.int64)
        digest.update(len(array).to_bytes(8) + array.tobytes())
    return digest.digest()


@functools.cache
def _installed() -> bytes:
    """A digest of all that an analysis follows from besides the program: rules, code, versions."""
    top = pathlib.Path(__file__).parents[1]
    files = [
        directory("facts") / "schema.lp",
        *sorted(directory("rules").glob("*.lp")),
        *sorted(directory("rules").glob("ops/*.lp")),
        *sorted(top.glob("analysis/*.py")),
        *sorted(top.glob("facts/*.py")),
        *sorted(top.glob("logic/*.py")),
    ]
    digest = hashlib.blake2b(
        f"{_FORMAT} {importlib.metadata.version('clingo')} {np.__version__}".encode()
    )
    for file in files:
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)} ".encode() + text)
    return digest.digest()


# -- what an entry holds -------------------------------------------------------------------------


def _packed(analysis: Analysis, key: bytes) -> bytes:
    names, arrays = analysis.names, {}
    for field in dataclasses.fields(Names):
        arrays[field.name] = _small(getattr(names, field.name))
    arrays["color"] = _small(analysis.color)
    arrays["argument_group"] = _small(analysis.argument_group)
    arrays["resolutions"] = _table(((*r.names, r.set, r.group) for r in analysis.resolutions), 4)
    arrays["sites"] = _table(
        ((n, o, _WHERE.index(where), number) for n, o, where, number in analysis.sites), 4
    )
    arrays["boxes"] = _table(analysis.boxes, 5)
    text = json.dumps({
        "rules": [[_plain(rule), [dataclasses.astuple(f) for f in rule.factors]]
                  for rule in analysis.rules],
        "inconsistent": analysis.inconsistent,
    })  # fmt: skip
    arrays["text"] = np.frombuffer(text.encode(), dtype=np.uint8)
    stream = io.BytesIO()
    np.savez(stream, allow_pickle=False, **arrays)
    content = stream.getvalue()
    return _checksum(key, content) + content


def _checksum(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=_CHECKSUM_BYTES).digest()


def _unpacked(data: bytes, key: bytes, program: Program) -> Analysis:
    """The analysis in an entry; raises ValueError and its like where it is damaged."""
    content = data[_CHECKSUM_BYTES:]
    if data[:_CHECKSUM_BYTES] != _checksum(key, content):
        raise ValueError("damaged")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    plain = json.loads(kept.pop("text").tobytes())
    fields: dict[str, Any] = {
        field.name: kept[field.name] if field.name == "shardable" else _large(kept[field.name])
        for field in dataclasses.fields(Names)
    }
    names = Names(**fields)
    return Analysis(
        program=program,
        rules=tuple(_rule(*rule) for rule in plain["rules"]),
        names=names,
        color=_large(kept["color"]),
        resolutions=tuple(
            Resolution((n, o), set_, group) for n, o, set_, group in kept["resolutions"].tolist()
        ),
        sites=tuple((n, o, _WHERE[w], number) for n, o, w, number in kept["sites"].tolist()),
        boxes=tuple((*corners, bool(crossed)) for *corners, crossed in kept["boxes"].tolist()),
        inconsistent=plain["inconsistent"],
        argument_group=_large(kept["argument_group"]),
        seconds={},
    )


def _small(array: Any) -> Any:
    """Numbers in 32 bits, where all of them fit."""
    fits = array.dtype != bool and np.abs(array).max(initial=0) < 2**31
    return array.astype(np.int32) if fits else array


def _large(array: Any) -> Ints:
    return np.asarray(array, dtype=np.int64)


def _table(rows: Iterable[Sequence[Any]], width: int) -> Any:
    return np.array(list(rows), dtype=np.int64).reshape(-1, width)


def _plain(rule: SignatureRule) -> dict[str, Any]:
    """All of a rule but its factors, as JSON has it."""
    file = None if rule.file is None else str(rule.file)
    return {
        "operands": rule.operands, "results": rule.results, "missing": rule.missing, "file": file,
    }  # fmt: skip


def _rule(plain: dict[str, Any], factors: list[list[Any]]) -> SignatureRule:
    def side(tensors: list[list[list[int]]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(tuple(map(tuple, dims)) for dims in tensors)

    return SignatureRule(
        factors=tuple(Factor(*fields) for fields in factors),
        operands=side(plain["operands"]),
        results=side(plain["results"]),
        missing=plain["missing"],
        file=None if plain["file"] is None else pathlib.Path(plain["file"]),
    )


# -- files ---------------------------------------------------------------------------------------


def _keep(place: pathlib.Path, data: bytes) -> None:
    """Write an entry, whole or not at all, and drop what there is too much of."""
    temporary = ""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(temporary, place)
        _prune(place.parent)
    except OSError as failure:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        warnings.warn(
            f"{place.parent}: the analysis cannot be kept for the next time: {failure.strerror}; "
            "TOAST_CACHE=off stops trying",
            CacheWarning, stacklevel=3,
        )  # fmt: skip


def _prune(where: pathlib.Path) -> None:
    """Drop the entries that were not used for longest, until the rest is small enough."""
    found = []
    for path in where.iterdir():
        with contextlib.suppress(OSError):  # another process was faster
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > _LARGEST_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
