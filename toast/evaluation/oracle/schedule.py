"""The time of a program that XLA's TPU compiler has scheduled, by the compiler's own figures.

The compiler estimates the cycles of every kernel, but not those of collectives; for these, its
latency-hiding scheduler uses the rates below.  Kernels run one after another.  A collective that
starts early overlaps with them, after the collectives that started before it, until an op needs its
result.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from toast.evaluation.oracle.hlo import Instruction, Module, in_scatter
from toast.hardware.description import SCHEDULED_ALL_TO_ALL

#: Cycles per second of the compiler's devices: peak FLOP/s over FLOP per cycle.
CLOCK_HZ: Mapping[str, float] = {
    "tpu-v4": 1.05e9, "tpu-v5e": 1.5e9, "tpu-v5p": 1.75e9, "tpu-v6e": 1.75e9,
}  # fmt: skip

#: Links per torus dimension and direction in the scheduler's model.
_LINKS = 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The times of a scheduled step, in seconds."""

    seconds: float
    #: The time of kernels.
    compute_seconds: float
    #: The time of collectives, including overlapped ones.
    collective_seconds: float


@dataclasses.dataclass
class _Clock:
    """The state of one device: the times at which its core and its links are free."""

    now: float = 0.0
    #: The links to the lower and to the higher neighbour.
    links: tuple[float, float] = (0.0, 0.0)
    compute: float = 0.0
    collective: float = 0.0

    @property
    def end(self) -> float:
        """The time at which all kernels and collectives have ended."""
        return max(self.now, *self.links)

    def repeat(self, since: _Clock, times: int) -> None:
        """Repeat the work since ``since`` another ``times`` times.

        The core and the links go on at their own rates: a collective that started before may keep a
        link busy for many iterations that do not wait for it.
        """
        lower, higher = (
            link + times * (link - before)
            for link, before in zip(self.links, since.links, strict=True)
        )
        self.now += times * (self.now - since.now)
        self.links = lower, higher
        self.compute += times * (self.compute - since.compute)
        self.collective += times * (self.collective - since.collective)


def schedule(
    text: str, *, clock_hz: float, link_bytes_per_s: float, coordinates: Sequence[Sequence[int]]
) -> Schedule:
    """The times of the scheduled program ``text`` (HLO).

    ``clock_hz`` is the clock rate of the device, ``link_bytes_per_s`` the rate of one link in one
    direction, and ``coordinates`` the place of each device of the program in the torus.
    """
    timer = _Timer(Module.parse(text), clock_hz, link_bytes_per_s, coordinates)
    clock = _Clock()
    timer.run(timer.module.entry, clock)
    return Schedule(clock.end, clock.compute, clock.collective)


class _Timer:
    def __init__(
        self,
        module: Module,
        clock_hz: float,
        link: float,
        coordinates: Sequence[Sequence[int]],
    ) -> None:
        self.module = module
        self._hz, self._link, self._coordinates = clock_hz, link, coordinates

    def run(self, computation: str, clock: _Clock) -> None:
        """Advance ``clock`` by one run of a computation."""
        ready: dict[str, float] = {}  # by channel: the end of a started collective
        for instruction in self.module.computations.get(computation, ()):
            self._step(computation, instruction, clock, ready)

    def _step(
        self, computation: str, instruction: Instruction, clock: _Clock, ready: dict[str, float]
    ) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            body, left = instruction.attribute("body") or "", self.module.trips(instruction)
            before = clock
            # The first iteration may run beside collectives that started before it.
            for _ in range(min(left, 2)):
                before = dataclasses.replace(clock)
                self.run(body, clock)
                left -= 1
            clock.repeat(before, left)
            return
        if opcode in ("call", "conditional"):
            for called in instruction.called:
                self.run(called, clock)
            return
        collective, role = self._collective(instruction)
        if collective is not None and role != "done":
            # A permutation uses only the links to one side.
            backward = _backward(collective)
            sides = (0, 1) if backward is None else (int(backward),)
            # A reduce-scatter is the first half of an all-reduce.
            spent = self._seconds(collective) * (0.5 if role == "scatter" else 1.0)
            end = spent + max(clock.now, *(clock.links[side] for side in sides))
            clock.collective += spent
            clock.links = tuple(end if s in sides else clock.links[s] for s in (0, 1))  # type: ignore[assignment]
            if role == "start":
                ready[collective.channel] = ready[instruction.name] = end
            else:
                clock.now = end
        elif role == "done":
            keys = [collective.channel] if collective else list(instruction.operands)
            clock.now = max([clock.now, *(ready.get(key, 0.0) for key in keys)])
        spent = instruction.cycles / self._hz
        clock.now += spent
        clock.compute += spent

    def _collective(self, instruction: Instruction) -> tuple[Instruction | None, str]:
        """The collective that an instruction runs, starts or ends, directly or in a fusion."""
        opcode = instruction.opcode
        if opcode.endswith("-done") and opcode.removesuffix("-done") + "-start" in _STARTS:
            return None, "done"
        if instruction.collective is not None:
            return instruction, "start" if opcode.endswith("-start") else "whole"
        if opcode == "fusion":
            inside = self.module.computations.get(instruction.attribute("calls") or "", ())
            collective = next((i for i in inside if i.collective is not None), None)
            text = " ".join(i.line for i in inside if i.opcode == "custom-call")
            if collective is not None and '"AsyncCollectiveStart"' in text:
                return collective, "start"
            if collective is not None and '"AsyncCollectiveDone"' in text:
                return collective, "done"
            if collective is not None and in_scatter(instruction.attribute("calls") or ""):
                return collective, "scatter"
            if collective is not None and "AsyncCollective" not in text and not instruction.cycles:
                return collective, "whole"
        return None, ""

    def _seconds(self, collective: Instruction) -> float:
        size = collective.result_bytes
        if collective.collective == "collective_permute":
            return size / self._link
        group = collective.group or tuple(range(len(self._coordinates)))
        if len(group) < 2:
            return 0.0
        places = [self._coordinates[device] for device in group if device < len(self._coordinates)]
        spanned = max(1, sum(len(set(along)) > 1 for along in zip(*places, strict=True)))
        if collective.collective == "all_to_all":
            return size / (self._link * SCHEDULED_ALL_TO_ALL[spanned > 1])
        times = {"all_reduce": 2.0, "reduce_scatter": float(len(group))}
        moved = size * times.get(collective.collective or "", 1.0)
        return moved / (self._link * _LINKS * spanned)


_STARTS = frozenset({"all-gather-start", "all-reduce-start", "collective-permute-start"})


def _backward(collective: Instruction) -> bool | None:
    """Whether a permutation sends to lower devices; None for other collectives."""
    match = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\},\{(\d+),(\d+)\}", collective.line)
    return None if match is None else int(match[4]) < int(match[3])
