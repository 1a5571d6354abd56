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
from toast.cli.plans import ProgramArgument, load_plan
from toast.errors import QueryError

if TYPE_CHECKING:
    import pandas as pd

    from toast.analysis import Analysis
    from toast.analysis.vocabulary import Relations

app = group("")


class _Alone(typer.core.TyperCommand):
    """A command whose lists are asked for without anything else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asked = [argument for argument in args if argument in ("--list", "--predicates")]
        if asked and len(args) > 1:
            args = [*args]
            args.remove(asked[0])
            ctx.fail(f"{asked[0]} goes alone; remove '{args[0]}'")
        return super().parse_args(ctx, args)


def _list(asked: bool) -> None:
    """Print the audits and leave."""
    if not asked:
        return
    from toast.analysis import query
    from toast.tables import Table

    table = Table("audit", "needs", "what it answers")
    for name, path in query.audits().items():
        need = _NEEDS[query.needs(query.prepare(path))]
        table.add_row(name, need, query.purpose(path))
    console().print(table)
    raise typer.Exit


def _predicates(asked: bool) -> None:
    """Print what queries may ask and leave."""
    if not asked:
        return
    from toast.analysis import query
    from toast.tables import Table

    table = Table("predicate", "needs", "meaning")
    for declared, need in query.meanings():
        meaning = declared.text.split("\nWritten by:")[0].replace("\n", " ")
        atom = f"{declared.name}({', '.join(declared.arguments)})"
        table.add_row(atom, _NEEDS[need], meaning)
    console().print(table)
    print("Numbers have 32 bits: sums and products beyond 2147483647 wrap around.")
    raise typer.Exit


#: A plan's file in place of TARGET says all of it.
_NEEDS = {1: "", 2: "--mesh", 3: "--mesh"}


@command(app, cls=_Alone)
def query(
    context: typer.Context,
    source: Source,
    question: Annotated[
        str,
        typer.Argument(
            metavar="QUERY",
            help="A rule body, 'color(D,C), dim(D,V,_,Size), Size > 4096'; rules with heads, of "
            "which the last is the answer; the name of an audit (--list); or a file of your own.",
        ),
    ],
    listed: Annotated[
        bool,
        typer.Option(
            "--list", callback=_list, is_eager=True, help="List the audits, and what they need."
        ),
    ] = False,
    predicates: Annotated[
        bool,
        typer.Option(
            "--predicates", callback=_predicates, is_eager=True, help="List what queries may ask."
        ),
    ] = False,
    program: ProgramArgument = None,
    definitions: Annotated[
        list[pathlib.Path] | None,
        typer.Option("--with", help="A file of rules that the query may use; repeatable."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="For queries of a mesh, or of the plan on it: data=4,model=4."),
    ] = None,
    hardware: HardwareOption = "tpu-v5e",
    seed: SeedOption = 0,
    rows: Annotated[
        int, typer.Option("--rows", min=0, help="Rows to print; 0 for all of them.")
    ] = 40,
    csv: Annotated[
        pathlib.Path | None,
        typer.Option("--csv", help="Write all rows to this CSV file; - prints it."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask TARGET's analysis, or its plan, anything: a logic query over the solved relations.

    The answer has a column per variable. What a query asks of a mesh or of a plan needs --mesh; the
    plan is searched for only then. Or TARGET is the JSON file of a plan, which says itself what it
    was made from, unless that is named behind QUERY.

    Numbers have 32 bits: sums and products beyond 2147483647 wrap around.
    """
    from toast.analysis import query as stage
    from toast.files import check_writable, is_plan, write_all

    check_writable((csv, json_file), QueryError)
    asked = stage.prepare(question, definitions or ())
    _check(context, source, program, csv, json_file)
    if mesh is None and stage.needs(asked) > 1 and not is_plan(source.target):
        raise stage.missing(asked)
    if is_plan(source.target):
        made = load_plan(source, program, module=False).plan
        analysis, relations = made.analysis, made.vocabulary
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
    """Complain before the long work where options do not go together."""
    from toast.files import is_plan

    if csv and json_file and csv.resolve() == json_file.resolve():
        raise QueryError(f"{csv}: --csv and --json are the same file; give two")
    origin = {name: context.get_parameter_source(name) for name in ("mesh", "hardware", "seed")}
    given = [name for name, found in origin.items() if found and found.name == "COMMANDLINE"]
    if is_plan(source.target):
        if given:
            raise QueryError(
                f"--{given[0]}: {source.target} says itself on which mesh and hardware it is; "
                "leave it out, or give a TARGET that is no plan"
            )
    elif program is not None:
        raise QueryError(f"{program}: one query at a time; only a plan has a PROGRAM behind it")
    elif given and "mesh" not in given:
        raise QueryError(f"--{given[0]}: says nothing without a mesh; give --mesh as well")


def _solved(
    source: Source, need: int, mesh: str | None, hardware: str, seed: int
) -> tuple[Analysis, Relations]:
    """The analysis of TARGET and its relations, with those of the mesh or of a plan if needed."""
    if mesh is None:
        with progress() as show:
            analysis = source.analysis(show, module=False)
        return analysis, analysis.vocabulary.relations
    from toast import api
    from toast.hardware import Mesh, load
    from toast.search import Settings
    from toast.space import Space
    from toast.space.relations import relations as on_mesh

    parsed, machine = Mesh.parse(mesh), load(hardware)
    with progress() as show:
        analysis = source.analysis(show, module=False)
        relations = analysis.vocabulary.relations
        if need == 1:
            return analysis, relations
        api.check_mesh(analysis, parsed, machine)
        if need == 2:
            return analysis, {**relations, **on_mesh(Space(analysis, parsed))}
        made = api.plan(
            analysis, mesh=parsed, hardware=machine, settings=Settings(seed=seed), progress=show
        )
        return analysis, made.vocabulary


def _print(frame: pd.DataFrame, limit: int) -> None:
    if not len(frame.columns):
        print("yes" if len(frame) else "no")
        return
    from pandas.api.types import is_integer_dtype

    from toast.tables import Table

    table = Table(header_style="")
    for name, kind in frame.dtypes.items():
        right = is_integer_dtype(kind)
        table.add_column(str(name), justify="right" if right else "left", overflow="fold")
    shown = frame.head(limit) if limit else frame
    for row in shown.itertuples(index=False, name=None):
        table.add_row(*(str(cell) for cell in row))
    console().print(table)
    print(f"{len(frame):,} rows" if len(frame) != 1 else "1 row")
    if len(shown) < len(frame):
        more = len(frame) - len(shown)
        warn([f"{more:,} more rows: --rows 0 prints them, --csv FILE writes them"])
