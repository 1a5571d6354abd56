"""docs/plans.md, run line by line."""

from __future__ import annotations

import json
import pathlib

from tests.docs.test_writing_rules import FENCED, matches, run
from toast.plan import schema

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "plans.md"


def test_the_page_does_what_it_says(tmp_path: pathlib.Path) -> None:
    commands = 0
    for language, title, body in FENCED.findall(PAGE.read_text()):
        if title:
            (tmp_path / title).write_text(body)
            continue
        assert language == "console", "other blocks have a title"
        for step in body.removeprefix("$ ").split("\n$ "):
            command, *expected = step.strip("\n").split("\n")
            printed = run(command, tmp_path).splitlines()
            assert matches(expected, printed), f"{command}\n" + "\n".join(printed)
            commands += 1
    assert commands >= 8


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
