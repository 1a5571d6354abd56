"""``toast plan --fit``, and what a plan that does not fit needs."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toast.cli.common import Source, progress
from toast.errors import MeshError, PlanError, TargetError

if TYPE_CHECKING:
    from toast.analysis import Analysis, Lowering
    from toast.fitting import Fit, PlanRequest, Remedy, RequestPlanner
    from toast.hardware import Hardware
    from toast.plan import Plan
    from toast.program import MemoryPolicy
    from toast.search import Settings


def check_single(**options: Any) -> None:
    """Refuses options that are for one plan; raises :class:`toast.errors.PlanError`."""
    for name, value in options.items():
        if value is not None:
            given = f"--{name}" if value is True else f"--{name} {value}"
            raise PlanError(
                f"{given}: is for one plan, and --fit makes several; remove it, and plan a row of "
                "the table"
            )


def option_words(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Options as words of a command line, without those that are not set."""

    def words() -> Iterator[str]:
        for option, value in options.items():
            if value is None or value is False or value == "":
                continue
            for one in value if isinstance(value, list) else [value]:
                yield option
                if one is not True:
                    short = f"{one:g}" if isinstance(one, float) else str(one)
                    yield str(one) if isinstance(one, float) and float(short) != one else short

    return tuple(words())


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Plans of TARGET with other sizes, policies and meshes, for the command line."""

    source: Source
    machine: Hardware
    partitioner: Lowering
    settings: Settings
    #: Options of :func:`toast.plan` that are the same for all plans.
    options: Mapping[str, Any]
    #: Words of the command line that are the same for all plans.
    words: tuple[str, ...]

    def answer(
        self, find: str, mesh: str | None, devices: int | None, memory_bytes: float | None
    ) -> Fit:
        """The answer to ``--fit``; raises :class:`toast.errors.ToastError`."""
        from toast.fitting import find_fit
        from toast.fitting.requests import limited

        if find == "devices" and (mesh is not None or devices is not None):
            given = f"--mesh {mesh}" if mesh is not None else f"--devices {devices}"
            raise MeshError(f"{given}: --fit devices looks for the number of devices; remove it")
        sizes = self._sizes()
        if find != "devices" and not self.source.is_traced:
            raise TargetError(
                f"--fit {find}: {self.source.target} has one size, with which it was lowered; use "
                "a model or module:function, or --fit devices"
            )
        hint = ""
        if self.source.shapes and find not in sizes:
            hint = f", or name it in a shape, such as --arg f32[{find},4] --batch 8"
        known = ", ".join([*sizes, "devices"])
        if find != "devices" and find not in sizes:
            raise TargetError(
                f"--fit {find}: {self.source.target} has no such size; use one of {known}{hint}"
            )
        with progress() as show:
            found = find_fit(
                self._planner(limited(self.machine, memory_bytes), self.settings, show),
                find=find, sizes=sizes, mesh=mesh, devices=devices, remat=self.source.remat,
                microbatches=self.source.microbatches,
                one_token=self._one_token,
            )  # fmt: skip
        rows = tuple(
            dataclasses.replace(row, command=self._command(row.request)) for row in found.rows
        )
        return dataclasses.replace(found, rows=rows)

    def remedies(self, plan: Plan, mesh: str | None, devices: int | None) -> tuple[Remedy, ...]:
        """What a plan that does not fit needs; empty if it fits, or after an interrupt."""
        from toast.fitting import PlanRequest, remedies_for

        if plan.fits:
            return ()
        request = PlanRequest(tuple(self._sizes().items()), self.source.microbatches, plan.mesh)
        once = dataclasses.replace(self.settings, rounds=1, restarts=1, processes=1)
        try:
            with progress() as show:
                planner = self._planner(self.machine, once, show)
                if self.source.remat != "auto" and not plan.padding:
                    planner.adopt(request, self.source.remat, plan.analysis)
                return remedies_for(
                    plan, planner, request, remat=self.source.remat, command=self._command,
                    one_token=self._one_token,
                )  # fmt: skip
        except KeyboardInterrupt:
            return ()

    @property
    def _one_token(self) -> bool:
        """Whether a step handles one token of each sequence."""
        return self.source.sizes.get("step") == "decode"

    def _sizes(self) -> dict[str, int]:
        from toast import targets

        return targets.sizes_of(self.source.target, self.source.sizes, self.source.shapes)

    def _planner(
        self, machine: Hardware, settings: Settings, show: Callable[[Any], None]
    ) -> RequestPlanner:
        from toast.fitting import RequestPlanner

        return RequestPlanner(self._analysis, machine, settings, show, **self.options)

    def _analysis(
        self, sizes: Mapping[str, int], policy: str | MemoryPolicy | None,
        microbatches: int | None, progress: Callable[[Any], None],
    ) -> Analysis:  # fmt: skip
        chosen = dataclasses.replace(self._with(sizes), remat=policy, microbatches=microbatches)
        return chosen.on(self.machine).analysis(progress, partitioner=self.partitioner)

    def _with(self, sizes: Mapping[str, int]) -> Source:
        """The source with other sizes; those that are its own stay away, so that caches match."""
        own = self._sizes()
        changed = {name: size for name, size in sizes.items() if own.get(name) != size}
        return dataclasses.replace(self.source, sizes={**self.source.sizes, **changed})

    def _command(self, request: PlanRequest) -> str:
        source = dataclasses.replace(self._with(dict(request.sizes)), remat=None, microbatches=None)
        words = source.origin("").words
        return shlex.join(["toast", "plan", *words, *request.words, *self.words])
