"""Text of strangers, made safe to print: terminals obey control characters."""

from __future__ import annotations

import re

#: What terminals take for commands: controls, and marks that turn the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

#: The same, tabs and ends of lines too.
_CONTROL_OR_BREAK = re.compile(f"{_CONTROL.pattern}|[\t\n\u2028\u2029]")

#: What UTF-8 cannot say: bytes of file names that are no text.
_SURROGATE = re.compile("[\ud800-\udfff]")


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable(text: str, *, breaks: bool = True) -> str:
    """``text`` with control characters written out, as ``repr`` does.

    Tabs and ends of lines are left alone where ``breaks`` may stay.
    """
    pattern = _CONTROL if breaks else _CONTROL_OR_BREAK
    return _SURROGATE.sub(_written, pattern.sub(_written, text))


def shortened(text: str, most: int = 200) -> str:
    """``text`` on one line that can be printed, its middle left out where it is longer."""
    text = printable(text, breaks=False)
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
