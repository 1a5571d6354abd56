"""Rules from logical axes to mesh axes, as MaxText and Flax apply them.

A rule gives mesh axes to a logical axis.  The rules of a tensor are tried in order: a rule holds if
its logical axis has no mesh axes yet and none of its mesh axes is in use in this tensor.  So one
list of rules shards the batch of an activation, and the model dimension of a weight, over ``data``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from toast.program import Spec


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """A tensor with its logical axes, one of which may have no name, and its sharding."""

    names: tuple[str | None, ...]
    spec: Spec
    #: What an error in its sharding costs: its bytes.
    weight: float = 1.0

    def axes_of(self, name: str) -> tuple[str, ...]:
        """The mesh axes of its logical axis ``name``."""
        return self.spec[self.names.index(name)]


@dataclasses.dataclass(frozen=True)
class AxisRule:
    """A logical axis, and the mesh axes that it takes."""

    name: str
    axes: tuple[str, ...]

    def holds_in(self, tensor: NamedTensor) -> bool:
        """Whether the sharding of a tensor is what the rule says."""
        return self.name in tensor.names and tensor.axes_of(self.name) == self.axes


def ordered_rules(tensors: Sequence[NamedTensor]) -> tuple[AxisRule, ...]:
    """Rules that give every tensor its sharding, if there are any.

    If there are none, tensors of the least weight get another one.  A tensor has each name once.
    """
    left = list(_candidates(tensors))
    placed: list[AxisRule] = []
    wrong: set[int] = set()

    def blockers(rule: AxisRule) -> list[int]:
        """The tensors that the rule would shard in another way if it came next."""
        return [
            number for number, tensor in enumerate(tensors)
            if number not in wrong and rule.name in tensor.names and not rule.holds_in(tensor)
            and not any(_guards(earlier, rule, tensor) for earlier in placed)
        ]  # fmt: skip

    def needing(rule: AxisRule) -> list[int]:
        """The tensors that the rule shards as they should be."""
        return [n for n, t in enumerate(tensors) if n not in wrong and rule.holds_in(t)]

    # A rule that may come next may do so whatever comes before it: no choice is taken back.
    while left:
        free = next((rule for rule in left if not blockers(rule)), None)
        if free is not None:
            left.remove(free)
            placed.append(free)
            continue

        sides = [(rule, side) for rule in left for side in (blockers, needing)]
        rule, side = min(sides, key=lambda pair: sum(tensors[n].weight for n in pair[1](pair[0])))
        wrong.update(side(rule))
        if side is needing:
            left.remove(rule)
    return tuple(placed)


def one_rule_each(tensors: Sequence[NamedTensor]) -> dict[str, tuple[str, ...]]:
    """The mesh axes of each logical axis, where a name has the same ones in every tensor.

    They are those of most bytes.  Names that would use one mesh axis twice in a tensor lose it,
    that with fewer bytes first.
    """
    bytes_of: dict[AxisRule, float] = {}
    for tensor in tensors:
        for name, axes in zip(tensor.names, tensor.spec, strict=True):
            if name is not None:
                rule = AxisRule(name, axes)
                bytes_of[rule] = bytes_of.get(rule, 0.0) + tensor.weight
    chosen: dict[str, AxisRule] = {}
    for rule in sorted(bytes_of, key=lambda rule: -bytes_of[rule]):
        chosen.setdefault(rule.name, rule)
    kept: dict[str, tuple[str, ...]] = {}
    for name, rule in sorted(chosen.items(), key=lambda item: -bytes_of[item[1]]):
        together = {n for t in tensors if name in t.names for n in t.names if n in kept}
        used = {axis for other in together for axis in kept[other]}
        kept[name] = () if used & {*rule.axes} else rule.axes
    return kept


def applied(rules: Sequence[AxisRule], names: Sequence[str | None]) -> Spec:
    """The sharding that rules give to a tensor with these logical axes."""
    spec: list[tuple[str, ...]] = [()] * len(names)
    used: set[str] = set()
    for rule in rules:
        if rule.name in names and rule.axes and not used & {*rule.axes}:
            place = list(names).index(rule.name)
            if not spec[place]:
                spec[place] = rule.axes
                used.update(rule.axes)
    return tuple(spec)


def reachable(rules: Sequence[AxisRule]) -> tuple[AxisRule, ...]:
    """The rules without those that hold in no tensor, whatever its logical axes are.

    Such a rule has an earlier one of the same name.  That one holds, and the later one does not,
    unless a third rule of another name, before both, takes a mesh axis from it.  If all of these
    take one from the later rule too, there is no tensor for it.
    """
    left: list[AxisRule] = []
    for rule in rules:
        own = [number for number, other in enumerate(left) if other.name == rule.name]
        if all(any(_frees(other, left[n], rule) for other in left[:n]) for n in own):
            left.append(rule)
    return tuple(left)


def _frees(other: AxisRule, earlier: AxisRule, later: AxisRule) -> bool:
    """Whether a rule of another name takes a mesh axis from ``earlier`` and none from ``later``."""
    taken = {*other.axes}
    return (
        other.name != later.name
        and bool(taken & {*earlier.axes})
        and not taken & {*later.axes}
    )  # fmt: skip


def _guards(earlier: AxisRule, later: AxisRule, tensor: NamedTensor) -> bool:
    """Whether an earlier rule keeps a later one from a tensor."""
    clash = earlier.name == later.name or bool({*earlier.axes} & {*later.axes})
    return clash and earlier.holds_in(tensor)


def _candidates(tensors: Sequence[NamedTensor]) -> dict[AxisRule, None]:
    """The rules that tensors need, in the order of the tensors."""
    return {
        AxisRule(name, axes): None
        for tensor in tensors for name, axes in zip(tensor.names, tensor.spec, strict=True)
        if name is not None and axes
    }  # fmt: skip


__all__ = ["AxisRule", "NamedTensor", "applied", "one_rule_each", "ordered_rules", "reachable"]
