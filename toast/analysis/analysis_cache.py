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
from typing import Annotated, Any

import msgspec
import numpy as np

from toast import disk_cache
from toast.analysis.analysis import Analysis, Progress, analyze_program, silent
from toast.analysis.derivation import Resolution
from toast.analysis.names import joined
from toast.analysis.rules import (
    Factor,
    Linearity,
    Lowering,
    RuleFiles,
    SignatureRule,
    TensorRing,
    rule_texts,
)
from toast.boundary.typed import checked
from toast.errors import RuleWarning
from toast.logic import Edges, LogicText
from toast.program import QUANTITIES, CausalQueries, KernelCost, Program, Signature, TensorType
from toast.resources import directory

#: The version of cache entries; entries of other versions are not used.
_FORMAT = "8"
_KIND = "analysis"

#: The kinds of sites, by their number in an entry.
_WHERE = ("def", "use")


def analyzed(
    program: Program,
    *,
    rules: RuleFiles = (),
    progress: Progress = silent,
    cache: bool = True,
    lowering: Lowering = "xla",
) -> Analysis:
    """The result of :func:`analyze_program`, from the cache if the program and rules are equal.

    Parameters and errors are those of :func:`analyze_program`; ``cache=False`` disables the cache.
    If an entry cannot be written, there is a :class:`toast.errors.CacheWarning` once per folder.
    """
    key = None
    begin = time.perf_counter()
    # The files are read once, so the key is that of the analyzed texts.
    texts = rule_texts(rules)
    if cache and disk_cache.enabled():
        with contextlib.suppress(OSError):
            key = _key(program, texts, lowering)
    if key is None:
        return analyze_program(program, rules=texts, progress=progress, lowering=lowering)
    with contextlib.suppress(*disk_cache.DAMAGE):
        if entry := disk_cache.load(_KIND, key):
            analysis = _unpacked(*entry, program, lowering)
            analysis.seconds["analysis (cached)"] = time.perf_counter() - begin
            return analysis
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        analysis = analyze_program(program, rules=texts, progress=progress, lowering=lowering)
    for remark in remarks:
        warnings.warn_explicit(
            remark.message, remark.category, remark.filename, remark.lineno, source=remark.source
        )
    if not any(issubclass(remark.category, RuleWarning) for remark in remarks):
        disk_cache.keep(_KIND, key, *_packed(analysis), _KIND)
    return analysis


# -- keys of entries -------------------------------------------------------------------------


def _key(program: Program, rules: Sequence[LogicText], lowering: Lowering) -> bytes:
    ops = program.ops
    numbers = (
        [op.signature for op in ops],
        [len(op.operands) for op in ops],
        list(itertools.chain.from_iterable([op.operands for op in ops])),
        list(itertools.chain.from_iterable([op.results for op in ops])),
    )
    return disk_cache.digest([
        _installed(),
        lowering,
        program.platform,
        disk_cache.digest(part for text in rules for part in (str(text), text.text.encode())),
        repr(program.signatures),
        repr((program.ties, len(program.arguments), len(program.results))),
        *([_decomposed(program)] if program.decompositions and lowering == "local" else []),
        *(np.array(row, dtype=np.int64).tobytes() for row in numbers),
    ])  # fmt: skip


def _decomposed(program: Program) -> bytes:
    """A digest of the decompositions of composites, and of those inside."""
    return disk_cache.digest(
        part
        for signature, bodies in program.decompositions.items()
        for body in bodies
        for part in (repr(signature), body.digest, repr(body.condition_reads), _decomposed(body))
    )


def _installed() -> bytes:
    """A digest of what determines an analysis besides the program: rules, code, versions.

    Every analysis reads the rules again, so the digest includes them.
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
    return disk_cache.digest_of_files(
        [top / "graphs.py", top / "distinct.py", *itertools.chain.from_iterable(stages)]
    )


#: The digest of the running code; its files may change while the process runs.
_CODE = _digest_of_code()


# -- contents of entries -------------------------------------------------------------------------


def _packed(analysis: Analysis) -> tuple[dict[str, Any], disk_cache.Arrays]:
    small = disk_cache.small
    arrays = {
        # All else of the names, and the colors, follow from the program and its rules.
        "edges": small(analysis.names.edges), "tied": small(analysis.names.tied),
        "argument_group": small(analysis.argument_group),
        "color_group": small(analysis.color_group),
        "resolutions": _table(((*r.names, r.set, r.group) for r in analysis.resolutions), 4),
        "sites": _table(
            ((n, o, _WHERE.index(where), number) for n, o, where, number in analysis.sites), 4
        ),
        "boxes": _table(analysis.boxes, 5),
    }  # fmt: skip
    plain = {
        "rules": [[_plain(rule), [dataclasses.astuple(f) for f in rule.factors]]
                  for rule in analysis.rules],
        "inconsistent": analysis.inconsistent,
        "orders": [[color, *both] for color, both in analysis.orders.items()],
    }  # fmt: skip
    return plain, arrays


_Number = Annotated[int, msgspec.Meta(ge=0)]
_Bit = Annotated[int, msgspec.Meta(ge=0, le=1)]
_Share = Annotated[float, msgspec.Meta(ge=0)]
_Places = list[list[Annotated[list[_Number], msgspec.Meta(min_length=1)]]]


class _RuleEntry(msgspec.Struct, forbid_unknown_fields=True):
    operands: _Places
    results: _Places
    missing: bool
    file: str | None
    fixed: list[tuple[str, Annotated[int, msgspec.Meta(ge=-1)]]]
    costs: list[tuple[
        str, Annotated[float, msgspec.Meta(ge=0)], list[_Number], int | None,
        tuple[_Number, _Share, _Share] | None,
    ]]  # fmt: skip
    rings: list[tuple[_Number, int, _Number]]
    whole: bool
    excludes: list[tuple[_Number, _Number]]
    whole_mesh: list[_Number]
    linearity: tuple[list[_Number], bool, bool, bool, bool]


#: The fields of a factor.
_FactorEntry = tuple[
    str, _Number, _Number, str, bool, bool, Annotated[float, msgspec.Meta(ge=0)], bool, bool, int
]


class _AnalysisEntry(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of an entry."""

    rules: list[tuple[_RuleEntry, list[_FactorEntry]]]
    inconsistent: _Number
    orders: list[tuple[_Number, list[_Number], list[list[_Bit]]]]


def _unpacked(
    data: Any, arrays: disk_cache.Arrays, program: Program, lowering: Lowering
) -> Analysis:
    """The analysis in an entry; raises one of ``disk_cache.DAMAGE`` where it is none."""
    plain, numbers = checked(data, _AnalysisEntry), disk_cache.numbers
    rules = tuple(
        _rule(signature, *rule)
        for signature, rule in zip(program.signatures, plain.rules, strict=True)
    )
    count = sum(len(rules[op.signature].factors) for op in program.ops)
    names = joined(
        program, rules, numbers(arrays["edges"], (-1, 2), count),
        numbers(arrays["tied"], (-1, 2), count),
    )  # fmt: skip
    if (names.edges[:, 0] >= names.edges[:, 1]).any():
        raise ValueError("edges that lead back")
    resolutions = numbers(arrays["resolutions"], (-1, 4), max(count, 1))
    sites = numbers(arrays["sites"], (-1, 4))
    boxes = numbers(arrays["boxes"], (-1, 5), max(count, 2))
    ends = np.array([count, count, len(_WHERE)])
    places = np.array([len(program.values), len(names.use_op)])
    if (sites < 0).any() or (sites[:, :3] >= ends).any():
        raise ValueError("sites")
    if (sites[:, 3] >= places[sites[:, 2]]).any() or (boxes[:, 4] > 1).any():
        raise ValueError("sites or boxes")
    groups = len({*resolutions[:, 3].tolist()})
    for column in (resolutions[:, 2], resolutions[:, 3]):
        if len(column) and {*column.tolist()} != {*range(column.max() + 1)}:
            raise ValueError("sets or groups")
    for color, bits, orders in plain.orders:
        if color >= count or any(group >= groups for group in bits) or not orders:
            raise ValueError("orders")
        if any(len(order) != len(bits) for order in orders):
            raise ValueError("orders")
    arguments = len(program.arguments)
    return Analysis(
        program=program,
        rules=rules,
        names=names,
        color=Edges(count, np.concatenate([names.edges, names.tied])).components,
        resolutions=tuple(
            Resolution((n, o), set_, group) for n, o, set_, group in resolutions.tolist()
        ),
        sites=tuple((n, o, _WHERE[w], number) for n, o, w, number in sites.tolist()),
        boxes=tuple((*corners, bool(crossed)) for *corners, crossed in boxes.tolist()),
        inconsistent=plain.inconsistent,
        argument_group=numbers(arrays["argument_group"], (arguments,), arguments),
        color_group=numbers(arrays["color_group"], (count,), count),
        orders={
            color: (tuple(groups), tuple(map(tuple, orders)))
            for color, groups, orders in plain.orders
        },
        seconds={},
        lowering=lowering,
    )


def _table(rows: Iterable[Sequence[Any]], width: int) -> Any:
    return np.array(list(rows), dtype=np.int64).reshape(-1, width)


def _plain(rule: SignatureRule) -> dict[str, Any]:
    """A rule without its factors, as plain data for JSON."""
    file = None if rule.file is None else str(rule.file)
    return {
        "operands": rule.operands, "results": rule.results, "missing": rule.missing, "file": file,
        "fixed": rule.fixed,
        "costs": [dataclasses.astuple(cost) for cost in rule.costs], "whole": rule.runs_whole,
        "excludes": rule.excludes, "whole_mesh": rule.whole_mesh,
        "rings": [dataclasses.astuple(ring) for ring in rule.rings],
        "linearity": rule.linearity,
    }  # fmt: skip


def _rule(
    signature: Signature, plain: _RuleEntry, factors: Sequence[_FactorEntry]
) -> SignatureRule:
    """The rule of a signature: each dimension of its tensors has factors."""

    def side(tensors: _Places, types: Sequence[TensorType]) -> tuple[Any, ...]:
        if [len(dims) for dims in tensors] != [len(type_.shape) for type_ in types]:
            raise ValueError("other tensors")
        if any(f >= len(factors) for dims in tensors for stack in dims for f in stack):
            raise ValueError("other factors")
        return tuple(tuple(map(tuple, dims)) for dims in tensors)

    if any(factor >= len(factors) for _, factor in plain.fixed):
        raise ValueError("other factors")
    tensors = range(-len(plain.results), len(plain.operands))
    for quantity, _, over, tensor, queries in plain.costs:
        if quantity not in QUANTITIES or any(f >= len(factors) for f in over):
            raise ValueError("other costs")
        if tensor is not None and tensor not in tensors:
            raise ValueError("costs of another tensor")
        if queries is not None and queries[0] >= len(factors):
            raise ValueError("costs over another factor")
    if any(f >= len(factors) or tensor not in tensors for f, tensor, _ in plain.rings):
        raise ValueError("other rings")
    linear, *others = plain.linearity
    if any(operand >= len(plain.operands) for operand in linear):
        raise ValueError("other operands")
    together = [*plain.whole_mesh, *itertools.chain.from_iterable(plain.excludes)]
    if any(factor >= len(factors) for factor in together):
        raise ValueError("other factors")
    return SignatureRule(
        factors=tuple(Factor(*fields) for fields in factors),
        operands=side(plain.operands, signature.operands),
        results=side(plain.results, signature.results),
        missing=plain.missing,
        file=None if plain.file is None else pathlib.Path(plain.file),
        fixed=tuple(plain.fixed),
        costs=tuple(
            KernelCost(q, amount, tuple(over), of, None if rows is None else CausalQueries(*rows))
            for q, amount, over, of, rows in plain.costs
        ),
        runs_whole=plain.whole,
        excludes=tuple(plain.excludes),
        whole_mesh=tuple(plain.whole_mesh),
        rings=tuple(TensorRing(*ring) for ring in plain.rings),
        linearity=Linearity(tuple(linear), *others),
    )
