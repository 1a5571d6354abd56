"""``toast query``."""

from __future__ import annotations

import json
import pathlib
from typing import Annotated

import pandas as pd
import rich.table
import typer
from rich.markup import escape

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
from toast.errors import QueryError

app = group("")


def _list(asked: bool) -> None:
    """Print the audits and leave."""
    if not asked:
        return
    from toast.analysis import query

    table = rich.table.Table("audit", "needs", "what it answers")
    for name, path in query.audits().items():
        need = _NEEDS[query.needs(query.prepare(path))]
        table.add_row(name, need, escape(query.purpose(path)))
    console().print(table)
    raise typer.Exit


def _predicates(asked: bool) -> None:
    """Print what queries may ask and leave."""
    if not asked:
        return
    from toast.analysis import query

    table = rich.table.Table("predicate", "needs", "meaning")
    for declared, need in query.meanings():
        meaning = declared.text.split("\nWritten by:")[0].replace("\n", " ")
        atom = f"{declared.name}({', '.join(declared.arguments)})"
        table.add_row(escape(atom), _NEEDS[need], escape(meaning))
    console().print(table)
    raise typer.Exit


_NEEDS = {1: "", 2: "--mesh", 3: "--mesh, --hardware"}


@command(app)
def query(
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
        bool, typer.Option("--list", callback=_list, is_eager=True, help="List the audits.")
    ] = False,
    predicates: Annotated[
        bool,
        typer.Option(
            "--predicates", callback=_predicates, is_eager=True, help="List what queries may ask."
        ),
    ] = False,
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
        pathlib.Path | None, typer.Option("--csv", help="Write all rows to this CSV file.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask TARGET's analysis, or its plan, anything: a logic query over the solved relations.

    The answer has a column per variable. What a query asks of a mesh or of a plan needs --mesh; the
    plan is searched for only then.
    """
    from toast import api
    from toast.analysis import query as stage
    from toast.files import check_writable, write_all
    from toast.hardware import Mesh, load
    from toast.search import Settings
    from toast.space import Space
    from toast.space.relations import relations as on_mesh

    check_writable((csv, json_file), QueryError)
    asked = stage.prepare(question, definitions or ())
    need = stage.needs(asked)
    if need > 1 and mesh is None:
        raise stage.missing(asked)
    parsed, machine = (Mesh.parse(mesh), load(hardware)) if mesh else (None, None)
    with progress() as show:
        analysis = source.analysis(show)
        relations = analysis.vocabulary.relations
        if need > 1 and parsed and machine:
            api.check_mesh(analysis, parsed, machine)
        if need == 2 and parsed:
            relations = {**relations, **on_mesh(Space(analysis, parsed))}
        if need == 3:
            made = api.plan(
                analysis, mesh=parsed, hardware=machine or hardware,
                settings=Settings(seed=seed), progress=show,
            )  # fmt: skip
            relations = made.vocabulary
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


def _print(frame: pd.DataFrame, limit: int) -> None:
    if not len(frame.columns):
        print("yes" if len(frame) else "no")
        return
    table = rich.table.Table(header_style="")
    for name, kind in frame.dtypes.items():
        right = pd.api.types.is_integer_dtype(kind)
        table.add_column(escape(str(name)), justify="right" if right else "left", overflow="fold")
    shown = frame.head(limit) if limit else frame
    for row in shown.itertuples(index=False, name=None):
        table.add_row(*(escape(str(cell)) for cell in row))
    console().print(table)
    print(f"{len(frame):,} rows" if len(frame) != 1 else "1 row")
    if len(shown) < len(frame):
        more = len(frame) - len(shown)
        warn([f"{more:,} more rows: --rows 0 prints them, --csv FILE writes them"])
