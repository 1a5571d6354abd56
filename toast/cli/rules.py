"""``toast rules``."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable
from typing import Annotated

import typer

from toast.cli.common import (
    ArgOption,
    RulesOption,
    SeedOption,
    Source,
    command,
    console,
    group,
    progress,
    warn,
)

app = group("Sharding rules: what there are, whether they are sound, and how they compare.")


@command(app, "list")
def rules_list(rules: RulesOption = None) -> None:
    """List every op kind and custom call target that has a rule.

    With the kinds of factors it makes, and how many drawn ops it was proven on.
    """
    from toast import prove
    from toast.analysis import rule_entries
    from toast.tables import Table

    known = prove.record()
    table = Table("kind", "file", "factors", "ops proven on")
    for entry in rule_entries(rules or ()):
        name = f"{'custom_call ' if entry.custom_call else ''}{entry.kind}"
        # What is recorded is of the shipped rules.
        row = known.get(name, {}) if entry.shipped else {}
        factors = row.get("factors", "-") if entry.shards else "need-replication"
        table.add_row(name, str(entry.file), factors, row.get("instances", "-"))
    console().print(table)


@command(app, "check")
def rules_check(
    paths: Annotated[list[pathlib.Path], typer.Argument(help="Rule files, or folders of them.")],
    on: Annotated[
        str | None, typer.Option("--on", help="Also try the rules on the ops of this TARGET.")
    ] = None,
    arg: ArgOption = None,
) -> None:
    """Check rule files: syntax, predicates, variables, one rule per op, no code, sound factors."""
    from toast import lint, targets

    program = targets.load(on, shapes=arg or (), small=True) if on else None
    count, odd = lint.check(paths, program)
    warn(list(odd))
    print(f"{count} rule files are sound")


@command(app, "annotate")
def rules_annotate(
    source: Source,
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="Write here instead of printing.")
    ] = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
) -> None:
    """Write TARGET as StableHLO with our rule on every op, for Shardy's propagation to use."""
    from toast import interchange
    from toast.errors import PlanError
    from toast.files import check_writable, write_all

    check_writable((output,), PlanError)
    text, count = interchange.annotated(source.program(), source.rules)
    if output:
        write_all({output: text}, PlanError)
        print(f"{count} ops annotated in {output}")
    else:
        print(text)


@command(app, "diff")
def rules_diff(
    source: Source,
) -> None:
    """Compare our rule with Shardy's for every op of TARGET, up to the names of factors.

    Exits with code 1 when some differ.
    """
    from toast import interchange

    compared, found = interchange.differences(source.program(), source.rules)
    for difference in found:
        print(f"{difference.kind} at {difference.place}")
        print(f"  ours:     {difference.ours}\n  Shardy's: {difference.shardys}")
    print(f"{compared} ops compared, {len(found)} differ")
    if found:
        raise typer.Exit(1)


@command(app, "prove")
def rules_prove(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.lp | TARGET]",
            help="A rule file, proven on drawn ops of its kinds; or a program, on whose ops all "
            "rules are proven (a model in its small form). Default: all shipped rules.",
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Ops to draw of each kind.")] = 20,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            help="What a custom call of a program computes: target=module:function; repeatable.",
        ),
    ] = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
    seed: SeedOption = 0,
) -> None:
    """Run ops whole and in shards, split along each factor that can be sharded, and compare.

    Exits with code 1 when some rule is wrong.
    """
    from toast import prove, targets
    from toast.frontend import Program
    from toast.tables import Table

    table = Table("kind", "instances", "factors proven", "wrong", "not run")
    wrong: list[str] = []
    nothing: list[str] = []
    reasons: collections.Counter[str] = collections.Counter()
    with progress() as show:
        files = list(rules or ())
        if what is None or what.endswith(".lp"):
            files += [pathlib.Path(what)] if what else []
            kinds, nothing = prove.drawable(files)
            runs = (prove.prove_kind(kind, count, files, seed=seed) for kind in kinds)
            found: Iterable[tuple[Program, tuple[prove.Proof, ...]]] = (
                (run.program, run.proofs) for run in runs
            )
        else:
            references = targets.references(reference or ())
            program = targets.load(what, shapes=arg or (), small=True)
            proofs = prove.prove(program, files, references=references, seed=seed)
            found = [(program, proofs)]
        for program, proofs in found:
            for row in prove.tally(proofs):
                show(f"running ops: {row.kind}")
                table.add_row(
                    row.kind, *map(str, (row.instances, row.proven, row.wrong, row.skipped))
                )
            reasons.update(p.outcome for p in proofs if not p.wrong and p.outcome != "proven")
            wrong += [
                f"{program.describe(proof.op)}: factor {proof.factor}: {proof.outcome}"
                for proof in proofs
                if proof.wrong
            ]
    console().print(table)
    warn(nothing + [f"{number} not run: {reason}" for reason, number in reasons.most_common(5)])
    for line in wrong:
        print(line)
    if wrong:
        raise typer.Exit(1)
