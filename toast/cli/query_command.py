"""``toast query``."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from toast.cli.common import (
    HardwareOption,
    JsonOption,
    SeedOption,
    Source,
    command,
    console,
    group,
    progress,
    warn,
)
from toast.cli.plan_file_commands import ProgramArgument, load_plan
from toast.errors import QueryError

if TYPE_CHECKING:
    import pandas as pd

    from toast.analysis import Analysis
    from toast.analysis.query import Relations

app = group("")


class _Alone(typer.core.TyperCommand):
    """A command whose options ``--list`` and ``--predicates`` take no other arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asked = [argument for argument in args if argument in ("--list", "--predicates")]
        if asked and len(args) > 1:
            args = [*args]
            args.remove(asked[0])
            ctx.fail(f"{asked[0]} takes no other arguments; remove '{args[0]}'")
        return super().parse_args(ctx, args)


def _list(asked: bool) -> None:
    """Print the audits and exit."""
    if not asked:
        return
    from toast import report
    from toast.analysis import query

    rows = (
        (name, _NEEDS[query.needs(query.prepare(path))], query.purpose(path))
        for name, path in query.audits().items()
    )
    console().print(report.audit_list(rows))
    raise typer.Exit


def _predicates(asked: bool) -> None:
    """Print the predicates that queries may use and exit."""
    if not asked:
        return
    from toast import report
    from toast.analysis import query

    rows = (
        (
            f"{declared.name}({', '.join(declared.arguments)})",
            _NEEDS[need],
            declared.text.split("\nWritten by:")[0].replace("\n", " "),
        )
        for declared, need in query.meanings()
    )
    console().print(report.predicate_list(rows))
    print("Numbers have 32 bits: a sum or a product above 2147483647 is an error.")
    raise typer.Exit


#: The option that a query of each level needs; with a plan file as TARGET, none.
_NEEDS = {1: "", 2: "--mesh", 3: "--mesh"}


@command(app, cls=_Alone)
def query(
    context: typer.Context,
    source: Source,
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help="Rule body, such as 'color(D,C), dim(D,V,_,Size), Size > 4096'; rules, the last "
            "of which is the answer; name of an audit (see --list); or query file.",
        ),
    ],
    listed: Annotated[
        bool,
        typer.Option(
            "--list",
            callback=_list,
            is_eager=True,
            help="List the audits and the options they need.",
        ),
    ] = False,
    predicates: Annotated[
        bool,
        typer.Option(
            "--predicates",
            callback=_predicates,
            is_eager=True,
            help="List the predicates for queries.",
        ),
    ] = False,
    program: ProgramArgument = None,
    definitions: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--with", help="File with rules that the query may use; repeatable."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", help="Mesh, for queries about a mesh or a plan, such as data=4,model=4."
        ),
    ] = None,
    hardware: HardwareOption = "tpu-v5e",
    seed: SeedOption = 0,
    rows: Annotated[
        int, typer.Option("--rows", min=0, help="Number of rows to print; 0 prints all.")
    ] = 40,
    csv: Annotated[
        pathlib.Path | None,
        typer.Option("--csv", help="Write all rows to this CSV file; - is standard output."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Query the relations of TARGET's analysis or plan.

    The answer has one column per variable. Queries about a mesh or a plan need --mesh; a plan is
    searched only if the query needs one. If TARGET is a plan file, the query uses that plan. Add
    PROGRAM if the program of the plan is neither a zoo model nor a file in the same folder.

    Numbers have 32 bits: a sum or a product above 2147483647 is an error.
    """
    from toast.analysis import query as stage
    from toast.files import check_writable, is_plan, write_all

    check_writable((csv, json_file), QueryError)
    asked = stage.prepare(question, definitions or ())
    _check(context, source, program, csv, json_file)
    if mesh is None and stage.needs(asked) > 1 and not is_plan(source.target):
        raise stage.missing(asked)
    if is_plan(source.target):
        own = context.get_parameter_source("hardware")
        chosen = hardware if own and own.name == "COMMANDLINE" else None
        plan = load_plan(source, program, hardware=chosen, module=False).plan
        analysis, relations = plan.analysis, plan.vocabulary
    else:
        analysis, relations = _solved(source, stage.needs(asked), mesh, hardware, seed)
    with progress() as show:
        show("query")
        frame = stage.evaluate(asked, relations, analysis.label)
    texts: dict[str | pathlib.Path, str] = {}
    if csv:
        texts[csv] = frame.to_csv(index=False)
    if json_file:
        data = {
            "version": 1, "program": analysis.program.name, "query": question,
            "columns": list(frame.columns), "rows": frame.to_numpy(dtype=object).tolist(),
        }  # fmt: skip
        texts[json_file] = json.dumps(data, indent=2) + "\n"
    write_all(texts, QueryError)
    _print(frame, rows)


def _check(
    context: typer.Context,
    source: Source,
    program: str | None,
    csv: pathlib.Path | None,
    json_file: pathlib.Path | None,
) -> None:
    """Reject contradictory options before the analysis starts."""
    from toast.files import is_plan

    if csv and json_file and csv.resolve() == json_file.resolve():
        raise QueryError(f"{csv}: --csv and --json name the same file; use two files")
    origin = {name: context.get_parameter_source(name) for name in ("mesh", "hardware", "seed")}
    options = [
        name
        for name, value_source in origin.items()
        if value_source and value_source.name == "COMMANDLINE"
    ]
    if is_plan(source.target):
        if conflicting := [name for name in options if name != "hardware"]:
            raise QueryError(
                f"--{conflicting[0]}: {source.target} is a plan with its own mesh and hardware; "
                f"remove --{conflicting[0]}, or use a TARGET that is not a plan"
            )
    elif program is not None:
        raise QueryError(f"{program}: PROGRAM is only for plans; run one query at a time")
    elif options and "mesh" not in options:
        raise QueryError(f"--{options[0]}: has no effect without a mesh; add --mesh")


def _solved(
    source: Source, need: int, mesh: str | None, hardware: str, seed: int
) -> tuple[Analysis, Relations]:
    """The analysis of TARGET and its relations, for ``need`` > 1 with those of a mesh or plan."""
    if mesh is None:
        with progress() as show:
            analysis = source.analysis(show, module=False)
        return analysis, analysis.vocabulary.relations
    from toast import api
    from toast.hardware import Mesh, load
    from toast.search import Settings
    from toast.space import Space
    from toast.space.mesh_relations import relations as on_mesh

    parsed, machine = Mesh.parse(mesh), load(hardware)
    with progress() as show:
        analysis = source.on(machine).analysis(show, module=False)
        relations = analysis.vocabulary.relations
        if need == 1:
            return analysis, relations
        api.check_mesh(analysis, parsed, machine)
        if need == 2:
            return analysis, {**relations, **on_mesh(Space(analysis, parsed))}
        plan = api.plan(
            analysis, mesh=parsed, hardware=machine, settings=Settings(seed=seed), progress=show
        )
        return plan.analysis, plan.vocabulary


def _print(frame: pd.DataFrame, limit: int) -> None:
    if not len(frame.columns):
        print("yes" if len(frame) else "no")
        return
    from toast import report

    shown = frame.head(limit) if limit else frame
    console().print(report.answer_table(shown))
    print(f"{len(frame):,} rows" if len(frame) != 1 else "1 row")
    if len(shown) < len(frame):
        more = len(frame) - len(shown)
        warn([f"{more:,} more rows: --rows 0 prints them, --csv FILE writes them"])
