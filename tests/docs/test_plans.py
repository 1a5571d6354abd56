"""docs/plans.md says what the schema says."""

from __future__ import annotations

import json

from tests.docs.blocks import ROOT
from toast.plan import schema

PAGE = ROOT / "docs" / "plans.md"


def test_the_table_names_what_the_schema_has() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {part.strip("` ") for row in rows for part in row.split("|")[1].split(",")}
    assert named <= set(schema()["properties"])
    left = {"version", "program", "method", "note", "op_classes", "fits", "cost", "seed", "reshards",
            "replayed", "analysis", "search", "meshes", "seconds", "applied", "hardware_hash"}  # fmt: skip
    assert set(schema()["properties"]) - named == left


def test_the_schema_is_in_one_piece() -> None:
    text = (PAGE.parent / "plan.schema.json").read_text()
    assert json.loads(text) == schema()
