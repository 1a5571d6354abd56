"""How long a program takes that XLA's TPU compiler has scheduled, by the compiler's own figures.

The compiler notes the cycles that it expects of every kernel.  It says nothing of the same kind of
collectives; its latency-hiding scheduler reckons with the rates below.  Kernels run one after
another; a collective that was started early runs beside them, after those started before it; what
waits for it waits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from toast.evaluation.oracle.hlo import Instruction, Module, in_scatter

#: Cycles per second of the devices that the compiler knows: peak FLOP/s over those of one cycle.
CLOCK_HZ: Mapping[str, float] = {
    "tpu-v4": 1.05e9, "tpu-v5e": 1.5e9, "tpu-v5p": 1.75e9, "tpu-v6e": 1.75e9,
}  # fmt: skip

#: Links per torus dimension and direction that the scheduler counts on.
_LINKS = 2

#: Rate of an all-to-all over that of one link: over one torus dimension, and over more.
_ALL_TO_ALL = (31 / 46.6, 25 / 46.6)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Seconds of a step, as scheduled."""

    seconds: float
    #: In kernels.
    compute_seconds: float
    #: In collectives, whether or not something runs beside them.
    collective_seconds: float


@dataclasses.dataclass
class _Clock:
    """One device: when its core and its links are free."""

    now: float = 0.0
    #: Of the links to either side.
    links: tuple[float, float] = (0.0, 0.0)
    compute: float = 0.0
    collective: float = 0.0

    @property
    def end(self) -> float:
        """When all that was started has ended."""
        return max(self.now, *self.links)

    def repeat(self, since: _Clock, times: int) -> None:
        """Go on ``times`` times as since then."""
        spent = times * (self.end - since.end)
        self.now += spent
        self.links = (self.links[0] + spent, self.links[1] + spent)
        self.compute += times * (self.compute - since.compute)
        self.collective += times * (self.collective - since.collective)


def schedule(
    text: str, *, clock_hz: float, link_bytes_per_s: float, coordinates: Sequence[Sequence[int]]
) -> Schedule:
    """Time the scheduled program ``text``.

    ``link_bytes_per_s`` is the rate of one link in one direction, and ``coordinates`` says where in
    the torus the program's devices are.
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
        """Let ``clock`` go on by one run of a computation."""
        ready: dict[str, float] = {}  # by channel: when a started collective has its result
        for instruction in self.module.computations.get(computation, ()):
            self._step(computation, instruction, clock, ready)

    def _step(
        self, computation: str, instruction: Instruction, clock: _Clock, ready: dict[str, float]
    ) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            before = dataclasses.replace(clock)
            self.run(instruction.attribute("body") or "", clock)
            clock.repeat(before, self.module.trips(instruction) - 1)
            return
        if opcode in ("call", "conditional"):
            for called in instruction.called:
                self.run(called, clock)
            return
        collective, role = self._collective(instruction)
        if collective is not None and role != "done":
            # A permutation uses the links to one side only.
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
        """The collective an instruction is, starts or ends, itself or in a fusion of its own."""
        opcode = instruction.opcode
        if opcode.endswith("-done") and opcode.removesuffix("-done") + "-start" in _STARTS:
            return None, "done"
        if instruction.collective is not None:
            return instruction, "start" if opcode.endswith("-start") else "whole"
        if opcode == "fusion":
            inside = self.module.computations.get(instruction.attribute("calls") or "", ())
            found = next((i for i in inside if i.collective is not None), None)
            text = " ".join(i.line for i in inside if i.opcode == "custom-call")
            if found is not None and '"AsyncCollectiveStart"' in text:
                return found, "start"
            if found is not None and '"AsyncCollectiveDone"' in text:
                return found, "done"
            if found is not None and in_scatter(instruction.attribute("calls") or ""):
                return found, "scatter"
            if found is not None and "AsyncCollective" not in text and not instruction.cycles:
                return found, "whole"
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
            return size / (self._link * _ALL_TO_ALL[spanned > 1])
        times = {"all_reduce": 2.0, "reduce_scatter": float(len(group))}
        moved = size * times.get(collective.collective or "", 1.0)
        return moved / (self._link * _LINKS * spanned)


_STARTS = frozenset({"all-gather-start", "all-reduce-start", "collective-permute-start"})


def _backward(collective: Instruction) -> bool | None:
    """Whether a permutation goes to lower devices; ``None`` for other collectives."""
    found = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\},\{(\d+),(\d+)\}", collective.line)
    return None if found is None else int(found[4]) < int(found[3])
