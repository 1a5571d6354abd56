"""``python -m toast``, and the entry point of the ``toast`` command."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def main() -> None:
    """Runs the command line; an interrupt during its import ends it without a traceback."""
    try:
        if sys.argv[1:] == ["--help"] and _print_help():
            return
        from toast import cli
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        cli.main()
    except SystemExit as end:
        _leave(end)
        raise


def _print_help() -> bool:
    """Prints the written help, which is faster than making it; false if it does not fit here."""
    try:
        width = int(os.environ.get("COLUMNS", "")) or 80
    except ValueError:
        width = os.get_terminal_size().columns if sys.stdout.isatty() else 80
    path = os.path.join(os.path.dirname(__file__), "cli", "help.txt")
    if width < 80 or not os.path.exists(path):
        return False
    module = os.path.basename(sys.argv[0]) == "__main__.py"
    with open(path, encoding="ascii") as text:
        sys.stdout.write(text.read().replace("toast", "python -m toast", 1 if module else 0))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    return True


def _leave(end: SystemExit) -> None:
    """Ends the process at once if a thread is still solving a linear program.

    The solver cannot be interrupted, and its own threads abort a process that exits around them.
    """
    if any(thread.name == "toast-proposals" for thread in threading.enumerate()):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


if __name__ == "__main__":
    main()
