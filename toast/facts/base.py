"""Reads fact bases: ``.lp`` files with a program, often written by hand, as :class:`Program`."""

from __future__ import annotations

import math
import pathlib
import re
from collections import defaultdict
from typing import Any

from toast.boundary.printable import printable, shortened
from toast.errors import FactError
from toast.logic import Term, read_facts, show_term
from toast.program import Attribute, Builder, Program, TensorType


def read(path: str | pathlib.Path) -> Program:
    """The program that a fact base describes, with its ops in the order of the file.

    Raises :class:`toast.errors.FactError`, which names the wrong, missing or duplicate fact.
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
        if sorted(shapes[value]) != list(range(_whole(path, "rank", value, rank))):
            raise FactError(
                f"{path}: rank({show_term(value)},{rank}) does not match the dim facts of "
                f"{show_term(value)}: {len(shapes[value])} found"
            )
    for value, dtype in types.items():
        if not _ELEMENT.fullmatch(str(dtype)):
            raise FactError(
                f"{path}: dtype({show_term(value)},{shortened(str(dtype), 60)}): not an element "
                "type such as f32, bf16 or i1"
            )
    for value, sizes in shapes.items():
        if len(sizes) > _LARGEST_RANK or math.prod(sizes.values()) > _LARGEST_SIZE:
            raise FactError(
                f"{path}: dim({show_term(value)},...): more than {_LARGEST_RANK} dimensions, or "
                f"more than {_LARGEST_SIZE} elements"
            )
    operands = _by_index(path, facts["operand", 3], "operand")
    results = _by_index(path, facts["result", 3], "result")
    attributes: dict[Term, dict[str, Attribute]] = defaultdict(dict)
    for op, name, term in facts["attribute", 3]:
        attributes[op][str(name)] = term if isinstance(term, int) else show_term(term)
    arrays: dict[Term, dict[str, dict[int, int | str]]] = defaultdict(lambda: defaultdict(dict))
    for op, name, index, term in facts["attribute", 4]:
        arrays[op][str(name)][_whole(path, "attribute", op, index)] = (
            term if isinstance(term, int) else show_term(term)
        )
    for op, named in arrays.items():
        for array, items in named.items():
            attributes[op][array] = tuple(items[i] for i in sorted(items))

    builder = Builder()
    repeats: dict[Term, int] = {}
    for op, times in facts["repeats", 2]:
        if op in repeats:
            raise FactError(f"{path}: repeats({show_term(op)},...): occurs twice; remove one")
        repeats[op] = _whole(path, "repeats", op, times, 1)
    places: dict[Term, int] = {}
    numbers: dict[Term, int] = {}
    ordered = sorted(facts["op", 2], key=lambda f: {"argument": 0, "return": 2}.get(str(f[1]), 1))
    for op, kind in ordered:
        missing = [v for v in operands[op] if v not in numbers]
        if missing:
            raise FactError(
                f"{path}: op {show_term(op)} uses {show_term(missing[0])}, which no op before it "
                "defines; write ops in program order"
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
    labels = {
        number: printable(show_term(value), breaks=False) for value, number in numbers.items()
    }
    return builder.build(
        path.stem,
        [labels[i] for i in range(kinds.count("argument"))],
        [f"result[{i}]" for i in range(kinds.count("return"))],
        aliases,
        labels=labels,
        foreign=True,
    )


#: The form of element types, and the most dimensions and elements of a tensor.
_ELEMENT = re.compile(r"bf16|tf32|token|index|pred|(?:f|u?i|c)[0-9][0-9a-z]*")
_LARGEST_RANK, _LARGEST_SIZE = 64, 2**48


def _whole(path: pathlib.Path, predicate: str, of: Term, number: Term, least: int = 0) -> int:
    """A number in a fact; raises :class:`toast.errors.FactError` if it is not an integer."""
    if not isinstance(number, int) or number < least:
        shown = shortened(show_term(number), 60)
        raise FactError(
            f"{path}: {predicate}({show_term(of)},{shown}): not a whole number of at least {least}"
        )
    return number


def _by_index(
    path: pathlib.Path, rows: list[tuple[Term, ...]], predicate: str
) -> dict[Term, list[Term]]:
    """The values of each op in ``op, index, value`` rows, in the order of the indices."""
    values: dict[Term, list[Term]] = defaultdict(list)
    for op, index, _ in rows:
        _whole(path, predicate, op, index)
    for op, _, value in sorted(rows, key=lambda row: (str(row[0]), row[1])):
        values[op].append(value)
    return values


class _FactBases:
    """The frontend for fact bases."""

    name = "facts"
    suffixes = frozenset({".lp"})
    takes_arguments = False
    cacheable = False

    def accepts(self, target: Any) -> bool:
        path = isinstance(target, str | pathlib.Path)
        return path and pathlib.Path(target).suffix in self.suffixes

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        return read(target)


FACT_BASES = _FactBases()
