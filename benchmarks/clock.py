"""Steps of programs on one GPU by the clock, beside TOAST's predictions.

    python benchmarks/clock.py --predict [--hardware h100]
    python benchmarks/clock.py --run [--hardware h100] [--jobs 6] [--minutes 8]
    python benchmarks/clock.py [--page]

--predict needs no GPU.  It writes a row for every program that fits to benchmarks/clock.csv: models
of the zoo in sizes of one device, whose attention is cuDNN's, and programs of the grammar of
strangers.py.  These first predictions stay in the table; --price writes present ones beside them.
--run compiles and times on the GPU here what is not measured yet; several processes trace
the programs, and one at a time compiles and times its own.  Without options, the script prints the
table of errors, and the programs that are not held out; --page writes the table to
docs/fidelity.md.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fcntl
import math
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

# Processes share the GPU, and give back what they took.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import grammar
import jax
import numpy as np

import toast
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.errors import ToastError
from toast.evaluation.oracle import judge_here
from toast.hardware import Mesh, load
from toast.models import Model, attention, build
from toast.plan.prediction import Prediction
from toast.plan.shard import shardings_of
from toast.ports import HardwarePlatform
from toast.space import Space

TABLE = pathlib.Path(__file__).resolve().parent / "clock.csv"
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
#: Around the table in docs/fidelity.md.
BEGIN, END = "<!-- clock: begin -->", "<!-- clock: end -->"
GIB = 2.0**30
MESH = Mesh.parse("gpu=1")
#: Programs whose predicted peak is above this share of the memory are left out: their first run
#: needs room for a second copy of what is donated.
ROOM = 0.62
#: Steps that are shorter measure how programs are started.
SHORTEST_S = 1e-3

#: Models of the zoo, and the options that make them fit one device.
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama3.1-8b", {"layers": 2, "batch": 2}),
    ("llama3.1-8b", {"layers": 4, "batch": 4, "sequence": 4096, "remat": "full"}),
    ("llama3.1-8b", {"layers": 4, "batch": 4, "sequence": 2048, "remat": "none"}),
    ("qwen3-8b", {"layers": 4, "batch": 4, "sequence": 2048}),
    ("mistral-7b", {"layers": 4, "batch": 2, "sequence": 4096}),
    ("gemma3-4b", {"layers": 6, "batch": 4, "sequence": 2048}),
    ("mixtral-8x7b", {"layers": 1, "batch": 4, "sequence": 2048}),
    ("qwen3-30b-a3b", {"layers": 2, "batch": 4, "sequence": 2048}),
    ("t2b", {"layers": 2, "batch": 4}),
    ("t7b-scan", {"layers": 2, "batch": 2}),
    ("llama3-8b", {"layers": 2, "batch": 2}),
    ("gns", {"layers": 6, "edges": 65536}),
    ("unet", {"batch": 4}),
    ("itx", {"layers": 8, "batch": 8}),
    ("itx-decode", {"layers": 8, "batch": 64}),
    ("moe", {"layers": 2, "experts": 16, "batch": 8}),
    ("vit-l", {"batch": 64}),
    ("vit-h", {"batch": 32}),
    ("dit-xl", {"batch": 32}),
    ("resnet50", {"batch": 256}),
    ("mamba2-1.3b", {"layers": 12, "batch": 4}),
    ("whisper-large", {"layers": 8, "batch": 8}),
)
#: Programs of the grammar; those with odd seeds are held out.
SEEDS = range(60)


@dataclasses.dataclass(frozen=True)
class Row:
    """A program on one device: what was predicted, and what was measured."""

    program: str
    hardware: str
    #: Before anything was measured.
    first_ms: float
    #: Of the present prices.
    step_ms: float
    products_ms: float
    memory_ms: float
    peak_gib: float
    measured_ms: float = math.nan
    xla_peak_gib: float = math.nan
    compile_s: float = math.nan
    #: Why there is no measurement.
    problem: str = ""

    @property
    def held_out(self) -> bool:
        """Whether nobody looks at the program."""
        kind, _, seed = self.program.partition(" ")
        return kind == "stranger" and int(seed) % 2 == 1


def read() -> list[Row]:
    """The rows of the table."""
    if not TABLE.exists():
        return []
    types = {field.name: field.type for field in dataclasses.fields(Row)}
    with TABLE.open(newline="") as file:
        return [
            Row(**{n: float(v) if types[n] == "float" else v for n, v in row.items()})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        ]


def write(rows: Sequence[Row]) -> None:
    """Write the table."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in dataclasses.fields(Row)])
        for row in rows:
            values = dataclasses.asdict(row).values()
            writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in values])


def label(name: str, options: dict[str, Any]) -> str:
    """The name of a program of the zoo."""
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def names() -> list[str]:
    """The names of all programs."""
    return [label(*each) for each in MODELS] + [f"stranger {seed}" for seed in SEEDS]


def model_of(name: str) -> Model:
    """The model of a name; its attention is cuDNN's."""
    attention._attention = fused
    if name.startswith("stranger "):
        return grammar.draw(int(name.split()[1])).model
    options = next(options for model, options in MODELS if label(model, options) == name)
    return build(name.split()[0], **options)


def fused(query: Any, key: Any, value: Any, causal: bool, window: int) -> Any:
    """Attention of cuDNN with the arguments of the zoo's."""
    batch, sequence, groups, queries, size = query.shape
    result = jax.nn.dot_product_attention(
        query.reshape(batch, sequence, groups * queries, size), key, value,
        is_causal=causal, scale=1.0, local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )  # fmt: skip
    return result.reshape(*query.shape[:-1], value.shape[-1])


def priced(name: str, hardware_name: str) -> tuple[CostModel, Prediction]:
    """The cost model of a program on one device, and its prediction."""
    hardware = load(hardware_name)
    analysis = toast.analyze(model_of(name), platform=HardwarePlatform.of(hardware))
    model = CostModel(Space(analysis, MESH), hardware)
    return model, Prediction.of(model.price(model.space.initial[None]))


def row_of(name: str, hardware: str) -> Row:
    """The row of a program that is not measured."""
    _, predicted = priced(name, hardware)
    step = 1e3 * predicted.step_seconds
    return Row(
        name, hardware, step, step, 1e3 * predicted.matmul_seconds, 1e3 * predicted.memory_seconds,
        predicted.peak_bytes / GIB,
    )  # fmt: skip


def predict(hardware: str, again: bool) -> None:
    """Rows of programs without one; present prices in the others if ``again``."""
    rows = {row.program: row for row in read()}
    most = ROOM * load(hardware).memory_capacity_bytes / GIB
    for name in steps([*rows] if again else [n for n in names() if n not in rows]):
        try:
            new = row_of(name, hardware)
        except (ToastError, ValueError, TypeError, NotImplementedError) as error:
            print(f"{name}: {str(error)[:200]}", flush=True)
            continue
        if name in rows:
            old = rows[name]
            rows[name] = dataclasses.replace(
                new, first_ms=old.first_ms, measured_ms=old.measured_ms,
                xla_peak_gib=old.xla_peak_gib, compile_s=old.compile_s, problem=old.problem,
            )  # fmt: skip
        elif new.peak_gib < most and new.step_ms > 1e3 * SHORTEST_S:
            rows[name] = new
        print(f"{name}: {new.step_ms:.2f} ms, {new.peak_gib:.2f} GiB", flush=True)
        write([rows[n] for n in rows])
        jax.clear_caches()


def measured(row: Row, lock: str) -> Row:
    """The row with what the GPU of this machine takes."""
    try:
        model, _ = priced(row.program, row.hardware)
        program = model.space.analysis.program
        shardings = shardings_of(model, model.space.initial)
        with pathlib.Path(lock).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            verdict = judge_here(program, shardings, model.hardware)
    except Exception as error:
        return dataclasses.replace(row, problem=" ".join(str(error).split())[:200])
    seconds = verdict.schedule.seconds if verdict.schedule else math.nan
    return dataclasses.replace(
        row, measured_ms=1e3 * seconds, xla_peak_gib=verdict.peak_bytes / GIB,
        compile_s=verdict.seconds, problem="out of memory" if verdict.out_of_memory else "",
    )  # fmt: skip


def run(hardware: str, jobs: int, minutes: float) -> None:
    """Measure rows without a measurement, for at most so many minutes."""
    end = time.monotonic() + 60 * minutes
    rows = {row.program: row for row in read()}
    left = [r for r in rows.values() if math.isnan(r.measured_ms) and r.hardware == hardware]
    # In any order: if the time is over, those that were measured are a sample.
    left = [left[n] for n in np.random.default_rng(0).permutation(len(left)).tolist()]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.NamedTemporaryFile() as lock,
        context.Pool(jobs, maxtasksperchild=1) as pool,
    ):
        begun = [(row, pool.apply_async(measured, (row, lock.name))) for row in left]
        for _, each in steps(begun, lambda case: case[0].program):
            try:
                row = each.get(max(end - time.monotonic(), 0.1))
            except multiprocessing.TimeoutError:
                break
            rows[row.program] = row
            print(
                f"{row.program}: {row.measured_ms:.2f} ms, predicted {row.step_ms:.2f}; peak "
                f"{row.xla_peak_gib:.2f} GiB, predicted {row.peak_gib:.2f}; compiled in "
                f"{row.compile_s:.0f} s {row.problem}",
                flush=True,
            )
            write(list(rows.values()))
        pool.terminate()


def errors(pairs: Sequence[tuple[float, float]]) -> str:
    """The median, the mean and the 90th percentile of relative errors, and the mean ratio."""
    if not pairs:
        return " | | | "
    ratios = np.array([predicted / real for predicted, real in pairs])
    off = 100 * abs(ratios - 1)
    return (
        f"{np.median(off):.1f} | {off.mean():.1f} | {np.quantile(off, 0.9):.1f} | "
        f"{np.exp(np.log(ratios).mean()):.2f}"
    )


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The table of errors, in Markdown."""
    timed = [row for row in rows if row.measured_ms > 0]
    groups = {
        "models of the zoo": [r for r in timed if not r.program.startswith("stranger")],
        "programs of the grammar": [
            r for r in timed if r.program.startswith("stranger") and not r.held_out
        ],
        "programs of the grammar, held out": [r for r in timed if r.held_out],
    }
    yield "| programs | rows | figure | median % | mean % | 90th percentile % | mean ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, group in groups.items():
        for figure, pairs in {
            "step, first prediction": [(r.first_ms, r.measured_ms) for r in group],
            "step": [(r.step_ms, r.measured_ms) for r in group],
            "peak": [(r.peak_gib, r.xla_peak_gib) for r in group],
        }.items():
            yield f"| {name} | {len(group)} | {figure} | {errors(pairs)} |"


def main() -> None:
    """Predicts, measures or prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--predict", action="store_true", help="predict programs without a row")
    parser.add_argument("--price", action="store_true", help="predict again all rows")
    parser.add_argument("--run", action="store_true", help="measure on the GPU of this machine")
    parser.add_argument("--page", action="store_true", help="write the table to docs/fidelity.md")
    parser.add_argument("--jobs", type=int, default=6, help="processes that trace programs")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for --run")
    options = parser.parse_args()
    if options.predict or options.price:
        predict(options.hardware, options.price)
    elif options.run:
        run(options.hardware, options.jobs, options.minutes)
    rows = read()
    if options.page:
        page = DOCS / "fidelity.md"
        head, _, rest = page.read_text().partition(BEGIN)
        page.write_text("\n".join([head + BEGIN, *report(rows), END + rest.partition(END)[2]]))
    if not (options.predict or options.run or options.price):
        for row in rows:
            if not row.held_out:
                print(
                    f"{row.program:60s} {row.measured_ms:8.2f} {row.step_ms:8.2f} "
                    f"{row.step_ms / row.measured_ms:6.2f}  {row.xla_peak_gib:7.2f} "
                    f"{row.peak_gib:7.2f} {row.problem}"
                )
    print(*report(rows), sep="\n")


if __name__ == "__main__":
    main()
