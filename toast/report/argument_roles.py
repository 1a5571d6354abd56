"""What the arguments of a program are for: weights, optimizer state, caches, inputs."""

from __future__ import annotations

import re
from typing import Literal

from toast.program import Program
from toast.space import PRODUCTS

#: What an argument is for.
Role = Literal["weights", "optimizer state", "caches", "inputs"]

#: Words in paths of arguments, by role.  Those of an optimizer come first: its state also has the
#: names of the weights.
_WORDS: dict[Role, frozenset[str]] = {
    "optimizer state": frozenset((
        "opt", "optim", "optimizer", "moment", "moments", "momentum", "momenta", "adam", "adamw",
        "mu", "nu", "trace", "velocity", "ema",
    )),
    "caches": frozenset(("cache", "caches", "kv")),
    "weights": frozenset((
        "param", "params", "parameter", "parameters", "weight", "weights", "kernel", "kernels",
        "bias", "biases", "embedding", "embeddings", "master",
    )),
}  # fmt: skip

#: Ops that only convert an argument into the form in which it is used.
_FORMS = frozenset({"convert", "transpose", "reshape", "broadcast_in_dim"})

#: Element types of weights and of optimizer state.
_FLOAT = re.compile(r"b?f\d")


def argument_roles(program: Program) -> list[Role]:
    """``[arguments]`` what each argument is for, by its name and, without a telling one, its uses.

    An argument that no name tells is optimizer state if only the update of a train step uses it,
    and a weight if its first product has it on the right, or if it is part of a tree.
    """
    sides, differentiated = _uses(program)
    roles: list[Role] = []
    for path, value in zip(program.arguments, program.argument_values, strict=True):
        words = re.findall(r"[a-z]+", path.lower())
        known = next((role for role, names in _WORDS.items() if names.intersection(words)), None)
        if known is None:
            side = sides.get(value)
            if not _FLOAT.match(program.values[value].type.dtype):
                known = "inputs"
            elif side == "update":
                known = "optimizer state"
            elif side == "right" or (side is not None and re.search(r"[\[.]", path)):
                known = "weights"
            else:
                known = "optimizer state" if differentiated and side is None else "inputs"
        roles.append(known)
    return roles


def _uses(program: Program) -> tuple[dict[int, str], bool]:
    """The first use of each argument that tells something; and whether there is a backward pass.

    A use is ``left`` or ``right`` of a product, ``update`` after the backward pass, or ``other``.
    """
    passes = program.passes
    differentiated = "backward" in passes
    of = {value: value for value in program.argument_values}
    uses: dict[int, str] = {}
    for op in range(len(program.arguments), len(program.ops) - len(program.results)):
        kind, operands = program.kind(op), program.ops[op].operands
        for index, value in enumerate(operands):
            argument = of.get(value)
            if argument is None:
                continue
            if kind in _FORMS:
                of.update(dict.fromkeys(program.ops[op].results, argument))
            elif differentiated and not passes[op]:
                uses.setdefault(argument, "update")
            elif kind in PRODUCTS:
                if uses.get(argument) in (None, "other", "update"):
                    uses[argument] = "right" if index == 1 else "left"
            elif uses.get(argument) in (None, "update"):
                uses[argument] = "other"
    return uses, differentiated


__all__ = ["Role", "argument_roles"]
