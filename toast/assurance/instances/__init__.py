"""Random instances of every op kind: what rules are proven on, and compared with Shardy on.

One hypothesis strategy per op kind draws shapes and attributes that verify.  The modules are the
families of ``rules/ops``; each gives its ``STRATEGIES``.
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

#: A strategy for each op kind whose rule claims that something can be sharded, and for each custom
#: call, as ``custom_call TARGET``.
KINDS: dict[str, st.SearchStrategy[Instance]] = {
    kind: strategy for family in _FAMILIES for kind, strategy in family.STRATEGIES.items()
}

#: Rounds of drawing after which there seem to be no more.
_ROUNDS = 8


def program_of(instances: Sequence[Instance], name: str = "instances") -> Program:
    """A program of which each op is one of ``instances``, on arguments of its own.

    Raises :class:`toast.errors.TargetError` when one does not verify.
    """
    module = mlir.module_of_ops([(i.text, i.operands, i.results) for i in instances])
    return stablehlo.from_module(module, name=name)


def draw(kind: str, count: int, start: int = 0) -> tuple[Instance, ...]:
    """``count`` different instances of an op kind; the same ``start``, the same instances.

    Fewer, where there are not that many.
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
        for round_ in range(_ROUNDS):  # hypothesis knows its own choices, not what they make
            seed(_ROUNDS * start + round_)(chosen(given(KINDS[kind])(collect)))()
            if len(drawn) >= count:
                break
    return tuple(itertools.islice(drawn, count))
