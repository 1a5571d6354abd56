"""Rules proven by execution: an op run on shards must equal the op run on the whole.

For every distinct op of a program and every factor that its rule lets a mesh axis lie on, the
operands are split along the factor, the op is run on each part, and the results are concatenated,
or put together by the factor's combiner.  No sharding and no partitioner takes part: what is tested
is the claim that the rule makes.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
from collections.abc import Sequence
from typing import Any

from toast.analysis.rules import solve_rules
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
    #: ``proven``, ``wrong``, or why it was not run.
    outcome: str

    @property
    def wrong(self) -> bool:
        """Whether running the op contradicts its rule."""
        return self.outcome.startswith("wrong")


@dataclasses.dataclass(frozen=True)
class Tally:
    """Outcomes of one op kind."""

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
    """Prove the rules of all distinct ops of ``program``, which should be small.

    ``references`` says what custom calls compute that XLA has no code for here.

    Raises :class:`toast.errors.PlanError` for fact bases, which have nothing to run.
    """
    source = program.source
    if not isinstance(source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no ops to run")
    solved = solve_rules(program, rules)
    seen: set[int] = set()
    found: list[ShardedOp] = []
    for number, op in enumerate(program.ops):
        if op.signature in seen or source.operations[number] is None:
            continue
        seen.add(op.signature)
        signature, rule = program.signatures[op.signature], solved[op.signature]
        if rule.missing or signature.kind in ("carry", "yield", "join", "optimization_barrier"):
            continue
        text = mlir.generic_text(source.operations[number])
        target = str(signature.attribute("call_target_name") or "")
        reference = (references or {}).get(target) or reference_of(signature)
        found.append(ShardedOp(number, signature, rule, text, seed, reference))
    return _outcomes(found)


def _outcomes(ops: Sequence[ShardedOp]) -> tuple[Proof, ...]:
    """Every factor that an axis may lie on, with its outcome."""
    claims = [(i, f, n) for i in ops for f, n in i.claims()]
    refused = [i.unclaimed(f) for i, f, _ in claims]
    open_ = [claim for claim, reason in zip(claims, refused, strict=True) if not reason]
    claimed = list({id(i): i for i, _, _ in open_}.values())
    whole = run_all([OpRun(i.whole(), [i.arguments], i.reference) for i in claimed])
    expected = {id(i): results for i, results in zip(claimed, whole, strict=True)}
    parts = run_all([OpRun(i.part(f, n), i.split(f, n), i.reference) for i, f, n in open_])
    found = iter(zip(open_, parts, strict=True))
    proofs = []
    for (instance, factor, shards), reason in zip(claims, refused, strict=True):
        if not reason:
            _, pieces = next(found)
            want = expected[id(instance)]
            broken = next((r for r in (want, pieces) if isinstance(r, str)), "")
            reason = broken or instance.compare(factor, shards, pieces, want[0])  # type: ignore[arg-type]
        label = instance.rule.factors[factor].label
        proofs.append(Proof(instance.signature.kind, instance.number, label, reason))
    return tuple(proofs)


def record() -> dict[str, dict[str, str]]:
    """Of each shipped kind, what the last ``make prove`` has found: ``rules/proven.csv``."""
    path = directory("rules") / "proven.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as lines:
        return {row["kind"]: row for row in csv.DictReader(lines)}


def tally(proofs: Sequence[Proof]) -> tuple[Tally, ...]:
    """Outcomes by op kind, sorted."""
    by_kind = collections.defaultdict(list)
    for proof in proofs:
        by_kind[proof.kind].append(proof)
    return tuple(
        Tally(
            kind,
            len({p.op for p in found}),
            sum(p.outcome == "proven" for p in found),
            sum(p.wrong for p in found),
            sum(p.outcome != "proven" and not p.wrong for p in found),
        )
        for kind, found in sorted(by_kind.items())
    )
