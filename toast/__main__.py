"""``python -m toast``."""

from toast.cli import main

main()
