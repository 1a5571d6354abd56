"""``python -m toast``, and the entry point of the ``toast`` command."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def main() -> None:
    """Runs the command line; an interrupt during its import ends it without a traceback."""
    try:
        from toast import cli
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        cli.main()
    except SystemExit as end:
        _leave(end)
        raise


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
