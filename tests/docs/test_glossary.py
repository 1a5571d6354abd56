"""docs/glossary.md: in order, and what it refers to is there; CONTRIBUTING.md names files that exist."""

from __future__ import annotations

import re

from tests.docs.blocks import ROOT

ROWS = re.findall(r"^\| ([^|]+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)[2:]


def test_entries_are_in_order() -> None:
    words = [word.lower() for word, _ in ROWS]
    assert words == sorted(words)
    assert len(set(words)) == len(words) > 50


def test_words_in_italics_have_entries() -> None:
    words = {word.lower() for word, _ in ROWS}
    for _, meaning in ROWS:
        for word in re.findall(r"\*([^*]+)\*", meaning):
            singular = {word, word.removesuffix("s"), word.removesuffix("es"), f"{word[:-3]}y"}
            assert {form.lower() for form in singular} & words, word


def test_contributing_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:toast|tests|rules|docs|facts|benchmarks)/[\w/.-]+)`", text):
        assert (ROOT / path).exists() or "NAME" in path or "FAMILY" in path, path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", makefile, re.M), target
