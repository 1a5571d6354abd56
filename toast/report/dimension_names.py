"""What people call the colors of dimensions: batch, sequence, model, hidden, vocabulary ..."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from toast.errors import PlanError
from toast.program import Program, TensorType
from toast.report.argument_roles import argument_roles

#: Words in paths of weights, and the names of their dimensions from the first to the last; those of
#: other ranks say nothing.  ``model`` is the width of the residual stream.
_OF_WEIGHTS: Sequence[tuple[str, tuple[str, ...]]] = (
    (r"router|gating", ("model", "experts")),
    (r"unembed\w*|lm_?head|output|head|logits", ("model", "vocabulary")),
    (r"w?embed\w*|wte|vocab\w*|tok\w*", ("vocabulary", "model")),
    (r"gate|up|(up|gate)_?proj|fc1|c_fc|w1|w3|wi\w*|linear1|mlp_in", ("model", "hidden")),
    (r"down|down_?proj|fc2|w2|wo|linear2|mlp_out", ("hidden", "model")),
    (r"w?k|w?v|key|value|[kv]_?proj", ("model", "key heads", "head size")),
    (r"w?q|query|q_?proj", ("model", "heads", "head size")),
    (r"w?o|out|o_?proj|out_?proj", ("heads", "head size", "model")),
)  # fmt: skip

#: Last words of paths that say nothing, and weights that have one matrix for each expert.
_GENERAL = frozenset(("weight", "weights", "kernel", "w", "value"))
_EXPERTS = re.compile(r"experts?|moe", re.IGNORECASE)

#: Inputs without rows.
_NO_ROWS = frozenset(("key", "rng", "seed", "step", "count"))

#: Dimensions of inputs, by rank.
_OF_TOKENS = {1: ("batch",), 2: ("batch", "sequence")}
_OF_ARRAYS = {
    2: ("batch", "features"),
    3: ("batch", "sequence", "features"),
    4: ("batch", "height", "width", "channels"),
}


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
        for color, name in zip(of, _called(path, program.values[value].type, role), strict=False):
            # With several kinds of rows, such as nodes and edges, none is the batch.
            name = _root(path) if name == "batch" and len(first) > 1 else name
            if color >= 0 and name:
                votes[color][name] += weight
    for color, counts in votes.items():
        names.setdefault(color, counts.most_common(1)[0][0])
    return names


def _matching(program: Program, colors: Sequence[Sequence[int]], pattern: str) -> Iterator[int]:
    plain = pattern.replace("[", "[[]")
    for path, of in zip(program.arguments, colors, strict=True):
        for place, color in enumerate(of):
            if color >= 0 and fnmatch.fnmatchcase(f"{path}:{place}", plain):
                yield color


def _called(path: str, type_: TensorType, role: str) -> tuple[str, ...]:
    rank = len(type_.shape)
    if role == "inputs":
        if _root(path).lower() in _NO_ROWS:
            return ()
        whole = type_.dtype[0] in "iu"
        return (_OF_TOKENS if whole else _OF_ARRAYS).get(rank, ())
    if role != "weights":
        return ()
    words = re.findall(r"[A-Za-z]\w*", path)
    plain = [word for word in words if word.lower() not in _GENERAL][-1:] or words[-1:]
    for pattern, names in _OF_WEIGHTS:
        if not plain or not re.fullmatch(pattern, plain[0], re.IGNORECASE):
            continue
        # A table has more rows than columns, whatever it is called.
        if rank == 2 and "vocabulary" in names:
            long = type_.shape[0] >= type_.shape[1]
            return ("vocabulary", "model") if long else ("model", "vocabulary")
        if len(names) == rank:
            return names
        if len(names) == rank - 1 and any(map(_EXPERTS.fullmatch, words)):
            return ("experts", *names)
    return ()


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
