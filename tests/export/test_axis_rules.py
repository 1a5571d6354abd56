"""The order of rules: first match wins, and a tensor has each mesh axis once."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from toast.export.axis_rules import (
    AxisRule,
    NamedTensor,
    applied,
    one_rule_each,
    ordered_rules,
    reachable,
)

X = NamedTensor(("batch", "embed"), (("data",), ()))
W = NamedTensor(("embed", "mlp"), (("data",), ("model",)))


def test_the_batch_goes_before_the_model_dimension() -> None:
    """Batch and model dimension share an axis, in tensors that do not have both."""
    rules = ordered_rules([W, X])
    assert [rule.name for rule in rules].index("batch") < [r.name for r in rules].index("embed")
    for tensor in (X, W):
        assert applied(rules, tensor.names) == tensor.spec


def test_a_rule_for_two_axes_and_one_for_the_rest() -> None:
    """Where one axis is in use, the second rule of a name has the other one."""
    both = NamedTensor(("embed",), (("data", "model"),))
    rest = NamedTensor(("mlp", "embed"), (("model",), ("data",)))
    rules = ordered_rules([both, rest])
    assert rules == (
        AxisRule("mlp", ("model",)), AxisRule("embed", ("data", "model")),
        AxisRule("embed", ("data",)),
    )  # fmt: skip
    assert [applied(rules, tensor.names) for tensor in (both, rest)] == [both.spec, rest.spec]


def test_what_no_order_can_say_costs_the_fewest_bytes() -> None:
    large = NamedTensor(("embed",), (("data",),), 10.0)
    small = NamedTensor(("embed",), ((),), 1.0)
    assert ordered_rules([small, large]) == (AxisRule("embed", ("data",)),)
    assert ordered_rules([NamedTensor(("embed",), ((),), 20.0), large]) == ()


def test_one_rule_each_uses_no_axis_twice() -> None:
    """Haliax raises an error for a tensor that would have a mesh axis twice."""
    apart = [
        NamedTensor(("embed",), (("data",),), 5.0),
        NamedTensor(("vocab",), (("data",),), 4.0),
        NamedTensor(("vocab", "embed"), ((), ()), 1.0),
    ]
    assert one_rule_each(apart) == {"embed": ("data",), "vocab": ()}


NAMES, AXES = "abcd", "xyz"


@st.composite
def tensors(draw: st.DrawFn) -> NamedTensor:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=3))
    axes = draw(st.permutations(AXES))
    spec: list[tuple[str, ...]] = [()] * len(names)
    for axis in axes[: draw(st.integers(0, 3))]:
        place = draw(st.integers(0, len(names) - 1))
        spec[place] = (*spec[place], axis)
    return NamedTensor(tuple(names), tuple(spec), draw(st.floats(1, 9)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(AXES)), max_size=5),
       st.lists(st.lists(st.sampled_from(NAMES), unique=True, min_size=1), max_size=5))  # fmt: skip
def test_what_rules_say_is_learnt(rules: list[tuple[str, str]], shapes: list[list[str]]) -> None:
    """Shardings that come from rules have rules."""
    own = [AxisRule(name, (axis,)) for name, axis in rules]
    drawn = [NamedTensor(tuple(names), applied(own, names)) for names in shapes]
    learnt = ordered_rules(drawn)
    assert [applied(learnt, tensor.names) for tensor in drawn] == [t.spec for t in drawn]


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors(), max_size=5))
def test_rules_never_use_an_axis_twice(drawn: list[NamedTensor]) -> None:
    rules, each = ordered_rules(drawn), one_rule_each(drawn)
    for tensor in drawn:
        for spec in (applied(rules, tensor.names), [each[name or ""] for name in tensor.names]):
            used = [axis for axes in spec for axis in axes]
            assert len(used) == len({*used})


def test_rules_that_never_hold_are_dropped() -> None:
    tensor, both = AxisRule("mlp", ("tensor",)), AxisRule("mlp", ("tensor", "data"))
    heads = AxisRule("heads", ("tensor",))
    assert reachable([tensor, both, heads]) == (tensor, heads)
    # Where the heads take ``tensor``, the second rule of ``mlp`` is the one that holds.
    rest = AxisRule("mlp", ("data",))
    assert reachable([heads, tensor, rest, both]) == (heads, tensor, rest)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(
    st.sampled_from(NAMES), st.lists(st.sampled_from(AXES), unique=True, min_size=1)
), max_size=7))  # fmt: skip
def test_dropped_rules_shard_nothing(drawn: list[tuple[str, list[str]]]) -> None:
    rules = [AxisRule(name, tuple(axes)) for name, axes in drawn]
    left = reachable(rules)
    for size in range(len(NAMES) + 1):
        for names in itertools.combinations(NAMES, size):
            assert applied(left, names) == applied(rules, names)
