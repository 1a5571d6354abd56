"""Cached analyses, by program and rules (entries of :mod:`toast.disk_cache`)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import pathlib
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from toast import disk_cache
from toast.analysis.analysis import Analysis, Progress, analyze_program, silent
from toast.analysis.derivation import Resolution
from toast.analysis.names import Ints, Names
from toast.analysis.rules import Factor, RuleFiles, SignatureRule, rule_texts
from toast.errors import RuleWarning
from toast.logic import LogicText
from toast.program import Program
from toast.resources import directory

#: Another one makes kept entries void.
_FORMAT = "3"
_KIND = "analysis"

#: What each place of a kept conflict site and box is.
_WHERE = ("def", "use")


def analyzed(
    program: Program,
    *,
    rules: RuleFiles = (),
    progress: Progress = silent,
    cache: bool = True,
) -> Analysis:
    """:func:`analyze_program`, or what it said the last time of an equal program and equal rules.

    What cannot be kept is a :class:`toast.errors.CacheWarning`, once for a folder.
    """
    key = None
    begin = time.perf_counter()
    # Read once: the entry is of the texts that are analyzed.
    texts = rule_texts(rules)
    if cache and disk_cache.enabled():
        with contextlib.suppress(OSError):
            key = _key(program, texts)
    if key is None:
        return analyze_program(program, rules=texts, progress=progress)
    with contextlib.suppress(*disk_cache.DAMAGE):
        if entry := disk_cache.load(_KIND, key):
            found = _unpacked(*entry, program)
            found.seconds["analysis (cached)"] = time.perf_counter() - begin
            return found
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        found = analyze_program(program, rules=texts, progress=progress)
    for remark in remarks:
        warnings.warn_explicit(
            remark.message, remark.category, remark.filename, remark.lineno, source=remark.source
        )
    if not any(issubclass(remark.category, RuleWarning) for remark in remarks):
        disk_cache.keep(_KIND, key, *_packed(found), _KIND)
    return found


# -- what an entry is of -------------------------------------------------------------------------


def _key(program: Program, rules: Sequence[LogicText]) -> bytes:
    ops = program.ops
    numbers = (
        [op.signature for op in ops],
        [len(op.operands) for op in ops],
        list(itertools.chain.from_iterable([op.operands for op in ops])),
        list(itertools.chain.from_iterable([op.results for op in ops])),
    )
    return disk_cache.digest([
        _installed(),
        disk_cache.digest(part for text in rules for part in (str(text), text.text.encode())),
        repr(program.signatures),
        repr((program.ties, len(program.arguments), len(program.results))),
        *(np.array(row, dtype=np.int64).tobytes() for row in numbers),
    ])  # fmt: skip


def _installed() -> bytes:
    """A digest of all that an analysis follows from besides the program: rules, code, versions.

    Rules are read anew by every analysis, so they are here as well.
    """
    rules = [
        directory("facts") / "schema.lp",
        *sorted(directory("rules").glob("*.lp")),
        *sorted(directory("rules").glob("ops/*.lp")),
    ]
    versions = (importlib.metadata.version("clingo"), np.__version__)
    return disk_cache.digest([_FORMAT, *versions, _CODE, disk_cache.digest_of_files(rules)])


def _digest_of_code() -> bytes:
    top = pathlib.Path(__file__).parents[1]
    stages = (sorted(top.glob(f"{stage}/**/*.py")) for stage in ("analysis", "facts", "logic"))
    return disk_cache.digest_of_files([top / "graphs.py", *itertools.chain.from_iterable(stages)])


#: Of the code that runs: files may change while this process lives.
_CODE = _digest_of_code()


# -- what an entry holds -------------------------------------------------------------------------


def _packed(analysis: Analysis) -> tuple[dict[str, Any], disk_cache.Arrays]:
    names, arrays = analysis.names, {}
    for field in dataclasses.fields(Names):
        arrays[field.name] = disk_cache.small(getattr(names, field.name))
    arrays["color"] = disk_cache.small(analysis.color)
    arrays["argument_group"] = disk_cache.small(analysis.argument_group)
    arrays["color_group"] = disk_cache.small(analysis.color_group)
    arrays["resolutions"] = _table(((*r.names, r.set, r.group) for r in analysis.resolutions), 4)
    arrays["sites"] = _table(
        ((n, o, _WHERE.index(where), number) for n, o, where, number in analysis.sites), 4
    )
    arrays["boxes"] = _table(analysis.boxes, 5)
    plain = {
        "rules": [[_plain(rule), [dataclasses.astuple(f) for f in rule.factors]]
                  for rule in analysis.rules],
        "inconsistent": analysis.inconsistent,
        "orders": [[color, *both] for color, both in analysis.orders.items()],
    }  # fmt: skip
    return plain, arrays


def _unpacked(plain: Any, arrays: disk_cache.Arrays, program: Program) -> Analysis:
    """The analysis in an entry; raises one of ``disk_cache.DAMAGE`` where it is none."""
    fields: dict[str, Any] = {
        field.name: arrays[field.name] if field.name == "shardable" else _large(arrays[field.name])
        for field in dataclasses.fields(Names)
    }
    names = Names(**fields)
    return Analysis(
        program=program,
        rules=tuple(_rule(*rule) for rule in plain["rules"]),
        names=names,
        color=_large(arrays["color"]),
        resolutions=tuple(
            Resolution((n, o), set_, group) for n, o, set_, group in arrays["resolutions"].tolist()
        ),
        sites=tuple((n, o, _WHERE[w], number) for n, o, w, number in arrays["sites"].tolist()),
        boxes=tuple((*corners, bool(crossed)) for *corners, crossed in arrays["boxes"].tolist()),
        inconsistent=plain["inconsistent"],
        argument_group=_large(arrays["argument_group"]),
        color_group=_large(arrays["color_group"]),
        orders={
            color: (tuple(groups), tuple(map(tuple, orders)))
            for color, groups, orders in plain["orders"]
        },
        seconds={},
    )


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
