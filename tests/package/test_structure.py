"""The order of the stages, the names, and that no modules import each other."""

from __future__ import annotations

import ast
import collections
import re

import pytest

from tests.package import structure

#: The stages in order: none imports one that comes later.
STAGES = (
    "errors", "boundary", "resources", "lazy", "files", "units", "text_tables", "paths", "parameter_names", "graphs", "distinct", "records", "garbage", "threads",
    "disk_cache", "logic", "hardware", "program", "ports", "frontend", "facts", "analysis", "uneven", "space", "cost", "inputs",
    "search", "apply", "lower", "plan", "explain", "export", "models", "api", "other_policies", "fitting", "planned_function", "targets", "assurance", "evaluation",
    "report", "cli", "__main__",
)  # fmt: skip

#: Circles that are still there; the list only gets shorter.
CIRCLES: list[tuple[str, ...]] = []

#: Names that say nothing of what they name.
EMPTY_WORDS = ("found", "given", "kept", "made", "told")

#: Modules and classes that still share a name; the lists only get shorter.
SAME_MODULES: set[str] = set()
SAME_CLASSES: set[str] = set()
EMPTY_NAMES: set[str] = set()


def stage(module: str) -> int:
    return STAGES.index(module.split(".")[1])


@pytest.mark.parametrize("module", [m for m in structure.files() if m != "toast"])
def test_no_stage_imports_a_later_one(module: str) -> None:
    for imported in structure.imports(module):
        if imported == "toast":  # ``from toast import __version__``
            continue
        assert stage(imported) <= stage(module), f"{module} imports {imported}"


def test_no_modules_import_each_other() -> None:
    assert structure.circles() == CIRCLES


def test_names_of_modules_are_unique() -> None:
    modules = collections.Counter(
        name.rpartition(".")[2] for name, path in structure.files().items()
        if path.name != "__init__.py"
    )  # fmt: skip
    assert {name for name, count in modules.items() if count > 1} == SAME_MODULES


def test_names_of_classes_are_unique() -> None:
    classes = collections.Counter(
        node.name for module in structure.files() for node in ast.walk(structure.tree(module))
        if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert {name for name, count in classes.items() if count > 1} == SAME_CLASSES


def test_names_say_what_they_name() -> None:
    """Of modules, classes and functions; not one letter, and no participle without its noun."""
    empty = set()
    for module in structure.files():
        empty |= {module} if is_empty(module.rpartition(".")[2]) else set()
        kinds = (ast.ClassDef, ast.FunctionDef)
        empty |= {
            f"{module}.{node.name}" for node in ast.walk(structure.tree(module))
            if isinstance(node, kinds) and is_empty(node.name)
        }  # fmt: skip
    assert empty == EMPTY_NAMES


def is_empty(name: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    return words in EMPTY_WORDS or len(words) == 1


#: Packages that may import MLIR's bindings and JAX's private modules.
MLIR_STAGES = ("frontend", "uneven", "apply", "lower")


def test_only_frontends_and_backends_import_mlir() -> None:
    """Other stages, but the one that pads modules, call functions of :mod:`toast.frontend.mlir`."""
    importers = {
        module
        for module in structure.files()
        for name in structure.outside_imports(module)
        if re.match(r"jaxlib\.mlir|jax\._src|jax\.interpreters\.mlir|mlir\b", name)
    }
    assert importers
    assert {module for module in importers if module.split(".")[1] not in MLIR_STAGES} == set()
