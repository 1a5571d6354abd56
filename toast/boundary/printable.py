"""Makes untrusted text safe to print: terminals execute control characters."""

from __future__ import annotations

import re

#: Control characters, and marks that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

#: The same with tabs and line ends.
_CONTROL_OR_BREAK = re.compile(f"{_CONTROL.pattern}|[\t\n\u2028\u2029]")

#: Characters that UTF-8 cannot encode: bytes of file names that are not text.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _escaped(character: re.Match[str]) -> str:
    code = ord(character[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable(text: str, *, breaks: bool = True) -> str:
    """``text`` with control characters escaped as in ``repr``.

    With ``breaks``, tabs and line ends stay.
    """
    pattern = _CONTROL if breaks else _CONTROL_OR_BREAK
    return _SURROGATE.sub(_escaped, pattern.sub(_escaped, text))


def shortened(text: str, most: int = 200) -> str:
    """``text`` on one printable line; if it is longer than ``most``, without its middle."""
    text = printable(text, breaks=False)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
