"""What the figures of a hardware file stand on: the sources that its comments cite."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping

from toast.boundary.regular_files import read_text
from toast.errors import HardwareError
from toast.hardware.device_files import LARGEST_BYTES, file_of

#: A figure without a public source, and one that :mod:`toast.hardware.calibrate` has fitted.
ASSUMED, MEASURED = "assumed", "measured"

_SOURCE = re.compile(r"^#\s+\[([\w-]+)\] (\S.*)\n#\s+(https?://\S+)$", re.MULTILINE)
_TABLE = re.compile(r"^\[(\w+)\]")
_KIND = re.compile(r"^kind\s*=\s*[\"'](\w+)")
_FIGURE = re.compile(r"^(\w+)\s*=\s*[-\d.\[]")
_CITED = re.compile(r"\[([\w-]+)\]")


@dataclasses.dataclass(frozen=True)
class CitedSource:
    """A source in the header of a hardware file."""

    tag: str
    title: str
    address: str


@dataclasses.dataclass(frozen=True)
class FigureSources:
    """The sources of a hardware file, and those that each of its figures cites."""

    sources: tuple[CitedSource, ...] = ()
    #: Tags by table (empty for the top level) and key; :data:`ASSUMED` for an assumption, and
    #: :data:`MEASURED` for a fit without a tag.  Those of all collectives of a kind are in the
    #: table ``collective.KIND``.
    cited: Mapping[tuple[str, str], tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def of(self, *keys: tuple[str, str]) -> str:
        """What the figures ``keys`` (table and key) stand on, as text; empty if none says it."""
        tags = (tag for key in keys for tag in self.cited.get(key, ()))
        return ", ".join(dict.fromkeys(tags))


def figure_sources(name_or_path: str | pathlib.Path) -> FigureSources:
    """What the figures of a device, or of a user's ``.toml`` file, stand on.

    A file lists its sources at the top: ``#   [tag] title``, and on the next line ``#     https://...``.
    The comment on a figure's line, or those right above it, cite them as ``[tag]``, or say
    ``Assumed`` or ``Measured``.  Raises :class:`toast.errors.HardwareError` as
    :func:`toast.hardware.load` does for a name or a file that cannot be read.
    """
    text = read_text(file_of(name_or_path), HardwareError, most=LARGEST_BYTES, encoding="utf-8-sig")
    listed = tuple(CitedSource(*groups) for groups in _SOURCE.findall(text))
    known = {source.tag for source in listed}
    cited: dict[tuple[str, str], tuple[str, ...]] = {}
    table = above = ""
    for line in text.splitlines():
        if line.startswith("#"):
            above += line
            continue
        if heading := _TABLE.match(line):
            table = heading[1]
        elif line.startswith("[["):
            table = line.partition("#")[0].strip("[] ")
        elif table.startswith("collective") and (kind := _KIND.match(line)):
            table = f"collective.{kind[1]}"
        elif figure := _FIGURE.match(line):
            comment = above + line.partition("#")[2]
            tags = [tag for tag in _CITED.findall(comment) if tag in known]
            if "assumed" in comment.lower():
                tags.append(ASSUMED)
            if not tags and comment.lstrip(" #").lower().startswith(MEASURED):
                tags.append(MEASURED)
            place = (table, figure[1])
            if tags and table.startswith("collective."):
                cited[place] = tuple(dict.fromkeys([*cited.get(place, ()), *tags]))
                place = ("collective", figure[1])
            if tags:
                cited.setdefault(place, tuple(dict.fromkeys(tags)))
        above = ""
    return FigureSources(listed, cited)


__all__ = ["ASSUMED", "MEASURED", "CitedSource", "FigureSources", "figure_sources"]
