"""HTML fragments for notebooks: boxes with tables, in which all text is escaped.

Colours are inherited from the page, so light and dark themes both work.  Nothing is loaded.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence

_STYLE = """
.toast-box { max-width: 100%; overflow-x: auto; font-size: 90%; line-height: 1.4; }
.toast-box p { margin: .3em 0; }
.toast-box table { border-collapse: collapse; margin: .3em 0 .8em; }
.toast-box caption { text-align: left; font-weight: bold; padding: .2em 0; }
.toast-box th, .toast-box td { padding: .15em .6em; text-align: left; vertical-align: top;
  border: 1px solid rgba(127, 127, 127, .4); background: transparent; color: inherit; }
.toast-box th { background: rgba(127, 127, 127, .15); }
.toast-box .right { text-align: right; font-variant-numeric: tabular-nums; }
.toast-box summary { cursor: pointer; }
"""


def box(title: str, *parts: str) -> str:
    """A box: a title (text) above parts (HTML)."""
    heading = f"<p><strong>{html.escape(title)}</strong></p>"
    return f'<div class="toast-box"><style>{_STYLE}</style>{heading}{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    """A paragraph of text, as HTML."""
    return f"<p>{html.escape(text)}</p>"


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Collection[str] = (),
    most: int = 30,
) -> str:
    """A table of texts, as HTML; rows after the first ``most`` are folded.

    ``right`` has the columns that are aligned to the right.
    """
    listed = list(rows)
    styles = [' class="right"' if column in right else "" for column in columns]

    def cells(row: Sequence[str]) -> str:
        return "".join(
            f"<td{style}>{html.escape(cell)}</td>" for style, cell in zip(styles, row, strict=True)
        )

    def whole(caption: str, rows: list[Sequence[str]]) -> str:
        head = "".join(
            f'<th scope="col"{style}>{html.escape(column)}</th>'
            for style, column in zip(styles, columns, strict=True)
        )
        body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
        return (
            f"<table><caption>{html.escape(caption)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    text = whole(caption, listed[:most])
    if len(listed) > most:
        rest = whole(f"{caption}, the rest", listed[most:])
        text += f"<details><summary>{len(listed) - most} more</summary>{rest}</details>"
    return text
