"""The program of a report, as columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from toast.plan import Plan
from toast.program import Spec
from toast.report.html.legend import Colors, SourcePlaces
from toast.report.html.sections import Section

#: Longer attributes of ops are truncated, in characters.
_LONG = 120


def listing(
    plan: Plan, places: SourcePlaces, colors: Colors, sections: Sequence[Section]
) -> dict[str, Any]:
    """The program as columns.

    * ``signatures``: ``[kind, attributes, factors, operands, results, rule]``; an operand or result
      is ``[type, factor of each dimension]``, and ``types`` has ``[dtype, shape]``.  Values and
      names are numbered in program order, so their numbers follow from the signatures of earlier
      ops; name ``i`` of an op is the name of factor ``i``.
    * ``color``: the color of each name, as run lengths.  ``color_kind`` (a row of ``colors``) and
      ``color_label`` are by color.
    * ``held``: for each name an index into ``holdings``, as run lengths.
    * ``specs``, ``value_spec``: the shardings of values.  ``reshards`` has the shardings of
      operands that differ, ``sums`` those of results that stay partial sums.
    * ``moves``: collectives as ``[op, operand, kind, axes, count, seconds, bytes]``; operand -1 is
      the result.  The counts add up to those of the plan.
    * ``spent``: ``[op, seconds of products, seconds of memory traffic]`` for ops that take time.
    """
    program, rules = plan.analysis.program, plan.analysis.rules
    types: dict[Any, int] = {}
    signatures = []
    for signature, rule in zip(program.signatures, rules, strict=True):
        operands, results = (
            [
                [types.setdefault((t.dtype, t.shape), len(types)), [dim[0] for dim in dims]]
                for t, dims in zip(of, side, strict=True)
            ]
            for of, side in (
                (signature.operands, rule.operands), (signature.results, rule.results),
            )
        )  # fmt: skip
        attributes = ", ".join(f"{k} = {_attribute(v)}" for k, v in signature.attributes)
        signatures.append([
            signature.kind, attributes, [f.label for f in rule.factors], operands, results,
            rule.einsum(),
        ])  # fmt: skip
    number: dict[int, int] = {}
    for op in program.ops:
        for value in op.results:
            number[value] = len(number)
    specs: dict[Spec, int] = {}

    def number_of(spec: Spec) -> int:
        return specs.setdefault(spec, len(specs))

    number_of(())
    value_spec = [0] * len(number)
    for value, spec in plan.shardings.values.items():
        value_spec[number[value]] = number_of(spec)
    first_return = len(program.ops) - len(program.results)
    uses = [[op, i, number_of(spec)] for (op, i), spec in sorted(plan.shardings.uses.items())]
    uses += [
        [first_return + j, 0, number_of(spec)]
        for j, (spec, value) in enumerate(
            zip(plan.shardings.results, program.result_values, strict=True)
        )
        if spec != plan.shardings.of(program, value)
    ]
    sums = [[number[v], number_of(spec)] for v, spec in sorted(plan.shardings.sums.items())]
    kinds: dict[str, int] = {}
    axes: dict[tuple[str, ...], int] = {}
    moves = [
        [
            c.op, c.operand, kinds.setdefault(c.kind, len(kinds)),
            axes.setdefault(c.axes, len(axes)), c.count, digits(c.seconds),
            round(c.bytes),
        ]
        for c in plan.breakdown.collectives
    ]  # fmt: skip
    products, memory = plan.breakdown.product_seconds, plan.breakdown.memory_seconds
    spent = np.flatnonzero((products > 0) | (memory > 0)).tolist()
    return {
        "ops": len(program.ops),
        "first_return": first_return,
        "types": [[dtype, list(shape)] for dtype, shape in types],
        "signatures": signatures,
        "signature": [op.signature for op in program.ops],
        "operands": [[number[v] for v in op.operands] for op in program.ops],
        "repeats": _runs(list(program.repeats)),
        "arguments": list(program.arguments),
        "results": list(program.results),
        "labels": {number[v]: label for v, label in program.labels.items() if v in number},
        "names": {
            number[v]: name for v, name in program.value_names.items() if v in program.labels
        },
        "paths": places.paths,
        "spots": [[*spot, places.source(spot)] for spot in places.spot_number],
        "path_spot": [places.spot_number[spot] for spot in places.spots],
        "place": places.of_op,
        "sections": [dataclasses.asdict(section) for section in sections],
        "color": _runs(colors.of_name.tolist()),
        "color_kind": colors.kind,
        "color_label": colors.labels,
        "held": _runs(colors.held.tolist()),
        "holdings": [list(axes) for axes in colors.holdings],
        "specs": [[list(axes) for axes in spec] for spec in specs],
        "value_spec": _runs(value_spec),
        "reshards": uses,
        "sums": sums,
        "move_kinds": list(kinds),
        "move_axes": [list(a) for a in axes],
        "moves": moves,
        "spent": [[op, digits(float(products[op])), digits(float(memory[op]))] for op in spent],
    }


def _attribute(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONG else text[:_LONG] + " ..."


def digits(number: float) -> float:
    """A number, rounded to four digits."""
    return float(f"{number:.4g}")


def _runs(values: list[int]) -> list[int]:
    """Run lengths: ``[value, times, value, times ...]``."""
    runs: list[int] = []
    for value in values:
        if runs and runs[-2] == value:
            runs[-1] += 1
        else:
            runs += [value, 1]
    return runs
