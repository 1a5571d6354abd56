"""The reference of Python leaves nothing out, and describes every public attribute."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.blocks import ROOT

pycode = pytest.importorskip(
    "sphinx.pycode", reason="without sphinx: pip install 'toast-partitioner[docs]'"
)

PAGES = sorted(ROOT.glob("docs/api/*.md"))
_ENTRY = re.compile(r"^\.\. auto(\w+):: ([\w.]+)$", re.MULTILINE)
ENTRIES = [entry for page in PAGES for entry in _ENTRY.findall(page.read_text())]
#: Packages that users import from, all of whose names the reference has.
WHOLE = ("toast", "toast.fitting", "toast.export", "toast.hardware")
#: What users do not call, and what the reference has with its whole module.
INNER = {
    "toast.ToastError", "toast.fitting.RequestPlanner", "toast.fitting.find_fit",
    "toast.fitting.remedies_for", "toast.hardware.check_size",
}  # fmt: skip


def test_the_reference_has_every_public_name() -> None:
    there = {id(pkgutil.resolve_name(name)) for _, name in ENTRIES}
    for package in WHOLE:
        exported = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
        lacking = {name for name in exported if id(pkgutil.resolve_name(name)) not in there}
        assert lacking <= INNER
    assert len(there) == len(ENTRIES), "twice"


def test_its_pages_are_in_its_table_and_in_its_contents() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for page in PAGES:
        assert f"](api/{page.name})" in text
        assert re.search(rf"^api/{page.stem}$", text, re.MULTILINE)


@pytest.mark.parametrize(("kind", "name"), ENTRIES, ids=[name for _, name in ENTRIES])
def test_everything_is_described(kind: str, name: str) -> None:
    entry = pkgutil.resolve_name(name)
    if kind == "data":
        module, _, own = name.rpartition(".")
        assert own in described(module, "")
        return
    assert inspect.getdoc(entry)
    if inspect.isclass(entry):
        assert not [*undescribed(entry)]
    if kind == "module":
        for member in vars(entry).values():
            if inspect.isclass(member) and member.__module__ == name:
                assert inspect.getdoc(member)
                assert not [*undescribed(member)]


def test_an_attribute_without_a_description_is_noticed() -> None:
    assert [*undescribed(Sample)] == ["bare", "method"]


class Sample:
    """A class with and without descriptions."""

    #: Described.
    above: int = 0
    beside: int = 0  #: Described.
    bare: int = 0

    def method(self) -> None: ...

    @property
    def size(self) -> int:
        """Described."""
        return 0


def undescribed(entry: type) -> Iterator[str]:
    """The public attributes of a class for which autodoc has nothing to say."""
    lineage = [c for c in entry.__mro__ if c.__module__.partition(".")[0] in ("toast", "tests")]
    names = {n for c in lineage for n in (*vars(c), *inspect.get_annotations(c))}
    for name in sorted(names):
        if not name.startswith("_") and not any(
            name in described(c.__module__, c.__qualname__) or documented(vars(c).get(name))
            for c in lineage
        ):
            yield name


@functools.cache
def described(module: str, owner: str) -> set[str]:
    """The attributes of a class, or of a module, that have a ``#:`` comment."""
    analyzer = pycode.ModuleAnalyzer.for_module(module)
    return {name for of, name in analyzer.find_attr_docs() if of == owner}


def documented(attribute: Any) -> bool:
    """Whether a method or a property has a docstring."""
    for wrapped in ("func", "fget", "__func__"):
        attribute = getattr(attribute, wrapped, None) or attribute
    return callable(attribute) and bool(attribute.__doc__)
