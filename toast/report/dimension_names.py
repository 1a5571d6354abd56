"""What people call the colors of dimensions: batch, sequence, model, hidden, vocabulary ..."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from toast.errors import PlanError
from toast.parameter_names import PLAIN, example_roles, parameter_roles
from toast.program import Program, TensorType
from toast.report.argument_roles import argument_roles

#: Inputs without rows.
_NO_ROWS = frozenset(("key", "rng", "seed", "step", "count"))


def named_dimensions(
    program: Program, colors: Sequence[Sequence[int]], given: Mapping[str, str]
) -> dict[int, str]:
    """The name of each color that has one; ``colors`` has the color of each dimension by argument.

    ``given`` are the user's names of dimensions, such as ``{"tokens:0": "batch"}``; ``*`` matches
    any text.  Other names are inferred from the names and types of arguments.  Raises
    :class:`toast.errors.PlanError` if a name matches no dimension.
    """
    names: dict[int, str] = {}
    for pattern, name in given.items():
        chosen = list(_matching(program, colors, pattern))
        if not chosen:
            raise PlanError(
                f"{pattern}={name}: no dimension of an argument matches; write for example "
                f"{program.arguments[0] if program.arguments else 'x'}:0={name}"
            )
        names.update(dict.fromkeys(chosen, name))
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    roles = argument_roles(program)
    first = {of[0] for of, role in zip(colors, roles, strict=True) if role == "inputs" and of[1:]}
    for path, value, role, of in zip(
        program.arguments, program.argument_values, roles, colors, strict=True
    ):
        weight = 3 if role == "inputs" else 1
        for color, word in zip(of, _called(path, program.values[value].type, role), strict=False):
            if color >= 0 and word:
                # With several kinds of rows, such as nodes and edges, none is the batch.
                several = word == "batch" and len(first) > 1
                votes[color][_root(path) if several else word] += weight
    for color, counts in votes.items():
        names.setdefault(color, counts.most_common(1)[0][0])
    return names


def _matching(program: Program, colors: Sequence[Sequence[int]], pattern: str) -> Iterator[int]:
    plain = pattern.replace("[", "[[]")
    for path, of in zip(program.arguments, colors, strict=True):
        for place, color in enumerate(of):
            if color >= 0 and fnmatch.fnmatchcase(f"{path}:{place}", plain):
                yield color


def _called(path: str, type_: TensorType, role: str) -> tuple[str | None, ...]:
    """The name of each dimension of an argument; ``None`` where unknown."""
    if role == "inputs":
        # A vector of other numbers than tokens may be anything.
        has_rows = len(type_.shape) > 1 or type_.dtype[0] in "iu"
        if not has_rows or _root(path).lower() in _NO_ROWS:
            return ()
        roles = example_roles(type_.shape, type_.dtype)
    elif role == "weights":
        roles = parameter_roles(path, type_.shape)
    else:
        return ()
    names = tuple(role and PLAIN.get(role) for role in roles)
    if len(names) == 2:  # heads and their size may be one dimension, or only one of them is there
        names = tuple(None if name in ("heads", "key heads") else name for name in names)
    # A table has more rows than columns, whatever it is called.
    if len(names) == 2 and "vocabulary" in names:
        long = type_.shape[0] >= type_.shape[1]
        return ("vocabulary", "model") if long else ("model", "vocabulary")
    return names


def _root(path: str) -> str:
    """The name of an argument without the keys of its leaf."""
    return re.split(r"[\[.]", path)[0]


def parse_names(texts: Sequence[str] | None) -> dict[str, str]:
    """The names in options such as ``tokens:0=batch``.

    Raises :class:`toast.errors.PlanError` for a text without a dimension or a name.

    >>> parse_names(["tokens:0=batch"])
    {'tokens:0': 'batch'}
    """
    names = {}
    for text in texts or ():
        pattern, equals, name = text.rpartition("=")
        if not equals or not name.strip() or not re.search(r":(\d+|\*)$", pattern):
            raise PlanError(f"--name {text}: write DIMENSION=NAME, such as tokens:0=batch")
        names[pattern] = name.strip()
    return names


__all__ = ["named_dimensions", "parse_names"]
