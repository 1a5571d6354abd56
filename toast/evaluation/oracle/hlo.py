"""Scheduled XLA programs, parsed from their text."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

from toast.program import element_bytes

_KINDS = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "collective-permute": "collective_permute",
    "ragged-all-to-all": "all_to_all",
}  # fmt: skip
_ELEMENT_TYPES = {
    "pred": "i1", "s8": "i8", "s16": "i16", "s32": "i32", "s64": "i64", "u8": "ui8",
    "u16": "ui16", "u32": "ui32", "u64": "ui64",
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(ROOT )?%([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([a-z][\w\-]*)\((.*)$"
)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALL = re.compile(
    r"\b(?:body|to_apply|calls|called_computations|branch_computations|true_computation"
    r"|false_computation)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
#: The largest integer stands for a kernel whose cycles the compiler does not know.
_UNKNOWN_CYCLES = 2**62
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")

#: Fusions of an all-reduce with the slice of it that a device keeps.
_SCATTERED = re.compile(r"all-reduce-scatter")

#: Loops in which the partitioner overlaps a product with the transfer of its parts.
_WINDOWED = re.compile(r"windowed_dot_general_body_(rs|ag)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    #: HLO opcode, such as ``all-gather-start``.
    opcode: str
    #: The type of the result, as in the text.
    type: str
    operands: tuple[str, ...]
    line: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """The value after ``name=``: a computation or an integer."""
        match = re.search(rf"\b{name}=\{{?%?([\w.\-]+)", self.line)
        return match[1] if match else None

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs.

        For a conditional, these are all branches, because it is unknown which one runs; TOAST
        prices conditionals in the same way.
        """
        lists = (many or one for many, one in _CALL.findall(self.line))
        return tuple(name.strip(" %") for names in lists for name in names.split(","))

    @property
    def collective(self) -> str | None:
        """The kind of collective in StableHLO's spelling, also for an asynchronous start."""
        return _KINDS.get(self.opcode.removesuffix("-start"))

    @property
    def result_bytes(self) -> float:
        """Bytes of a collective's results."""
        arrays = [_bytes(*array) for array in _ARRAY.findall(self.type)]
        if self.opcode.endswith("-start"):  # (operands, results, ...)
            gather = self.opcode.startswith("all-gather")
            arrays = arrays[len(arrays) // 2 :] if gather else arrays[:1]
        return sum(arrays)

    @property
    def channel(self) -> str:
        """An identifier that copies of one collective share."""
        match = _CHANNEL.search(self.line)
        return match[1] if match else self.name

    @property
    def cycles(self) -> int:
        """The compiler's estimate of the cycles of the kernel; 0 if there is none."""
        match = _CYCLES.search(self.line)
        estimated = int(match[1]) if match else 0
        return estimated if estimated < _UNKNOWN_CYCLES else 0

    @property
    def ring(self) -> int:
        """The devices of the ring of a permutation."""
        pairs = dict(re.findall(r"\{(\d+),(\d+)\}", self.line.partition("source_target_pairs=")[2]))
        device, seen = next(iter(pairs), ""), set[str]()
        while device in pairs and device not in seen:
            seen.add(device)
            device = pairs[device]
        return max(1, len(seen))

    @property
    def group(self) -> tuple[int, ...]:
        """The devices that communicate with device 0, by their numbers in the program's mesh."""
        if match := _MESH_GROUPS.search(self.line):
            axes = [(n, int(s)) for n, s in re.findall(r"'([^']+)'=(\d+)", match[1])]
            chosen = set(re.findall(r"'([^']+)'", match[2]))
            members, stride = [0], 1
            for name, size in reversed(axes):
                if name in chosen:
                    members = [m + stride * i for i in range(size) for m in members]
                stride *= size
            return tuple(sorted(members))
        if match := _LISTED_GROUPS.search(self.line):
            return tuple(int(device) for device in match[1].split(","))
        if match := _IOTA_GROUPS.search(self.line):
            return _iota_group(match)
        return ()


def in_scatter(computation: str) -> bool:
    """Whether an all-reduce in ``computation`` and the following slice are a reduce-scatter."""
    return bool(_SCATTERED.search(computation))


def _iota_group(match: re.Match[str]) -> tuple[int, ...]:
    """The first group of ``[groups,size]<=[dimensions]T(permutation)``."""
    import numpy as np

    sizes = [int(size) for size in match[3].split(",")]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    if match[4]:
        devices = devices.transpose([int(d) for d in match[4].split(",")])
    return tuple(sorted(devices.reshape(int(match[1]), int(match[2]))[0].tolist()))


@dataclasses.dataclass(frozen=True)
class Module:
    """The computations of a program; instructions are in execution order."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    #: The number of devices.
    partitions: int = 1

    @staticmethod
    def parse(text: str) -> Module:
        """Parse HLO text."""
        instructions: dict[str, list[Instruction]] = {}
        entry = current = ""
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = header[2]
                entry = current if header[1] else entry
                instructions[current] = []
            elif current and (parts := _INSTRUCTION.match(line)):
                operands = tuple(_NAME.findall(parts[5].split("), ")[0]))
                instructions[current].append(
                    Instruction(parts[2], parts[4], parts[3], operands, line, bool(parts[1]))
                )
        devices = _PARTITIONS.search(text[: text.find("\n")])
        computations = {name: tuple(lines) for name, lines in instructions.items()}
        return Module(computations, entry, int(devices[1]) if devices else 1)

    def trips(self, loop: Instruction) -> int:
        """The number of iterations of ``loop``.

        It is the compiler's number or, if there is none, the constant in the condition over the
        increment of the counter.  It is 1 if neither is known.
        """
        if known := _TRIPS.search(loop.line):
            return int(known[1])
        condition = {
            i.name: i for i in self.computations.get(loop.attribute("condition") or "", ())
        }
        for compare in condition.values():
            if compare.opcode == "compare" and "direction=LT" in compare.line:
                counter, bound = (condition.get(name) for name in compare.operands)
                last = _constant(bound)
                if last is not None:
                    return max(1, -(-last // self._step(loop, counter)))
        return 1

    def _step(self, loop: Instruction, counter: Instruction | None) -> int:
        """The increment of the loop counter in one iteration."""
        index = counter.attribute("index") if counter else None
        body = {i.name: i for i in self.computations.get(loop.attribute("body") or "", ())}
        root = next((i for i in body.values() if i.root), None)
        if index is None or root is None or int(index) >= len(root.operands):
            return 1
        step, name = 0, root.operands[int(index)]
        # An unrolled loop increments the counter several times.
        while (definition := body.get(name)) and definition.opcode == "add":
            constants = [_constant(body.get(operand)) for operand in definition.operands]
            step += next((c for c in constants if c is not None), 0)
            name = next(
                (o for o, c in zip(definition.operands, constants, strict=True) if c is None), ""
            )
        return max(step, 1)

    @functools.cached_property
    def repeats(self) -> Mapping[str, int]:
        """How often each computation runs, from the trip counts of the enclosing loops."""
        callers: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
        for computation, lines in self.computations.items():
            for instruction in lines:
                times = self.trips(instruction) if instruction.opcode == "while" else 1
                for called in instruction.called:
                    callers[called].append((computation, times))
        times_run: dict[str, int] = {}

        def of(computation: str) -> int:
            if computation not in times_run:
                times_run[computation] = 1  # for the entry and for recursive calls
                above = callers.get(computation, [])
                times_run[computation] = max((of(c) * times for c, times in above), default=1)
            return times_run[computation]

        return {computation: of(computation) for computation in self.computations}

    def ends_window(self, computation: str, permute: Instruction) -> bool:
        """Whether a permutation moves the unchanged result of a windowed loop.

        Copies, bitcasts and slices of the loop's result count as untouched.
        """
        here = {i.name: i for i in self.computations[computation]}
        names = list(permute.operands[:1])
        for _ in range(6):
            definition = here.get(names[0]) if names else None
            if definition is None:
                return False
            if definition.opcode == "while":
                return bool(_WINDOWED.search(definition.attribute("body") or ""))
            if definition.opcode == "fusion" and len(definition.operands) > 3:
                return False
            names = list(definition.operands[:1])
        return False

    def walk(self) -> Iterator[tuple[str, Instruction]]:
        """All instructions with their computations."""
        for computation, lines in self.computations.items():
            for instruction in lines:
                yield computation, instruction


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    match = re.search(r" constant\((-?\d+)\)", instruction.line)
    return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True)
class Communication:
    """All collectives of one kind: their number, and the bytes of their results per device."""

    kind: str
    count: int
    bytes: float
    #: The bytes that a device sends, on a ring.
    sent_bytes: float = 0.0


def communication_in(text: str) -> tuple[Communication, ...]:
    """The collectives of an HLO module by kind; collectives in loops count once per iteration.

    A collective that the scheduler split into several instructions has one channel and counts once.
    A windowed product counts as one reduce-scatter or all-gather, including the last step after its
    loop.
    """
    module = Module.parse(text)
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(kind: str, times: int, size: float, devices: int) -> None:
        sent = sent_share(kind, devices) * size
        for place, number in enumerate((times, times * size, times * sent)):
            totals[kind][place] += number

    seen: set[tuple[str, str]] = set()
    windowed: dict[str, list[Instruction]] = collections.defaultdict(list)
    for computation, instruction in module.walk():
        kind = instruction.collective
        if kind is None or (kind, instruction.channel) in seen:
            continue
        if kind == "collective_permute" and module.ends_window(computation, instruction):
            continue
        seen.add((kind, instruction.channel))
        if _WINDOWED.search(computation):
            windowed[computation].append(instruction)
            continue
        size = instruction.result_bytes
        if kind == "all_reduce" and in_scatter(computation):
            kind = "reduce_scatter"
            size = next(i.result_bytes for i in module.computations[computation] if i.root)
        devices = len(instruction.group) or module.partitions
        add(kind, module.repeats.get(computation, 1), size, devices)
    for computation, steps in windowed.items():
        # The loop is one collective, as often as the loop runs.
        times = max(
            module.repeats[around]
            for around, i in module.walk()
            if i.opcode == "while" and i.attribute("body") == computation
        )
        kind = "reduce_scatter" if "body_rs" in computation else "all_gather"
        largest = max(steps, key=lambda i: i.result_bytes)
        add(kind, times, largest.result_bytes, largest.ring)
    return tuple(Communication(k, int(c), b, s) for k, (c, b, s) in sorted(totals.items()))


def sent_share(kind: str, devices: int) -> float:
    """The bytes that each of ``devices`` sends in a collective, over the bytes of its result."""
    rest = devices - 1
    return {
        "all_gather": rest / devices, "all_reduce": 2 * rest / devices,
        "reduce_scatter": float(rest), "all_to_all": rest / devices, "collective_permute": 1.0,
    }[kind]  # fmt: skip


def _bytes(dtype: str, shape: str) -> float:
    sizes = [int(size) for size in shape.split(",") if size]
    try:
        return float(math.prod(sizes) * element_bytes(_ELEMENT_TYPES.get(dtype, dtype)))
    except KeyError:
        return 0.0
