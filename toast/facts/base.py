"""Fact bases written by hand: ``.lp`` text read as a :class:`Program`."""

from __future__ import annotations

import pathlib
from collections import defaultdict

from toast.errors import FactError
from toast.frontend.program import Attribute, Builder, Program, TensorType
from toast.logic import Term, read_facts, show_term


def read(path: str | pathlib.Path) -> Program:
    """The program a fact base describes, its ops in the order of the file.

    Raises :class:`toast.errors.FactError` naming the fact that is wrong, missing or too many.
    """
    path = pathlib.Path(path)
    facts = defaultdict(list, read_facts(path))
    shapes: dict[Term, dict[int, int]] = defaultdict(dict)
    for value, d, size in facts["dim", 3]:
        if not (isinstance(d, int) and isinstance(size, int) and d >= 0 and size >= 0):
            raise FactError(f"{path}: dim({show_term(value)},{d},{size}): not a dimension")
        shapes[value][d] = size
    types: dict[Term, Term] = {row[0]: row[1] for row in facts["dtype", 2]}
    for value, rank in facts["rank", 2]:
        if sorted(shapes[value]) != list(range(int(str(rank)))):
            raise FactError(
                f"{path}: rank({show_term(value)},{rank}) does not fit the dim facts of "
                f"{show_term(value)}: {len(shapes[value])} found"
            )
    operands = _by_index(facts["operand", 3])
    results = _by_index(facts["result", 3])
    attributes: dict[Term, dict[str, Attribute]] = defaultdict(dict)
    for op, name, term in facts["attribute", 3]:
        attributes[op][str(name)] = term if isinstance(term, int) else show_term(term)
    arrays: dict[Term, dict[str, dict[int, int | str]]] = defaultdict(lambda: defaultdict(dict))
    for op, name, index, term in facts["attribute", 4]:
        arrays[op][str(name)][int(str(index))] = term if isinstance(term, int) else show_term(term)
    for op, named in arrays.items():
        for array, items in named.items():
            attributes[op][array] = tuple(items[i] for i in sorted(items))

    builder = Builder()
    repeats = {op: int(str(count)) for op, count in facts["repeats", 2]}
    places: dict[Term, int] = {}
    numbers: dict[Term, int] = {}
    ordered = sorted(facts["op", 2], key=lambda f: {"argument": 0, "return": 2}.get(str(f[1]), 1))
    for op, kind in ordered:
        missing = [v for v in operands[op] if v not in numbers]
        if missing:
            raise FactError(
                f"{path}: op {show_term(op)} uses {show_term(missing[0])}, which no op before it "
                "defines; put ops in program order"
            )
        places[op] = builder.next_op
        values = builder.add(
            str(kind),
            [numbers[v] for v in operands[op]],
            [
                TensorType(tuple(shapes[v][d] for d in sorted(shapes[v])), str(types.get(v, "f32")))
                for v in results[op]
            ],
            tuple(sorted(attributes[op].items())),
            repeats=repeats.get(op, 1),
        )
        numbers.update(zip(results[op], values, strict=True))
    kinds = [kind for _, kind in ordered]
    aliases = [-1] * kinds.count("return")
    for op, other in facts["tied", 2]:
        for end in (op, other):
            if end not in places:
                raise FactError(f"{path}: tied({show_term(op)},{show_term(other)}): no such op")
        result = places[op] - (len(kinds) - len(aliases))
        if result >= 0:
            aliases[result] = places[other]
        else:
            builder.tie(places[op], places[other])
    labels = {number: show_term(value) for value, number in numbers.items()}
    return builder.build(
        path.stem,
        [labels[i] for i in range(kinds.count("argument"))],
        [f"result[{i}]" for i in range(kinds.count("return"))],
        aliases,
        labels=labels,
    )


def _by_index(rows: list[tuple[Term, ...]]) -> dict[Term, list[Term]]:
    found: dict[Term, list[Term]] = defaultdict(list)
    for op, _, value in sorted(rows, key=lambda row: (str(row[0]), int(str(row[1])))):
        found[op].append(value)
    return found
