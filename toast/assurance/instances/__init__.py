"""Random instances of every op kind, for proving rules and comparing them with Shardy's.

One hypothesis strategy per op kind draws valid shapes and attributes.  The modules correspond to
the files of ``rules/ops``; each defines ``STRATEGIES`` by op kind.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

from toast.errors import RuleError

try:
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st
except ModuleNotFoundError as missing:
    raise RuleError(
        "hypothesis, which draws random ops, is not installed: "
        "pip install 'toast-partitioner[rules]', or hypothesis"
    ) from missing

from toast.assurance.instances import (
    batch_norm,
    communication,
    convolution,
    custom_call,
    dot,
    elementwise,
    function,
    gather,
    linalg,
    random,
    reduce,
    reduce_window,
    reshape,
    shape,
    sort,
    window,
)
from toast.assurance.instances.pieces import Instance
from toast.frontend import mlir, stablehlo
from toast.program import Program

__all__ = ["KINDS", "Instance", "draw", "program_of"]

_FAMILIES = (
    batch_norm,
    communication,
    convolution,
    dot,
    elementwise,
    function,
    gather,
    linalg,
    random,
    reduce,
    reduce_window,
    reshape,
    shape,
    sort,
    window,
    custom_call,
)

#: The strategy of each op kind whose rule has a shardable factor, and of each custom call, as
#: ``custom_call TARGET``.
KINDS: dict[str, st.SearchStrategy[Instance]] = {
    kind: strategy for family in _FAMILIES for kind, strategy in family.STRATEGIES.items()
}

#: The most rounds of drawing: after these there are probably no further instances.
_ROUNDS = 8


def program_of(instances: Sequence[Instance], name: str = "instances") -> Program:
    """A program whose ops are ``instances``, each with its own arguments.

    Raises :class:`toast.errors.TargetError` if an instance is invalid.
    """
    module = mlir.module_of_ops([(i.text, i.operands, i.results) for i in instances])
    return stablehlo.from_module(module, name=name)


def draw(kind: str, count: int, start: int = 0) -> tuple[Instance, ...]:
    """Up to ``count`` different instances of an op kind.

    ``start`` is a seed: the same ``start`` gives the same instances.
    """
    drawn: dict[Instance, None] = {}

    def collect(instance: Instance) -> None:
        drawn[instance] = None

    chosen = settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for round_ in range(_ROUNDS):  # different choices of hypothesis may give equal instances
            seed(_ROUNDS * start + round_)(chosen(given(KINDS[kind])(collect)))()
            if len(drawn) >= count:
                break
    return tuple(itertools.islice(drawn, count))
