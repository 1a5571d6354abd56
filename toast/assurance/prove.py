"""Proves rules by execution: an op on shards must have the same results as the whole op.

For every distinct op of a program and every factor that may take a mesh axis, the operands are
split along the factor, the op runs on each part, and the results are concatenated, or combined by
the combiner of the factor.  Neither shardings nor a partitioner is used, so that only the rule is
tested.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
from collections.abc import Sequence
from typing import Any

from toast.analysis.rules import solve_rules
from toast.assurance.interchange import IN_PARTS
from toast.assurance.op_runs import OpRun, run_all
from toast.assurance.references import References, reference_of
from toast.assurance.sharded_op import ShardedOp
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend.mlir import ModuleSource
from toast.program import Program
from toast.resources import directory


@dataclasses.dataclass(frozen=True)
class Proof:
    """The outcome for one factor of one op."""

    kind: str
    op: int
    factor: str
    #: ``proven``, a text that begins with ``wrong``, or the reason why the op was not run.
    outcome: str

    @property
    def wrong(self) -> bool:
        """Whether running the op contradicts its rule."""
        return self.outcome.startswith("wrong")


@dataclasses.dataclass(frozen=True)
class Tally:
    """The numbers of outcomes of one op kind."""

    kind: str
    instances: int
    proven: int
    wrong: int
    skipped: int


def prove(
    program: Program,
    rules: Sequence[Any] = (),
    *,
    references: References | None = None,
    seed: int = 0,
) -> tuple[Proof, ...]:
    """Proves the rules of all distinct ops of a program.

    :param program: the program, which should be small.
    :param rules: further rule files, or folders of rule files.
    :param references: functions that compute the custom calls that XLA lacks on this machine.
    :param seed: the seed of the random operands.
    :raises toast.errors.PlanError: for a fact base, which cannot be run.
    """
    source = program.source
    if not isinstance(source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no ops to run")
    # Whether XLA partitions a custom call does not matter here.
    solved = solve_rules(program, rules, partitioned=True)
    earlier: set[int] = set()
    ops: list[ShardedOp] = []
    for number, op in enumerate(program.ops):
        if op.signature in earlier or source.operations[number] is None:
            continue
        earlier.add(op.signature)
        signature, rule = program.signatures[op.signature], solved[op.signature]
        # An op at the boundary of a region, or a collective in it, cannot run alone.
        if rule.missing or signature.kind in IN_PARTS or signature.attribute("axes") is not None:
            continue
        text = mlir.generic_text(source.operations[number])
        names = (signature.attribute(name) for name in ("kernel_name", "call_target_name"))
        stated = [(references or {}).get(str(name)) for name in names]
        reference = next(filter(None, stated), None) or reference_of(signature)
        ops.append(ShardedOp(number, signature, rule, text, seed, reference))
    return _outcomes(ops)


def _outcomes(ops: Sequence[ShardedOp]) -> tuple[Proof, ...]:
    """The outcome for every factor that may take an axis."""
    claims = [(i, f, n) for i in ops for f, n in i.claims()]
    refused = [i.unclaimed(f) for i, f, _ in claims]
    open_ = [claim for claim, reason in zip(claims, refused, strict=True) if not reason]
    claimed = list({id(i): i for i, _, _ in open_}.values())
    whole = run_all([OpRun(i.whole(), [i.arguments], i.reference) for i in claimed])
    expected = {id(i): results for i, results in zip(claimed, whole, strict=True)}
    parts = run_all([OpRun(i.part(f, n), i.split(f, n), i.reference) for i, f, n in open_])
    runs = iter(zip(open_, parts, strict=True))
    proofs = []
    for (instance, factor, shards), reason in zip(claims, refused, strict=True):
        if not reason:
            _, pieces = next(runs)
            want = expected[id(instance)]
            broken = next((r for r in (want, pieces) if isinstance(r, str)), "")
            reason = broken or instance.compare(factor, shards, pieces, want[0])  # type: ignore[arg-type]
        label = instance.rule.factors[factor].label
        proofs.append(Proof(instance.signature.kind, instance.number, label, reason))
    return tuple(proofs)


def record() -> dict[str, dict[str, str]]:
    """The results of the last ``make prove`` by op kind, from ``rules/proven.csv``."""
    path = directory("rules") / "proven.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as lines:
        return {row["kind"]: row for row in csv.DictReader(lines)}


def tally(proofs: Sequence[Proof]) -> tuple[Tally, ...]:
    """The numbers of outcomes, sorted by op kind."""
    by_kind = collections.defaultdict(list)
    for proof in proofs:
        by_kind[proof.kind].append(proof)
    return tuple(
        Tally(
            kind,
            len({p.op for p in outcomes}),
            sum(p.outcome == "proven" for p in outcomes),
            sum(p.wrong for p in outcomes),
            sum(p.outcome != "proven" and not p.wrong for p in outcomes),
        )
        for kind, outcomes in sorted(by_kind.items())
    )
