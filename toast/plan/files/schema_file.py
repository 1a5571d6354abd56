"""Writes the JSON Schema of plans: ``python -m toast.plan.files.schema_file FILE``."""

from __future__ import annotations

import pathlib
import sys

from toast.plan.files.format import schema_text

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(schema_text(), encoding="utf-8")
