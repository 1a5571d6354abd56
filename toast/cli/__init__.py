"""The command line: ``toast plan``, ``compare``, ``analyze``, ``verify``, ``validate`` ..."""

from __future__ import annotations

import os
import warnings
from typing import Annotated

import typer

from toast.boundary import streams
from toast.cli import (
    checking_commands,
    common,
    explain_command,
    export_command,
    hardware_commands,
    lower_command,
    plan_file_commands,
    planning_commands,
    query_command,
    report_commands,
    rule_commands,
)

app = common.group(
    "Automatic partitioner for JAX: find, explain and run the best sharding.", completion=True
)
for commands in (
    planning_commands, query_command, explain_command, report_commands, plan_file_commands,
    export_command, lower_command, checking_commands,
):  # fmt: skip
    app.add_typer(commands.app)
app.add_typer(hardware_commands.app, name="hardware")
app.add_typer(rule_commands.app, name="rules")


def _print_version(asked: bool) -> None:
    """Print the versions of TOAST, Python, JAX and clingo, and exit."""
    if asked:
        import platform
        from importlib import metadata

        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "clingo"))
        print(
            f"toast {metadata.version('toast-partitioner')} "
            f"(Python {platform.python_version()}, {versions})"
        )
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_version,
            show_default=False,
            help="Print the versions of TOAST, Python, JAX and clingo.",
        ),
    ] = False,
) -> None:
    """Options of the ``toast`` command itself."""


def main() -> None:
    """Entry point of the ``toast`` command."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # hides log messages of XLA
    warnings.showwarning = common.show_warning
    with streams.prepared():
        app()
