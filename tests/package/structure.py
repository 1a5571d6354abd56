"""What imports what, read from the syntax trees of ``toast/``.

Imports inside functions and under ``TYPE_CHECKING`` count as well.  ``from toast.plan import Plan``
is an import of the module that defines ``Plan``: a package that only hands names on is looked
through.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

from scipy.sparse import coo_array, csgraph

from toast.resources import directory

ROOT = directory("rules").parent
PACKAGE = ROOT / "toast"


@functools.cache
def files() -> dict[str, pathlib.Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text())


@functools.cache
def handed_on(module: str) -> dict[str, tuple[str, str]]:
    """The names that a package hands on, each with the module and the name that it is there."""
    if files()[module].name != "__init__.py":
        return {}
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("toast")
        for alias in node.names
    }  # type: ignore[misc]


def home(module: str, name: str) -> str:
    """The module that ``from module import name`` is an import of."""
    if f"{module}.{name}" in files() and name not in defined(module):
        return f"{module}.{name}"
    while name in handed_on(module) and handed_on(module)[name][0] != module:
        inner, name = handed_on(module)[name]
        if f"{inner}.{name}" in files():
            return f"{inner}.{name}"
        module = inner
    return module


@functools.cache
def defined(module: str) -> frozenset[str]:
    """Classes and functions that stand in a module."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return frozenset(node.name for node in tree(module).body if isinstance(node, kinds))


def imports(module: str) -> Iterator[str]:
    """The modules of the package that a module imports, wherever the import stands."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files())
        elif isinstance(node, ast.ImportFrom) and (node.module or "") in files():
            assert node.level == 0, f"{module}: write the whole name of what you import"
            yield from (home(str(node.module), alias.name) for alias in node.names)


def outside_imports(module: str) -> Iterator[str]:
    """The dotted names that a module imports from outside the package, wherever the import stands."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name not in files())
        elif isinstance(node, ast.ImportFrom) and (node.module or "") not in files():
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles() -> list[tuple[str, ...]]:
    """Modules that import each other."""
    names = [name for name in files() if defined(name) or files()[name].name != "__init__.py"]
    number = {name: i for i, name in enumerate(names)}
    arrows = {(number[a], number[b]) for a in names for b in imports(a) if b in number and a != b}
    rows, columns = zip(*arrows, strict=True)
    graph = coo_array(([1] * len(rows), (rows, columns)), shape=(len(names),) * 2)
    count, label = csgraph.connected_components(graph, connection="strong")
    groups = [tuple(n for n, at in zip(names, label, strict=True) if at == c) for c in range(count)]
    return sorted(group for group in groups if len(group) > 1)
