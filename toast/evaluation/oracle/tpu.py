"""Results of XLA's TPU compiler for a program with shardings: memory, collectives, schedule.

``libtpu`` compiles ahead of time for a topology without its devices.  Most of its time is code
generation, after buffer assignment, so by default the compiler is ended as soon as the buffer
assignment is on disk.
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
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from toast.boundary import children
from toast.boundary.regular_files import read_text
from toast.disk_cache import DAMAGE
from toast.errors import HardwareError, PlanError
from toast.evaluation.oracle.hlo import Communication, communication_in
from toast.evaluation.oracle.schedule import CLOCK_HZ, Schedule, schedule
from toast.files import write_all
from toast.frontend import mlir
from toast.frontend.mlir import ModuleSource
from toast.hardware import Hardware
from toast.hardware.links import slice_of
from toast.program import Program, Shardings


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compiler's results for one program, per device."""

    #: Bytes per device: arguments, results, results in donated arguments, temporaries.
    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temporary_bytes: float
    #: The maximum of live bytes that the compiler's report states.  It leaves out values: by the
    #: live ranges in the same report, more are alive.
    live_bytes: float
    #: Whether XLA rejects the program because it does not fit.
    out_of_memory: bool
    collectives: tuple[Communication, ...]
    #: The time of the compilation, in seconds.
    seconds: float
    #: The schedule of a step; only for full compilations.
    schedule: Schedule | None = None

    @property
    def peak_bytes(self) -> float:
        """The peak memory: arguments, results that overwrite none of them, and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


#: For each device: name and dimensions of the topology, options, and the accelerator type.
_TOPOLOGIES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "tpu-v4": ("v4", 3, {"chip_config_name": "megacore"}, "v4-{cores}"),
    "tpu-v5e": ("v5e", 2, {}, "v5litepod-{chips}"),
    "tpu-v5p": ("v5p", 3, {}, "v5p-{cores}"),
    "tpu-v6e": ("v6e", 2, {}, "v6e-{chips}"),
}


def check(hardware: Hardware) -> None:
    """Raise the errors of :func:`judge` if there is no compiler for ``hardware``."""
    if hardware.name not in _TOPOLOGIES:
        known = ", ".join(_TOPOLOGIES)
        raise HardwareError(f"no TPU compiler for {hardware.name}; use {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise PlanError(
            "the TPU compiler is not installed: pip install 'toast-partitioner[tpu]', or libtpu"
        )


def judge(
    program: Program,
    shardings: Shardings,
    hardware: Hardware,
    *,
    local: Any = None,
    full: bool = False,
    timeout: float = 600.0,
    cache: pathlib.Path | None = None,
    keep: pathlib.Path | None = None,
) -> Verdict:
    """Compile ``program`` with ``shardings`` for a slice of ``hardware`` with the size of the mesh.

    ``local`` is the MLIR module of the device-local program (:func:`toast.lower.lower`); without
    it, XLA partitions the program.  With ``full``, the compiler runs to the end, which gives the
    time of the schedule.  ``timeout`` is in seconds.  Verdicts are cached in the folder ``cache``
    (default: ``~/.cache/toast``), by program, shardings, target and versions.  ``keep`` is a file
    for the text of the scheduled program; it needs ``full``, and no cached verdict is used.  No
    file is written if the program does not fit.  Raises :class:`toast.errors.PlanError` if the
    program is a fact base, ``libtpu`` is not installed, the compiler fails or the file cannot be
    written, :class:`toast.errors.HardwareError` for hardware without a compiler, and ``ValueError``
    for ``keep`` without ``full``.
    """
    if keep is not None and not full:
        raise ValueError("keep: only a full compilation schedules the program; add full=True")
    if not isinstance(program.source, ModuleSource):
        raise PlanError(f"{program.name} is a fact base and has no program to compile")
    check(hardware)
    name, dimensions, options, accelerator = _TOPOLOGIES[hardware.name]
    devices = shardings.mesh.devices
    topology = f"{name}:{'x'.join(map(str, slice_of(devices, dimensions)))}"
    job = {
        "module": mlir.bytecode(program.source.module),
        "local": None if local is None else mlir.bytecode(local),
        "name": program.name,
        "shardings": shardings,
        "topology": topology,
        "topology_options": options,
    }
    # The time of a schedule depends on the links in the hardware file.
    timed = hardware.interconnect.bandwidth_bytes_per_s if full else 0.0
    texts = [
        mlir.text_without_locations(module) for module in (program.source.module, local) if module
    ]
    place = _cached("\n".join(texts), job, timed, cache)
    with contextlib.suppress(*DAMAGE):  # missing or damaged
        cached = _read(read_text(place, PlanError, most=2**24))
        if keep is None and (cached.schedule or cached.out_of_memory or not full):
            return cached
    verdict = _compile(
        job,
        accelerator.format(chips=devices, cores=2 * devices),
        hardware if full else None,
        timeout,
        keep,
    )
    with contextlib.suppress(OSError, PlanError):  # without the cache, the next call compiles again
        place.parent.mkdir(parents=True, exist_ok=True)
        write_all({place: json.dumps(dataclasses.asdict(verdict))}, PlanError)
    return verdict


#: The worker's file with the text of the scheduled program.
_SCHEDULED = "scheduled.txt"

#: Version of cached verdicts; verdicts of other versions are not used.
_FORMAT = 13


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
    job: dict[str, Any],
    accelerator: str,
    full: Hardware | None,
    timeout: float,
    keep: pathlib.Path | None,
) -> Verdict:
    """Run the worker; ``full`` is the hardware for the time of the schedule, or None."""
    try:
        with tempfile.TemporaryDirectory(prefix="toast-oracle-") as name:
            folder = pathlib.Path(name)
            verdict = _verdict(folder, full, *_run(job, name, accelerator, full, timeout))
            text = (folder / _SCHEDULED).read_text() if keep and verdict.schedule else None
    except OSError as error:
        raise PlanError(
            f"the TPU compiler cannot be run: {error.strerror or error}; check the free space of "
            + tempfile.gettempdir()
        ) from error
    except (ArithmeticError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise PlanError(
            f"the TPU compiler's output cannot be read: {type(error).__name__}: {error}"
        ) from error
    if keep is not None and text is not None:
        write_all({keep: text}, PlanError)
    return verdict


def _run(
    job: dict[str, Any], name: str, accelerator: str, full: Hardware | None, timeout: float
) -> tuple[float, int | None]:
    """Run the worker in the folder ``name``; returns its seconds, and its status if it ended."""
    folder = pathlib.Path(name)
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    environment = {
        **children.environment(),
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
            [sys.executable, "-P", "-m", "toast.evaluation.oracle.compile_job", name],
            env=environment, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            _wait(worker, folder, full is not None, begin + timeout)
            status = worker.poll()
        finally:
            worker.kill()
            worker.wait()
    return time.perf_counter() - begin, status


def _wait(worker: subprocess.Popen[bytes], folder: pathlib.Path, full: bool, until: float) -> None:
    """Wait until the compiler returns, or until the required files are complete."""
    while worker.poll() is None:
        if time.perf_counter() > until:
            raise PlanError("the TPU compiler timed out; raise the time limit or use fewer layers")
        if not full and _Dumps.read(folder, settled=True):
            return
        time.sleep(0.1)


_NEEDED = re.compile(
    r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT]?)(?: of|\) exceeds)", re.IGNORECASE
)
_LIVE = re.compile(r"breakdown for peak usage: ([\d ]+) bytes")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOTAL = re.compile(r"\(color=0\)\nTotal bytes: (\d+) ")
_ALLOCATION = re.compile(
    r"allocation \d+: size (\d+)(?:, color (\d+))?, page \d+(, parameter \d+|, thread-local)?"
)


@dataclasses.dataclass(frozen=True)
class _Dumps:
    """The files that the compiler writes after buffer assignment, in several threads."""

    #: The scheduled program.
    program: str
    live_bytes: float
    #: Bytes of all buffers in device memory, of arguments, and of overwritten arguments.
    total_bytes: float
    argument_bytes: float
    alias_bytes: float

    @staticmethod
    def read(
        folder: pathlib.Path, *, settled: bool = False, finished: bool = False
    ) -> _Dumps | None:
        """The dumps in ``folder``; None while one is missing or incomplete.

        The dumps of a compiler that has ``finished`` are complete.  ``settled`` ignores files that
        have just been written.
        """
        programs = sorted((folder / "dump").glob("*_after_buffer_assignment.txt"))
        if not programs:
            return None
        stem = str(programs[0]).removesuffix("_after_buffer_assignment.txt")
        parts = ("-live-range.txt", "-memory-usage-report.txt", "-buffer-assignment.txt")
        files = [programs[0], *(pathlib.Path(stem + part) for part in parts)]
        try:
            if settled and time.time() - max(file.stat().st_mtime for file in files) < 0.5:
                return None
            program, ranges, report, assignment = (file.read_text() for file in files)
        except (OSError, UnicodeDecodeError):  # truncated inside a character
            return None
        live, total = _LIVE.search(ranges), _TOTAL.search(report)
        if total is None or "\nENTRY " not in program or not program.rstrip().endswith("\n}"):
            return None
        every = arguments = aliased = inside = 0.0
        for line in assignment.splitlines():
            buffer = _ALLOCATION.match(line)
            if buffer is None or int(buffer[2] or 0):
                continue
            every += float(buffer[1])
            if buffer[3] == ", thread-local":
                # The arguments and results of a computation that another core runs, such as a
                # gather on a SparseCore: the caller's buffers, once more.
                inside += float(buffer[1])
            elif buffer[3]:
                arguments += float(buffer[1])
                aliased += float(buffer[1]) * ("maybe-live-out" in line)
        # The report has the total size of the buffers.
        whole = live and assignment.endswith("\n") and every == float(total[1])
        if not whole and not finished:
            return None
        return _Dumps(
            program, float(live[1].replace(" ", "")) if live else 0.0, float(total[1]) - inside,
            arguments, aliased,
        )  # fmt: skip


def _verdict(
    folder: pathlib.Path, full: Hardware | None, seconds: float, status: int | None
) -> Verdict:
    """The verdict from the files of the worker in ``folder``."""
    result: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # the worker died before or while writing
        result = json.loads((folder / "result.json").read_text())
    error = str(result.get("error", ""))
    needed = _NEEDED.search(error)
    if error and not needed:
        raise PlanError(f"the TPU compiler failed: {' '.join(error.split())[:300]}")
    if needed:
        total = float(needed[1]) * _UNITS[needed[2].upper()]
        return Verdict(0.0, 0.0, 0.0, total, total, True, (), seconds)
    dumps = _Dumps.read(folder, finished=bool(result))
    if dumps is None and result:
        raise PlanError(
            "the TPU compiler's memory report is missing or incomplete; check the free space of "
            + tempfile.gettempdir()
        )
    if dumps is None or (full and not result):
        raise PlanError(f"the TPU compiler died: {_last_words(folder, status)}")
    collectives = communication_in(dumps.program)
    if full is None:
        return Verdict(
            dumps.argument_bytes, dumps.alias_bytes, dumps.alias_bytes,
            dumps.total_bytes - dumps.argument_bytes, dumps.live_bytes, False, collectives, seconds,
        )  # fmt: skip
    return Verdict(
        float(result["argument_bytes"]), float(result["output_bytes"]),
        float(result["alias_bytes"]), float(result["temporary_bytes"]),
        dumps.live_bytes, False, collectives, seconds,
        schedule(
            (folder / _SCHEDULED).read_text(),
            clock_hz=CLOCK_HZ[full.name],
            link_bytes_per_s=full.interconnect.bandwidth_bytes_per_s,
            coordinates=result["coordinates"],
        ),
    )  # fmt: skip


def _last_words(folder: pathlib.Path, status: int | None) -> str:
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-status).name}; it may have lacked memory"
    log = (folder / "log").read_text(errors="replace").split("\n")
    messages = [line.strip() for line in log if line.strip()]
    return messages[-1][:300] if messages else "no message"
