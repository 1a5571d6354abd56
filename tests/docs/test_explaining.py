"""docs/explaining.md, run line by line: its commands print what it says, its Python runs."""

from __future__ import annotations

import pathlib

from tests.docs.test_writing_rules import FENCED, matches, run

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "explaining.md"


def test_the_page_does_what_it_says(tmp_path: pathlib.Path) -> None:
    languages = []
    for language, title, body in FENCED.findall(PAGE.read_text()):
        languages.append(language)
        if title:
            (tmp_path / title).write_text(body)
        elif language == "python":
            exec(compile(body, str(PAGE), "exec"), {"__name__": "page"})
        else:
            command, *expected = body.removeprefix("$ ").rstrip("\n").split("\n")
            printed = run(command, tmp_path).splitlines()
            assert matches(expected, printed), f"{command}\n" + "\n".join(printed)
    assert languages.count("console") >= 4
