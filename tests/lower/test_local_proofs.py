"""Local forms of drawn ops in random shardings: their numbers are those of one device."""

from __future__ import annotations

import pytest

from toast.assurance import instances
from toast.assurance.local_proofs import prove_local, prove_local_kind
from toast.lower import local_forms

#: Kinds that are drawn together, so that one program has many of them.
GROUPS = 6

#: Kinds whose local form is more than the op on local shapes.
REWRITTEN = sorted({*local_forms.LOCAL_FORMS} & {*instances.KINDS})


@pytest.mark.parametrize("group", range(GROUPS))
def test_an_op_of_every_kind(group: int) -> None:
    kinds = [*instances.KINDS][group::GROUPS]
    drawn = [one for kind in kinds for one in instances.draw(kind, 1, group)]
    proofs = prove_local(drawn, f"group {group}", meshes=["a=2,c=2,b=2"], seed=group)
    assert not proofs.wrong
    assert not proofs.differing
    assert proofs.count(sharded=True) > len(kinds) / 2


@pytest.mark.parametrize("kind", REWRITTEN)
def test_ops_with_a_local_form_of_their_own(kind: str) -> None:
    proofs = prove_local_kind(kind, 6, meshes=["a=4,b=2"], seed=1)
    assert not proofs.wrong
    assert not proofs.differing
    assert proofs.count(sharded=True, equal=True)


def test_a_reduction_of_exchanged_parts_keeps_its_initial_value() -> None:
    """XLA reduces the parts of an all-to-all one by one: single elements, without initial value."""
    drawn = [
        one for one in instances.draw("reduce", 50)
        if "stablehlo.and" in one.region and one.operands[0].shape == (2, 2, 6)
    ]  # fmt: skip
    proofs = prove_local(drawn, "reduce", meshes=["b=3,a=2"], rounds=6)
    assert drawn
    assert not proofs.wrong


def test_a_wrong_local_form_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iota that begins with 0 on every device."""
    monkeypatch.delitem(local_forms.LOCAL_FORMS, "iota")
    proofs = prove_local_kind("iota", 6, meshes=["a=2"])
    assert {run.outcome.split(":")[0] for run in proofs.wrong} == {"wrong"}
    assert any(run.sharding == "0: a" for run in proofs.wrong)
