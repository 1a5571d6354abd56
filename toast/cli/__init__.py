"""The command line: ``toast plan``, ``compare``, ``analyze``, ``verify``, ``validate`` ..."""

from __future__ import annotations

import os
import warnings

from toast.cli import (
    asking,
    common,
    explaining,
    hardware,
    judging,
    planning,
    plans,
    reporting,
    rules,
)

app = common.group("The automatic partitioner for JAX: find, explain and run the best sharding.")
for commands in (planning, asking, explaining, reporting, plans, judging):
    app.add_typer(commands.app)
app.add_typer(hardware.app, name="hardware")
app.add_typer(rules.app, name="rules")


def main() -> None:
    """Entry point of the ``toast`` command."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # remarks of XLA's on itself
    warnings.showwarning = common.show_warning
    app()
