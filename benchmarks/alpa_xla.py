"""TOAST and XLA's auto-sharding pass (Alpa) for 8 TPU v5e; writes docs/alpa-xla.md.

    python benchmarks/alpa_xla.py --small                   # two minutes
    python benchmarks/alpa_xla.py --small --layers 2        # the whole page
    python benchmarks/alpa_xla.py --small --layers 2 4 --limit 1800     # also 4 layers

The script installs the last libtpu with the pass in a virtual environment,
~/.cache/toast/alpa-venv; no TPU is needed.  XLA's results are cached in ~/.cache/toast/alpa-xla, so
an interrupted run continues where it stopped.  If the environment of this script has a libtpu,
TOAST's plans are compiled with that libtpu as well.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import pickle
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault(
    "JAX_PLATFORMS", "cpu"
)  # otherwise JAX looks for a TPU if libtpu is installed

import toast
from toast import api
from toast.apply.device_meshes import device_grid
from toast.cli.elapsed import steps
from toast.errors import PlanError
from toast.evaluation.oracle import Verdict, communication_in, judge
from toast.evaluation.oracle.schedule import CLOCK_HZ, schedule
from toast.files import write_all
from toast.frontend import mlir, stablehlo
from toast.hardware import Mesh, load
from toast.models import Model
from toast.models.transformer import T2B, TransformerConfig, model
from toast.program import Program, Spec
from toast.units import size_text, time_text

#: The last versions with the pass: newer ones reject it or do not have it.
PINS = ("jax==0.10.0", "jaxlib==0.10.0", "libtpu==0.0.40")
HARDWARE = "tpu-v5e"
TOPOLOGY = "v5e:2x4"
MESHES = ("x=2,y=4", "x=8")
BUDGET_OPTION = "xla_tpu_auto_spmd_partitioning_memory_budget_gb"
SMALL = dataclasses.replace(
    T2B, layers=1, d_model=512, hidden=2048, key_size=64, vocabulary=8192, sequence=256
)
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "toast"
PAGE = ROOT / "docs" / "alpa-xla.md"

#: Version of the cached results; results of other versions are not used.
FORMAT = 1

# -- the virtual environment ---------------------------------------------------------------------


def environment() -> pathlib.Path:
    """The Python executable with the pass; installs its environment if necessary."""
    folder = CACHE / "alpa-venv"
    python = folder / "bin" / "python"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*PINS, *project["dependencies"]]
    done = folder / "installed"
    if done.exists() and done.read_text() == "\n".join(wanted):
        return python
    print(f"installing {', '.join(PINS)} into {folder}", file=sys.stderr, flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        errors = [line for line in installed.stderr.splitlines() if "ERROR" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else installed.stderr.strip()[-200:]
        sys.exit(f"cannot install {' '.join(PINS)} into {folder}: {reason}")
    done.write_text("\n".join(wanted))
    return python


# -- what runs in it -----------------------------------------------------------------------------


def search_by_xla(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile a program whose shardings XLA's pass chooses."""
    import jax
    from jax._src.named_sharding import AUTO
    from jax.experimental import topologies

    jax.config.update("jax_use_shardy_partitioner", False)  # the pass belongs to GSPMD
    mesh = Mesh.parse(job["mesh"])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    grid = jax.sharding.Mesh(device_grid(mesh, topology.devices), mesh.names)
    step_model = model(job["config"], "t2b")
    jitted = jax.jit(
        step_model.function,
        in_shardings=AUTO(grid),
        out_shardings=AUTO(grid),
        donate_argnums=step_model.donate,
    )
    lowered = jitted.trace(*step_model.arguments).lower(lowering_platforms=("tpu",))
    begin = time.perf_counter()
    options = {} if job["budget"] is None else {BUDGET_OPTION: job["budget"]}
    compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    verdict = Verdict(
        memory.argument_size_in_bytes, memory.output_size_in_bytes,
        memory.alias_size_in_bytes, memory.temp_size_in_bytes,
        0.0, False, communication_in(text), seconds,
        schedule(
            text,
            clock_hz=CLOCK_HZ[HARDWARE],
            link_bytes_per_s=load(HARDWARE).interconnect.bandwidth_bytes_per_s,
            coordinates=[device.coords for device in grid.devices.flat],
        ),
    )  # fmt: skip
    shapes = jax.tree.leaves(step_model.arguments)
    chosen = jax.tree.leaves(compiled.input_shardings[0])
    return {
        "verdict": dataclasses.asdict(verdict),
        "specs": [spec(s.spec, len(a.shape)) for s, a in zip(chosen, shapes, strict=True)],
    }


def spec(partition: Any, rank: int) -> Spec:
    """A PartitionSpec in TOAST's form, with an entry for every dimension."""
    parts = [() if p is None else (p,) if isinstance(p, str) else tuple(p) for p in partition]
    return (*parts, *((),) * (rank - len(parts)))


def compile_plan(job: Mapping[str, Any]) -> dict[str, Any]:
    """Compile the program with the shardings that TOAST found."""
    module = mlir.parse(job["module"], "job")
    program = stablehlo.from_module(module, name=job["name"])
    verdict = judge(
        program, job["shardings"], load(HARDWARE), full=True, timeout=job["limit"]
    )  # fmt: skip
    return {"verdict": dataclasses.asdict(verdict)}


def work(folder: pathlib.Path) -> None:
    """Run the job in ``folder`` and write the result there."""
    job = pickle.loads((folder / "job.pickle").read_bytes())
    try:
        result = compile_plan(job) if "shardings" in job else search_by_xla(job)
    except Exception as error:
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    result["load"] = os.getloadavg()[0]
    (folder / "result.json").write_text(json.dumps(result))


# -- calling it ----------------------------------------------------------------------------------


class Watch:
    """Measures XLA's pass: XLA dumps the program before and after it.

    The parent process watches, because the compiler blocks the other threads of its own process.
    """

    def __init__(self, process: int, folder: pathlib.Path) -> None:
        #: Wall and CPU seconds when a dump was first seen.
        self.seen: dict[str, tuple[float, float]] = {}
        self.late = False
        self._process, self._folder = process, folder

    def until(self, end: float, worker: subprocess.Popen[bytes]) -> None:
        """Watch until the worker ends or is ``late``: still running at ``end``."""
        while worker.poll() is None and not self.late:
            for when in ("before", "after"):
                if when not in self.seen and list(self._folder.glob(f"*.{when}_auto_spmd_*.txt")):
                    self.seen[when] = time.perf_counter(), self._cpu_seconds()
            self.late = time.perf_counter() > end
            time.sleep(0.1)

    def _cpu_seconds(self) -> float:
        fields = pathlib.Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def seconds(self) -> dict[str, Any]:
        """Wall and CPU seconds of the pass, if it ran."""
        if len(self.seen) < 2:
            return {}
        begin, end = self.seen["before"], self.seen["after"]
        return {"search_seconds": end[0] - begin[0], "search_cpu_seconds": end[1] - begin[1]}


def run(python: pathlib.Path, job: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """The result of a job in the other environment, or an ``error``."""
    with tempfile.TemporaryDirectory(prefix="toast-alpa-") as name:
        folder = pathlib.Path(name)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        dump = "" if "shardings" in job else f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text"
        # JAX in this process has put its own libtpu into the environment.
        own = ("TPU_", "LIBTPU_", "XLA_", "JAX_")
        variables = {
            **{name: value for name, value in os.environ.items() if not name.startswith(own)},
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "XLA_FLAGS": dump,
        }
        command = [str(python), __file__, "--worker", name]
        with (folder / "log").open("w") as log:
            worker = subprocess.Popen(
                command, env=variables, stdout=log, stderr=log, start_new_session=True
            )
            watch = Watch(worker.pid, folder / "dump")
            try:
                watch.until(time.perf_counter() + limit, worker)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
        if watch.late:
            stage = "compilation" if "after" in watch.seen else "search"
            return {"error": f"{stage} takes more than {limit:.0f} s"}
        if not (folder / "result.json").exists():
            lines = (folder / "log").read_text().strip().splitlines()
            return {"error": f"the compiler died: {lines[-1][:200] if lines else 'no message'}"}
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        if "shardings" not in job and "error" not in result and len(watch.seen) < 2:
            return {"error": "the pass did not run"}
        return watch.seconds() | result


def cached_result(
    python: pathlib.Path, job: Mapping[str, Any], text: str, limit: float
) -> dict[str, Any]:
    """The cached result of XLA's search for the program ``text``; errors are not cached."""
    key = repr((PINS, FORMAT, HARDWARE, TOPOLOGY, sorted(job.items()), text))
    place = CACHE / "alpa-xla" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if place.exists():
        result: dict[str, Any] = json.loads(place.read_text())
        return result
    result = run(python, job, limit)
    if "error" not in result:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_all({place: json.dumps(result)}, PlanError)
    return result


# -- comparing -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One sharding of a program, and the compiler's results."""

    method: str
    result: Mapping[str, Any]
    #: The estimated step time of TOAST's plan by the same compiler, in seconds.
    reference: float = float("nan")

    @property
    def verdict(self) -> Mapping[str, Any]:
        """The fields of a :class:`toast.evaluation.oracle.Verdict`; empty after an error."""
        fields: Mapping[str, Any] = self.result.get("verdict", {})
        return fields

    @property
    def step_seconds(self) -> float:
        """The estimated step time; NaN if there is none."""
        return float((self.verdict.get("schedule") or {}).get("seconds", float("nan")))

    def text(self) -> str:
        """The cells of a Markdown table."""
        search = "-"
        if "search_seconds" in self.result:
            search = (
                f"{self.result['search_seconds']:.1f} ({self.result['search_cpu_seconds']:.1f})"
            )
        if "error" in self.result or self.verdict["out_of_memory"]:
            why = self.result.get("error", "out of memory")
            return f"| {self.method} | {search} | {why} | | | | | |"
        v = self.verdict
        peak = v["argument_bytes"] + v["output_bytes"] - v["alias_bytes"] + v["temporary_bytes"]
        talk = v["collectives"]
        kinds = ", ".join(f"{c['count']} {c['kind'].replace('_', '-')}" for c in talk) or "none"
        sent = sum(c["sent_bytes"] for c in talk)
        step, ratio = "not available", "-"
        if v["schedule"]:
            step = f"{time_text(v['schedule']['seconds'])} "
            step += f"({time_text(v['schedule']['collective_seconds'])})"
            ratio = f"{self.step_seconds / self.reference:.2f}"
        return (
            f"| {self.method} | {search} | {v['seconds']:.0f} | {size_text(peak)} "
            f"({size_text(v['argument_bytes'])}) | {kinds} | {size_text(sent)} | {step} | {ratio} |"
        )


HEAD = (
    "| | search, s (CPU) | compilation, s | peak memory (arguments) | collectives | "
    "bytes sent | step estimate (collectives) | step over TOAST's |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def compare(
    program: Program,
    config: TransformerConfig,
    mesh: str,
    *,
    python: pathlib.Path,
    budgets: Sequence[int | None],
    limit: float,
) -> str:
    """A section of the page."""
    module = program.source.module
    text = mlir.text_without_locations(module)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = toast.plan(program, mesh=mesh, hardware=HARDWARE, cache=False)
    search = {
        "search_seconds": time.perf_counter() - wall,
        "search_cpu_seconds": time.process_time() - cpu,
    }
    job = {"module": text, "name": program.name, "shardings": plan.shardings, "limit": limit}
    ours = Row(f"TOAST, {PINS[2].replace('==', ' ')}", run(python, job, limit + 60) | search)
    rows = [ours]
    if importlib.util.find_spec("libtpu") is not None:
        method = f"TOAST, libtpu {importlib.metadata.version('libtpu')}"
        try:
            verdict = judge(program, plan.shardings, load(HARDWARE), full=True, timeout=limit)
            rows.append(Row(method, {"verdict": dataclasses.asdict(verdict)}))
        except PlanError as error:
            rows.append(Row(method, {"error": str(error)}))
    theirs: dict[str, Sequence[Spec]] = {}
    for budget in budgets:
        method = f"XLA's pass, {'default budget' if budget is None else f'budget {budget} GB'}"
        wanted = {"config": config, "mesh": mesh, "budget": budget}
        result = cached_result(python, wanted, text, limit)
        rows.append(Row(method, result))
        if "specs" in result:
            theirs[method] = result["specs"]
    lines = [dataclasses.replace(row, reference=ours.step_seconds).text() for row in rows]
    loads = [row.result["load"] for row in rows if "load" in row.result]
    span = f"{min(loads):.0f} to {max(loads):.0f}" if loads else "unknown"
    note = f"Load of the machine (runnable processes): {span}."
    arguments = arguments_table(
        program, [plan.shardings.of(program, v) for v in program.argument_values], theirs
    )
    rows_text = f"{HEAD}\n" + "\n".join(lines)
    print(rows_text, flush=True)
    return f"## {program.name}, mesh {mesh}\n\n{rows_text}\n\n{note}\n\n{arguments}"


def arguments_table(
    program: Program, ours: Sequence[Spec], theirs: Mapping[str, Sequence[Spec]]
) -> str:
    """A table of the shardings of parameters and data, without moments; layers share a row."""
    columns = {"TOAST": ours, **theirs}
    texts: dict[str, dict[str, dict[str, None]]] = collections.defaultdict(
        lambda: collections.defaultdict(dict)
    )
    for index, path in enumerate(program.arguments):
        if path.startswith("moments"):
            continue
        pattern = re.sub(r"\[\d+\]", "[*]", path)
        for method, specs in columns.items():
            texts[pattern][method][spec_text(specs[index])] = None
    lines = [
        f"| `{pattern}` | " + " | ".join(" or ".join(cells[method]) for method in columns) + " |"
        for pattern, cells in texts.items()
    ]
    head = f"| argument | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}"
    return f"{head}\n" + "\n".join(lines)


def spec_text(spec: Spec) -> str:
    return "`" + (", ".join("".join(axes) or "-" for axes in spec) or "scalar") + "`"


def write(sections: Sequence[str]) -> None:
    """Write the finished sections to the page."""
    text = (
        f"Written by `benchmarks/alpa_xla.py` for {TOPOLOGY} ({HARDWARE}), with "
        f"{', '.join(PINS).replace('==', ' ')} on {os.cpu_count()} cores and "
        f"Python {platform.python_version()}.\n\n" + "\n\n".join(sections) + "\n"
    )
    head, rest = PAGE.read_text().split("<!-- figures -->\n")
    PAGE.write_text(
        head + "<!-- figures -->\n" + text + "<!-- end -->" + rest.split("<!-- end -->")[1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a transformer with one narrow layer")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        help="numbers of layers of Gemma 2B, one section each (default: 2)",
    )
    parser.add_argument(
        "--mesh", nargs="+", help=f"meshes (default: {' '.join(MESHES)}; with --small: x=8)"
    )
    parser.add_argument("--budget", type=int, nargs="+", help="additional memory budgets in GB")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="time limit of each compilation in seconds"
    )
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    configs = {"small": SMALL} if options.small else {}
    layers = options.layers or ([] if options.small else [2])
    configs |= {
        f"t2b, {n} layer{'s' * (n > 1)}": dataclasses.replace(T2B, layers=n) for n in layers
    }
    python = environment()
    sections: list[str] = []
    cases = [
        (name, config, mesh)
        for name, config in configs.items()
        for mesh in options.mesh or (MESHES[1:] if config is SMALL else MESHES)
    ]
    for name, config, mesh in steps(cases, lambda case: f"{case[0]}, {case[2]}"):
        step_model: Model = dataclasses.replace(model(config, "t2b"), name=name)
        sections.append(
            compare(
                api.program_of(step_model),
                config,
                mesh,
                python=python,
                budgets=[None, *(options.budget or [])],
                limit=options.limit,
            )
        )
        write(sections)


if __name__ == "__main__":
    main()
