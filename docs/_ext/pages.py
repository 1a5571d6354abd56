"""What this documentation adds to Sphinx: live blocks, and pages made from other files.

* A fenced block ``{live}`` is Python that runs, at the root of the repository, when the site is
  built.  The site shows the code, what it prints, and the value of a last expression: a table or
  drawing where it has ``_repr_html_``.  Blocks of a page share their variables.  With
  ``:output-only:`` the code is not shown.
* ``_generated/`` gets the command line's reference, and files from elsewhere in the repository.
* A block with ``title="file"`` shows the file's name.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DOCS = pathlib.Path(__file__).parents[1]
ROOT = DOCS.parent
#: Pages made of files that others read too: page, file.
PAGES = {
    "rules": "rules/README.md",
    "facts": "facts/README.md",
    "hardware": "hardware/README.md",
    "validation": "validation/README.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}
#: A link to a file: its text, the file, and the place in it.
_LINK = re.compile(r"\[([^\[\]]+)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_TITLED = re.compile(r'^```(\w+) title="([^"]+)"$', re.MULTILINE)
#: A line of a table of contents that stands for several pages.
_PATTERN = re.compile(r"^([\w/-]+\*)\n", re.MULTILINE)


class Live(SphinxDirective):
    """A block of Python that runs when the site is built."""

    has_content = True
    option_spec = {"output-only": directives.flag}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """The code, and what it prints and shows."""
        self.env.note_reread()  # what it shows depends on more than the page
        code = "\n".join(self.content)
        variables = self.env.current_document.setdefault("live", {"__name__": "live"})
        try:
            printed, value = execute(code, variables)
        except Exception as error:
            raise self.error(f"{type(error).__name__}: {error}, in\n{code}") from error
        shown: list[nodes.Node] = []
        if "output-only" not in self.options:
            shown.append(nodes.literal_block(code, code, language="python"))
        if printed:
            shown.append(nodes.literal_block(printed, printed, language="text", classes=["live"]))
        if value is not None:
            shown.append(_shown(value))
        return shown


def execute(code: str, variables: dict[str, Any]) -> tuple[str, object]:
    """Run ``code``; what it prints, and the value of its last line if that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(tree, "live", "exec"), variables)
        value = (
            eval(compile(ast.Expression(last.value), "live", "eval"), variables) if last else None
        )
    return output.getvalue(), value


def _shown(value: object) -> nodes.Node:
    if hasattr(value, "_repr_html_"):
        html = f'<div class="live">{value._repr_html_()}</div>'
        return nodes.raw(html, html, format="html")
    text = repr(value)
    return nodes.literal_block(text, text, language="text", classes=["live"])


def write_pages(app: Sphinx) -> None:
    """Write ``_generated/``: pages made from files elsewhere, and the commands' reference."""
    folder = DOCS / "_generated"
    folder.mkdir(exist_ok=True)
    texts = {
        page: _linked((ROOT / file).read_text(), (ROOT / file).parent, folder / page)
        for page, file in PAGES.items()
    }
    texts["commands"] = _commands()
    for page, text in texts.items():
        path = folder / f"{page}.md"
        if not path.exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)


def _linked(text: str, folder: pathlib.Path, page: pathlib.Path) -> str:
    """``text``, whose links are as from ``folder``, for the site's ``page``.

    Links to files that are pages lead to these; of a link to a folder the text stays.
    """
    pages = {ROOT / file: DOCS / "_generated" / f"{name}.md" for name, file in PAGES.items()}

    def linked(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_dir():
            return link[1]
        if not target.exists():
            return link[0]
        place = os.path.relpath(pages.get(target, target), page.parent)
        return f"[{link[1]}]({place}{link[3] or ''})"

    return _LINK.sub(linked, text)


def _commands() -> str:
    """The command line's reference, by Typer."""
    made = subprocess.run(
        [sys.executable, "-m", "typer", "toast.cli", "utils", "docs", "--name", "toast",
         "--title", "Commands"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return made.stdout


def read(app: Sphinx, page: str, text: list[str]) -> None:
    """Make a page what Sphinx expects, where it is also to be read without Sphinx.

    Links are those of the site; titled blocks show their titles; patterns of a table of contents
    that match no page are left out.
    """
    path = DOCS / f"{page}.md"
    found = _linked(text[0], path.parent, path)
    found = _TITLED.sub(r"```{code-block} \1\n:caption: \2\n", found)
    text[0] = _PATTERN.sub(lambda line: line[0] if any(DOCS.glob(f"{line[1]}.md")) else "", found)


def skip(
    app: Sphinx, what: str, name: str, member: Any, skipped: bool, options: Any
) -> bool | None:
    """Leave out the constructors of dataclasses, whose fields are listed."""
    code = getattr(member, "__code__", None)
    return True if name == "__init__" and code and code.co_filename == "<string>" else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("live", Live)
    app.add_lexer("mlir", TextLexer)
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": False}
