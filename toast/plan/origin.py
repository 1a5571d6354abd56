"""The program and options from which the command line computed a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

#: Options of models that are options of the command line; ``--set`` sets others.
SIZES = ("layers", "sequence", "batch", "edges", "experts")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The TARGET and the options of a plan, so that later commands can find the program again."""

    #: The TARGET of the command line.
    target: str
    #: Options of a model, by name.
    sizes: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    #: Example arguments of a function: ``f32[8,4]``.
    shapes: tuple[str, ...] = ()
    #: Additional rule files.
    rules: tuple[str, ...] = ()
    #: A name, or the path of a hardware file.
    hardware: str = ""
    #: Positions of donated arguments.
    donate: tuple[int, ...] = ()
    #: The platform that it was lowered for; empty for the default.
    platform: str = ""
    #: The numbers of iterations of loops, by source location or number; ``*`` for all.
    trip_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: The memory policy, as a preset or text; empty for the program's own recomputation.
    remat: str = ""
    #: The number of microbatches; 0 for the program's own.
    microbatches: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """TARGET and its options, as words of a command line."""
        options = [
            (name, str(value)) if name in SIZES else ("set", f"{name}={value}")
            for name, value in self.sizes.items()
        ]
        options += [("arg", shape) for shape in self.shapes]
        options += [("donate", str(position)) for position in self.donate]
        options += [("platform", self.platform)] if self.platform else []
        options += [("trip-count", f"{place}={n}") for place, n in self.trip_counts.items()]
        options += [("remat", self.remat)] if self.remat else []
        options += [("microbatches", str(self.microbatches))] if self.microbatches else []
        options += [("rules", path) for path in self.rules]
        return (self.target, *(word for name, value in options for word in (f"--{name}", value)))
