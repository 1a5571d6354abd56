"""Device meshes: named axes and their sizes."""

from __future__ import annotations

import dataclasses
import math
import re

from toast.errors import MeshError

#: More axes than any machine has dimensions for.
MAX_AXES = 8

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A logical mesh: axes in order, major to minor, each with its number of devices.

    >>> Mesh.parse("data=4,model=2").devices
    8
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        """A mesh from ``"data=4,model=2"``; raises :class:`toast.errors.MeshError`."""
        axes: list[tuple[str, int]] = []
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise MeshError(f"mesh '{text}': '{part}' is not axis=size; write data=4,model=4")
            if not _AXIS.fullmatch(name):
                raise MeshError(
                    f"mesh '{text}': '{name}' is no axis name; use letters, digits and underscores"
                )
            if not size.isdecimal() or int(size) < 1:
                raise MeshError(
                    f"mesh '{text}': axis {name} has size '{size}'; write a positive number"
                )
            if name in dict(axes):
                raise MeshError(f"mesh '{text}': axis {name} occurs twice; rename one")
            axes.append((name, int(size)))
        if len(axes) > MAX_AXES:
            raise MeshError(f"mesh '{text}': {len(axes)} axes, more than {MAX_AXES}; merge some")
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
