"""Device meshes: named axes and their sizes."""

from __future__ import annotations

import dataclasses
import math
import re

from toast.errors import MeshError

#: More axes than any machine has dimensions for.
MAX_AXES = 8

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZE = re.compile(r"0*[1-9][0-9]{0,8}")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh: axes in order, major to minor, each with its number of devices.

    Raises :class:`toast.errors.MeshError` for no or too many axes, a name that is not one or occurs
    twice, and a size that is not positive.

    >>> Mesh.parse("data=4,model=2").devices
    8
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise MeshError("mesh '': no axes; write axis=size, for example data=4,model=4")
        for number, (name, size) in enumerate(self.axes):
            if not _NAME.fullmatch(name):
                raise MeshError(
                    f"mesh '{self}': '{name}' is no axis name; use letters, digits and underscores"
                )
            if size < 1:
                raise MeshError(
                    f"mesh '{self}': axis {name} has size '{size}'; write a positive number"
                )
            if name in self.names[:number]:
                raise MeshError(f"mesh '{self}': axis {name} occurs twice; rename one")
        if len(self.axes) > MAX_AXES:
            raise MeshError(
                f"mesh '{self}': {len(self.axes)} axes, more than {MAX_AXES}; merge some"
            )

    @staticmethod
    def parse(text: str) -> Mesh:
        """A mesh from ``"data=4,model=2"``; blanks around names and sizes are ignored.

        Raises :class:`toast.errors.MeshError` with one line: what is wrong and what to write.
        """
        axes: list[tuple[str, int]] = []
        for part in text.split(",") if text.strip() else ():
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise MeshError(f"mesh '{text}': '{part}' is not axis=size; write data=4,model=4")
            if not _SIZE.fullmatch(size):
                raise MeshError(
                    f"mesh '{text}': axis {name} has size '{size}'; write a positive number"
                )
            axes.append((name, int(size)))
        return Mesh(tuple(axes))

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> int:
        """Devices of the whole mesh."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)
