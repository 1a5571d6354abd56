"""``python -m toast``, and the entry point of the ``toast`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; an interrupt during its import ends it without a traceback."""
    try:
        from toast import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
