"""``toast rules``."""

from __future__ import annotations

import collections
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Annotated

import typer

from toast.cli.common import (
    ArgOption,
    JsonOption,
    RulesOption,
    SeedOption,
    Source,
    command,
    console,
    group,
    progress,
    warn,
)
from toast.cli.json_files import write_json

app = group("List, check, prove and compare rules; annotate programs with them.")


def _keep_working_directory_clean() -> None:
    """Let hypothesis keep its files outside the working directory."""
    place = os.path.join(tempfile.gettempdir(), "toast-hypothesis")
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", place)


@command(app, "list")
def rules_list(rules: RulesOption = None, json_file: JsonOption = None) -> None:
    """List all op kinds and custom call targets with a rule.

    The table shows the kinds of factors of each rule, and the number of random ops on which it was
    proven.
    """
    from toast import report
    from toast.analysis import rule_entries
    from toast.assurance import prove

    entries, proven = list(rule_entries(rules or ())), prove.record()
    write_json(json_file, rules=entries, proven=proven)
    console().print(report.rule_list(entries, proven))


@command(app, "check")
def rules_check(
    paths: Annotated[
        list[pathlib.Path], typer.Argument(help="Rule files, or folders of rule files.")
    ],
    on: Annotated[
        str | None, typer.Option("--on", help="Also apply the rules to the ops of this TARGET.")
    ] = None,
    arg: ArgOption = None,
    json_file: JsonOption = None,
) -> None:
    """Check rule files: syntax, predicates, variables, one rule per op, no code, sound factors."""
    from toast import targets
    from toast.assurance import lint

    _keep_working_directory_clean()
    program = targets.load(on, shapes=arg or (), small=True) if on else None
    count, warnings = lint.check(paths, program)
    odd = list(warnings)
    write_json(json_file, files=count, notes=odd)
    warn(odd)
    print("1 rule file is sound" if count == 1 else f"{count} rule files are sound")


@command(app, "annotate")
def rules_annotate(
    source: Source,
    output: Annotated[
        pathlib.Path | None, typer.Option("-o", "--output", help="File to write; default: print.")
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--function",
            help="Annotate only this function of a StableHLO file, with its calls inlined, and "
            "drop the others. Default: all public functions; without a function main, also the "
            "private ones, and calls stay.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Write TARGET as StableHLO with TOAST's rule on every op, for Shardy's propagation.

    Functions that TOAST cannot read, such as those with dynamic shapes, are written without rules;
    a note names them.
    """
    from toast.assurance import interchange
    from toast.errors import PlanError
    from toast.files import check_writable, write_all

    check_writable((output,), PlanError)
    programs, left_out = source.functions(function)
    text, count = interchange.annotated_together(programs, source.rules)
    warn(left_out)
    write_json(json_file, ops=count, left_out=left_out, output=output)
    if output:
        write_all({output: text}, PlanError)
        print(f"{count} ops annotated in {output}")
    else:
        print(text)


@command(app, "diff")
def rules_diff(
    source: Source,
    json_file: JsonOption = None,
) -> None:
    """Compare TOAST's rule with Shardy's for every op of TARGET, up to the names of factors.

    Exits with code 1 if rules differ.
    """
    from toast.assurance import interchange

    compared, differences = interchange.differences(source.program(), source.rules)
    write_json(json_file, ops=compared, differences=differences)
    for difference in differences:
        print(f"{difference.kind} at {difference.place}")
        print(f"  ours:     {difference.ours}\n  Shardy's: {difference.shardys}")
    print(f"{compared} ops compared, {len(differences)} differ")
    if differences:
        raise typer.Exit(1)


@command(app, "prove")
def rules_prove(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.lp | TARGET]",
            help="Rule file, to prove on random ops of its kinds; or program, on whose ops all "
            "rules are proven (a model in its small form). Default: all of TOAST's rules.",
        ),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", min=1, help="Number of random ops of each kind.")
    ] = 20,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            "--reference",
            help="Reference implementation of a custom call: target=module:function; repeatable.",
        ),
    ] = None,
    arg: ArgOption = None,
    rules: RulesOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Run ops unsharded and sharded along each factor, and compare the results.

    Exits with code 1 if a rule is wrong.
    """
    from toast import report, targets
    from toast.assurance import prove
    from toast.program import Program

    rows: list[prove.Tally] = []
    wrong: list[str] = []
    nothing: list[str] = []
    reasons: collections.Counter[str] = collections.Counter()
    with progress() as show:
        files = list(rules or ())
        if what is None or what.endswith(".lp"):
            files += [pathlib.Path(what)] if what else []
            _keep_working_directory_clean()
            from toast.assurance import random_proofs  # needs hypothesis

            kinds, nothing = random_proofs.drawable(files)
            runs = (random_proofs.prove_kind(kind, count, files, seed=seed) for kind in kinds)
            results: Iterable[tuple[Program, tuple[prove.Proof, ...]]] = (
                (run.program, run.proofs) for run in runs
            )
        else:
            references = targets.references(reference or ())
            program = targets.load(what, shapes=arg or (), small=True)
            proofs = prove.prove(program, files, references=references, seed=seed)
            results = [(program, proofs)]
        for program, proofs in results:
            for row in prove.tally(proofs):
                show(f"running ops: {row.kind}")
                rows.append(row)
            reasons.update(p.outcome for p in proofs if not p.wrong and p.outcome != "proven")
            wrong += [
                f"{program.describe(proof.op)}: factor {proof.factor}: {proof.outcome}"
                for proof in proofs
                if proof.wrong
            ]
    write_json(json_file, kinds=rows, wrong=wrong, not_drawn=nothing, not_run=dict(reasons))
    console().print(report.proof_table(rows))
    warn(nothing + [f"{number} not run: {reason}" for reason, number in reasons.most_common(5)])
    for line in wrong:
        print(line)
    if wrong:
        raise typer.Exit(1)
