"""``toast export``."""

from __future__ import annotations

import enum
import pathlib
from collections.abc import Sequence
from typing import Annotated

import typer

from toast.cli.common import JsonOption, Source, command, group, progress
from toast.cli.json_files import write_json
from toast.cli.plan_file_commands import ProgramArgument, load_plan

app = group("")


class Trainer(enum.StrEnum):
    """What a plan is exported to."""

    python = "python"
    flax = "flax"
    maxtext = "maxtext"
    levanter = "levanter"
    torch = "torch"


@command(app)
def export(
    source: Source,
    program: ProgramArgument = None,
    to: Annotated[
        Trainer,
        typer.Option(
            "--to",
            help="The format: a Python module that needs JAX alone; a module with names and rules "
            "for Flax (Linen and NNX); a configuration of MaxText, or of Levanter; a module with "
            "placements and parallel styles that needs PyTorch alone.",
        ),
    ] = Trainer.python,
    output: Annotated[
        pathlib.Path | None,
        typer.Option("-o", "--output", help="Write to this file; default: standard output."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="ARGUMENT:DIMENSION=NAME",
            help="Name of a logical axis: \"params['layers'][*]['w1']:1=mlp\"; repeatable. "
            "Default: from the names of parameters.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="AXIS=AXIS",
            help="MaxText's mesh axis for an axis of the plan: model=tensor; repeatable.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Write a plan as a file of another trainer.

    TARGET is a plan, written by toast plan --json. Comments in the file name what the format cannot
    say, such as the shardings of single ops.
    """
    from toast.errors import PlanError
    from toast.export import export_file
    from toast.files import check_writable, is_plan, write_all
    from toast.plan import read

    check_writable((output, json_file), PlanError)
    if not is_plan(source.target):
        raise PlanError(
            f"{source.target}: not a plan; write one with toast plan {source.target} --json FILE"
        )
    names, renamed = _pairs(name, "--name"), _pairs(rename, "--rename")
    if to is Trainer.python and program is None and not names and not renamed:
        text = export_file(read(source.target), to)
    else:
        plan = load_plan(source, program).plan
        with progress() as show:
            show("export")
            text = plan.export(to, names=names, rename=renamed)
    if output is not None:
        write_all({output: text}, PlanError)
    write_json(json_file, target=source.target, to=to, files=[output] if output else [])
    if output is None:
        print(text, end="")
    elif output != pathlib.Path("-"):
        print(f"written to {output}")


def _pairs(texts: Sequence[str] | None, option: str) -> dict[str, str]:
    """The pairs of an option, such as ``model=tensor``."""
    from toast.errors import PlanError

    pairs = {}
    for text in texts or ():
        left, _, right = text.rpartition("=")
        if not left or not right:
            raise PlanError(f"{option} {text}: write a pair, such as {_EXAMPLES[option]}")
        pairs[left] = right
    return pairs


_EXAMPLES = {"--name": "\"params['w1']:1=mlp\"", "--rename": "model=tensor"}
