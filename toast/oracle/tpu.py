"""What XLA's TPU compiler says of a program with its shardings: memory, collectives, verdict.

``libtpu`` compiles ahead of time for a topology that need not be there.  Nearly all its time goes
into code generation, after the memory is decided, so by default the compiler is ended as soon as
its buffer assignment is on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from toast.apply.shardings import Shardings
from toast.errors import HardwareError, PlanError
from toast.files import write_all
from toast.frontend import Program, mlir
from toast.frontend.mlir import Source
from toast.hardware import Hardware
from toast.hardware.layout import slice_of
from toast.oracle.hlo import Communication, communication_in
from toast.oracle.schedule import CLOCK_HZ, Schedule, schedule


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What XLA says of one program on one device."""

    #: Bytes per device: arguments, results, what results share with donated arguments, the rest.
    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    #: The most that is alive at once; its heap leaves gaps, so that the peak may be more.
    live_bytes: float
    #: Whether XLA refused the program because it does not fit.
    out_of_memory: bool
    collectives: tuple[Communication, ...]
    #: Seconds that XLA took.
    seconds: float
    #: How long a step takes, as scheduled; only of compiles in full.
    schedule: Schedule | None = None

    @property
    def peak_bytes(self) -> float:
        """All that must be there at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


#: Of a device: the topology's name, its dimensions, options, and the accelerator type.
_TOPOLOGIES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "tpu-v4": ("v4", 3, {"chip_config_name": "megacore"}, "v4-{cores}"),
    "tpu-v5e": ("v5e", 2, {}, "v5litepod-{chips}"),
    "tpu-v5p": ("v5p", 3, {}, "v5p-{cores}"),
    "tpu-v6e": ("v6e", 2, {}, "v6e-{chips}"),
}


def check(hardware: Hardware) -> None:
    """Raise what :func:`judge` raises where it has no compiler for ``hardware``."""
    if hardware.name not in _TOPOLOGIES:
        known = ", ".join(_TOPOLOGIES)
        raise HardwareError(f"no TPU compiler for {hardware.name}; there is one for {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "the TPU compiler is not installed: pip install 'toast-partitioner[tpu]', or libtpu"
        )


def judge(
    program: Program,
    shardings: Shardings,
    hardware: Hardware,
    *,
    full: bool = False,
    timeout: float = 600.0,
    cache: pathlib.Path | None = None,
) -> Verdict:
    """Compile ``program`` for a slice of ``hardware`` as large as the mesh.

    ``full`` lets the compiler finish, for the time that its schedule takes.  Verdicts are kept in
    ``cache`` (default: ``~/.cache/toast``), by program, shardings, target and versions.  Raises
    :class:`toast.errors.PlanError` when ``libtpu`` is not installed or the compiler fails, and
    :class:`toast.errors.HardwareError` for hardware that it has no compiler for.
    """
    if not isinstance(program.source, Source):
        raise PlanError(f"{program.name} is a fact base: there is nothing to compile")
    check(hardware)
    name, dimensions, options, accelerator = _TOPOLOGIES[hardware.name]
    devices = shardings.mesh.devices
    topology = f"{name}:{'x'.join(map(str, slice_of(devices, dimensions)))}"
    job = {
        "module": mlir.bytecode(program.source.module),
        "name": program.name,
        "shardings": shardings,
        "topology": topology,
        "topology_options": options,
    }
    # The time of a schedule depends on the links that the hardware file tells of.
    timed = hardware.interconnect.bandwidth_bytes_per_s if full else 0.0
    place = _cached(mlir.text_without_locations(program.source.module), job, timed, cache)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or damaged
        return _read(place.read_text())
    verdict = _compile(
        job,
        accelerator.format(chips=devices, cores=2 * devices),
        hardware if full else None,
        timeout,
    )
    with contextlib.suppress(OSError, PlanError):  # what cannot be kept is made again
        place.parent.mkdir(parents=True, exist_ok=True)
        write_all({place: json.dumps(dataclasses.asdict(verdict))}, PlanError)
    return verdict


#: Of verdicts and of what is compiled; another one makes the kept ones void.
_FORMAT = 6


def _cached(
    text: str, job: dict[str, Any], timed: float, cache: pathlib.Path | None
) -> pathlib.Path:
    versions = [importlib.metadata.version(p) for p in ("jax", "jaxlib", "libtpu")]
    shardings: Shardings = job["shardings"]
    parts = [
        text, str(shardings.mesh), sorted(shardings.values.items()),
        sorted(shardings.uses.items()), sorted(shardings.sums.items()), shardings.results,
        job["topology"], versions, timed, _FORMAT,
    ]  # fmt: skip
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(part).encode())
    folder = cache or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return folder / "toast" / "oracle" / f"{digest.hexdigest()}.json"


def _read(text: str) -> Verdict:
    data = json.loads(text)
    data["collectives"] = tuple(Communication(**entry) for entry in data["collectives"])
    data["schedule"] = data["schedule"] and Schedule(**data["schedule"])
    return Verdict(**data)


def _compile(
    job: dict[str, Any], accelerator: str, full: Hardware | None, timeout: float
) -> Verdict:
    """Run the worker; ``full`` is the hardware to time the schedule for, if wanted."""
    with tempfile.TemporaryDirectory(prefix="toast-oracle-") as name:
        folder = pathlib.Path(name)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": accelerator,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text",
        }
        begin = time.perf_counter()
        with (folder / "log").open("w") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "toast.oracle.worker", name],
                env=environment, stdout=log, stderr=log,
            )  # fmt: skip
            try:
                _wait(worker, folder, full is not None, begin + timeout)
            finally:
                worker.kill()
                worker.wait()
        return _verdict(folder, full, time.perf_counter() - begin)


_ASSIGNED = "*after_optimizations_after_buffer_assignment.txt"


def _wait(worker: subprocess.Popen[bytes], folder: pathlib.Path, full: bool, until: float) -> None:
    """Until the compiler has returned, or what is wanted lies there in full."""
    while worker.poll() is None:
        if time.perf_counter() > until:
            raise PlanError("the TPU compiler takes too long; raise the limit or take fewer layers")
        files = [] if full else list((folder / "dump").glob(_ASSIGNED))
        if files and time.time() - files[0].stat().st_mtime > 0.5:
            return
        time.sleep(0.1)


_NEEDED = re.compile(
    r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", re.IGNORECASE
)
_LIVE = re.compile(r"breakdown for peak usage: ([\d ]+) bytes")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_PARAMETER = re.compile(r"^allocation \d+: size (\d+)(, color (\d+))?, page \d+, parameter (\d+)")


def _verdict(folder: pathlib.Path, full: Hardware | None, seconds: float) -> Verdict:
    result: dict[str, Any] = {}
    if (folder / "result.json").exists():
        result = json.loads((folder / "result.json").read_text())
    error = str(result.get("error", ""))
    needed = _NEEDED.search(error)
    if error and not needed:
        raise PlanError(f"the TPU compiler fails: {' '.join(error.split())[:300]}")
    if needed:
        total = float(needed[1]) * _UNITS[needed[2].upper()]
        return Verdict(0.0, 0.0, 0.0, total, total, True, (), seconds)
    texts = list((folder / "dump").glob(_ASSIGNED))
    if not texts:
        log = (folder / "log").read_text().strip().splitlines()
        raise PlanError(f"the TPU compiler died: {log[-1][:300] if log else 'no message'}")
    collectives = communication_in(texts[0].read_text())
    ranges = next((folder / "dump").glob("*after_optimizations-live-range.txt"))
    found = _LIVE.search(ranges.read_text())
    live = float(found[1].replace(" ", "")) if found else 0.0
    if full and result:
        return Verdict(
            float(result["argument_bytes"]), float(result["output_bytes"]),
            float(result["alias_bytes"]), float(result["temporary_bytes"]),
            live, False, collectives, seconds,
            schedule(
                (folder / "scheduled.txt").read_text(),
                clock_hz=CLOCK_HZ[full.name],
                link_bytes_per_s=full.interconnect.bandwidth_bytes_per_s,
                coordinates=result["coordinates"],
            ),
        )  # fmt: skip
    assignment = next((folder / "dump").glob("*after_optimizations-buffer-assignment.txt"))
    report = next((folder / "dump").glob("*memory-usage-report.txt"))
    total = float(re.search(r"\(color=0\)\nTotal bytes: (\d+)", report.read_text())[1])  # type: ignore[index]
    arguments = aliased = 0.0
    for line in assignment.read_text().splitlines():
        parameter = _PARAMETER.match(line)
        if parameter and int(parameter[3] or 0) == 0:
            arguments += float(parameter[1])
            aliased += float(parameter[1]) * ("maybe-live-out" in line)
    return Verdict(
        arguments, aliased, aliased, total - arguments, live, False, collectives, seconds
    )
