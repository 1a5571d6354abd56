"""Every op kind on drawn ops: its rule proven by running it, and compared with Shardy's."""

from __future__ import annotations

import pytest

from tests.assurance.test_interchange import DELIBERATE
from toast.analysis import rule_entries
from toast.assurance.instances import KINDS, draw, program_of
from toast.assurance.interchange import differences
from toast.assurance.prove import record
from toast.assurance.random_proofs import prove_kind
from toast.frontend import mlir

#: Kinds whose claims running the op cannot show.
NOT_SHOWN = {
    "constant", "chlo_constant", "iota",  # made from nothing
    "rng", "rng_bit_generator",  # nothing is claimed
    "collective_broadcast", "unary_einsum",  # XLA has no code for it
    *(f"custom_call {t}" for t in (
        "cu_threefry2x32", "cu_threefry2x32_ffi", "hip_threefry2x32", "hip_threefry2x32_ffi",
        "CompactWyHelper", "InvertDiagBlocksLowerTriangular", "InvertDiagBlocksUpperTriangular",
        "QrDecompositionBlock",
    )),  # nor has this machine for these
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_rules_are_proven(kind: str) -> None:
    proven = prove_kind(kind, 10)
    assert [p for p in proven.proofs if p.wrong] == []
    assert bool(proven.tally.proven) == (kind not in NOT_SHOWN)


def test_drawn_instances_are_many_and_depend_on_the_seed_alone() -> None:
    assert len(set(draw("gather", 100))) == 100
    assert draw("gather", 20) == draw("gather", 20)
    assert set(draw("gather", 20)) != set(draw("gather", 20, 1))


#: Kinds that the frontend takes apart: what they hold has rules.
FOLLOWED = {"while", "case", "if", "composite", "sdy_named_computation"}

#: Kinds that no program has on the way from arguments to results.
APART = {"custom_call", "sdy_mesh", "sdy_return", "sdy_manual_computation"}


def test_all_of_stablehlo_has_rules() -> None:
    known = {entry.kind for entry in rule_entries() if not entry.custom_call}
    assert mlir.op_kinds() - known == FOLLOWED | APART


def test_every_kind_with_a_rule_is_drawn_or_claims_nothing() -> None:
    shards = {e.kind for e in rule_entries() if not e.custom_call and e.shards}
    boundary = {
        "argument", "return", "carry", "yield", "join", "optimization_barrier", "manual_entry",
        "manual_exit",
    }  # fmt: skip
    like_others = {
        "chlo__asin_acos_kernel", "chlo_broadcast_compare", "chlo_broadcast_complex",
        "chlo_broadcast_select", "sdy_constant", "uniform_dequantize", "uniform_quantize",
    }  # fmt: skip
    annotations = {kind for kind in shards if kind.startswith("sdy_")}
    # Callbacks, and exchanges in manual regions, stay whole.
    calls = {
        f"custom_call {entry.kind}"
        for entry in rule_entries()
        if entry.custom_call and not entry.kernel and "callback" not in entry.kind
        and entry.kind != "ragged_all_to_all"
    }  # fmt: skip
    assert shards - boundary - like_others - annotations | calls == set(KINDS)


def test_the_record_is_of_these_kinds() -> None:
    """``make prove`` wrote it; run it again when a kind is new."""
    rows = record()
    assert set(rows) == set(KINDS)
    assert all(int(row["wrong"]) == 0 for row in rows.values())
    assert all(int(row["instances"]) >= 200 for row in rows.values())


def test_drawn_ops_agree_with_shardy() -> None:
    """Up to the names of factors, but for the kinds on which we differ on purpose."""
    compared = 0
    for kind in KINDS:
        count, found = differences(program_of(draw(kind, 20), kind))
        assert kind.split()[0] in DELIBERATE or not found, f"{found[0].ours}\n{found[0].shardys}"
        compared += count
    assert compared >= 1000
