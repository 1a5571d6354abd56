"""Device-local programs and annotated ones by XLA's TPU compiler: peak memory and step.

    python benchmarks/lowering.py [--programs mlp,convnet] [--plans 6] [--memory]

This needs libtpu, but no TPU.  Every plan is compiled twice: as annotations that XLA partitions,
and as the program of one device that TOAST writes; each form has its own prediction.  The plan
``best of each`` is the plan that the search finds for XLA beside the one for the device-local
program, if these differ.  The script writes a row per plan to benchmarks/lowering.csv and prints
the totals; rows that are there already are not made again.  With ``--again`` they are, with
present prices: compilations of before are cached.  ``--price`` compiles nothing: it predicts the
rows again, and removes those of plans that may have changed.  ``--memory`` ends each compilation
after buffer assignment, so that there are no steps.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import fidelity
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.errors import ToastError
from toast.evaluation.oracle import judge
from toast.evaluation.validate import states_to_compare
from toast.hardware import Mesh, load
from toast.models import ZOO, build, unet
from toast.plan.prediction import Prediction
from toast.plan.shard import lowered_state, shardings_of
from toast.search import Settings, find
from toast.space import Space, States

HARDWARE = "tpu-v5e"
TABLE = pathlib.Path(__file__).resolve().parent / "lowering.csv"
COLUMNS = (
    "program", "mesh", "plan", "equal", "whole", "loops",
    "xla predicted GiB", "xla GiB", "local predicted GiB", "local GiB",
    "xla predicted ms", "xla ms", "local predicted ms", "local ms",
)  # fmt: skip

#: Models of the zoo, with the options that make them small enough to compile often.
MODELS: dict[str, dict[str, Any]] = {
    "itx-decode": {"layers": 1},
    "itx": {"layers": 1},
    "gns": {"layers": 2},
    "moe": {"layers": 2, "experts": 16},
    "t2b": {"layers": 1},
}

#: The rest of the zoo, with few layers and experts: the plans that the search finds, and one of an
#: expert each.
ONE_LAYER = (
    "t7b", "llama3-8b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "llama2-7b",
    "mistral-7b", "qwen3-8b", "gemma3-4b", "gemma3-12b", "gemma3-27b", "vit-l", "vit-h",
    "dit-xl", "whisper-large", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3",
    "qwen3-30b-a3b", "mamba2-1.3b",
)  # fmt: skip
MOE = {"mixtral-8x7b": 8, "deepseek-v2-lite": 8, "deepseek-v3": 8, "qwen3-30b-a3b": 16}
TWO_LAYERS = ("t2b-scan", "t7b-scan", "llama3-8b-scan", "gns-scan", "itx-scan")
REST: dict[str, dict[str, Any]] = {
    **{name: {"layers": 1} for name in ONE_LAYER},
    **{name: {"layers": 1, "experts": experts} for name, experts in MOE.items()},
    **{name: {"layers": 2} for name in TWO_LAYERS},
    "moe-scan": {"layers": 4, "experts": 16},
    "resnet50": {"batch": 64},
    "unet": {},
}
EXPERTS = (
    "FSDP", "data + expert parallel", "edge sharding", "Megatron + data parallel", "Megatron",
)  # fmt: skip
MESHES: dict[str, tuple[str, ...]] = {
    "mlp": ("data=4,model=4",),
    "residual MLP": fidelity.MESHES,
    "convnet": fidelity.MESHES,
    **dict.fromkeys((*MODELS, *REST), ("data=4,model=4",)),
    "unet": ("data=2,space=4",),
}

#: Plans that the search finds with the prices of device-local programs.
FOUND_FOR_LOCAL = ("best of each", "pinned rows")

#: Differences of steps below this share are ties.
TIE = 0.03


#: A U-Net for images of 512x512, fewer than devices, with attention over 64x64 positions.
LARGE_IMAGES = unet.UNetConfig(
    channels=32, multipliers=(1, 1, 1, 2), blocks=1, heads=4, groups=8, image=512, batch=2
)

#: Shardings of an MLP whose weights have the axis that also shards its rows: loops of products.
LOOPED = {
    "x": P(("data", "model"), None), "up": P(None, "model"), "down": P("model", None),
    "result": P(("data", "model"), None),
}  # fmt: skip


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two layers."""
    return jax.nn.relu(x @ up) @ down


def analysis_of(name: str, lowering: str = "xla") -> toast.Analysis:
    """The analysis of a program of this benchmark for XLA's partitioner, or for ours."""
    if name in MODELS or name in REST:
        options = MODELS.get(name) or REST.get(name, {})
        model = unet.model(LARGE_IMAGES, name) if name == "unet" else build(name, **options)
        return toast.analyze(model, lowering=lowering)
    if name == "mlp":
        shapes = (16384, 4096), (4096, 16384), (16384, 4096)
        arguments = (fidelity.shape(*shape, dtype=jnp.bfloat16) for shape in shapes)
        return toast.analyze(mlp, *arguments, lowering=lowering)
    return fidelity.programs()[name]


@dataclasses.dataclass(frozen=True)
class Compared:
    """A plan of the annotated program, and one of the device-local program, often the same."""

    name: str
    xla: CostModel
    xla_state: States
    local: CostModel
    local_state: States


def compared(name: str, mesh: str, plans: int) -> Iterator[Compared]:
    """The plans of a program on a mesh.  Each form has its own prices: only ours has loops."""
    hardware, analysis = load(HARDWARE), analysis_of(name)
    space = Space(analysis, Mesh.parse(mesh))
    xla, local = (CostModel(space, hardware, loops=loops) for loops in (False, True))
    strategies = ZOO[name].strategies if name in ZOO and name != "mlp" else {}
    if name in REST:
        plans = 0
        expert = next(expert for expert in EXPERTS if expert in strategies)
        strategies = {expert: strategies[expert]}
    if name == "mlp":
        pinned = Space(analysis, Mesh.parse(mesh), constraints=toast.Constraints(pin=LOOPED))
        first, second = (CostModel(pinned, hardware, loops=loops) for loops in (False, True))
        best = find(second, memory_bytes=hardware.memory_limit_bytes, settings=Settings(seed=0))
        yield Compared("pinned rows", first, best.state, second, best.state)
    for number, (plan, state) in enumerate(
        states_to_compare(xla, plans=plans, strategies=strategies)
    ):
        if plan == "unsharded" and name in REST:
            continue  # it takes longest to compile, and says nothing of partitioners
        yield Compared(plan, xla, state, local, state)
        if number == 0 and name in ZOO and name != "mlp":
            own = CostModel(Space(analysis_of(name, "local"), Mesh.parse(mesh)), hardware)
            best = find(own, memory_bytes=hardware.memory_limit_bytes, settings=Settings(seed=0))
            if best.state.tobytes() != state.tobytes():
                yield Compared("best of each", xla, state, own, best.state)


def predictions(pair: Compared) -> dict[str, object]:
    """The predicted columns."""
    states = (pair.xla, pair.xla_state), (pair.local, pair.local_state)
    row: dict[str, object] = {}
    for form, (model, state) in zip(("xla", "local"), states, strict=True):
        predicted = Prediction.of(model.price(state[None]))
        row[f"{form} predicted GiB"] = f"{predicted.peak_bytes / 2**30:.3f}"
        row[f"{form} predicted ms"] = f"{1e3 * predicted.step_seconds:.3f}"
    return row


def priced(rows: list[dict[str, object]], plans: int) -> list[dict[str, object]]:
    """The rows with present predictions, but for those whose device-local programs may differ."""
    left = []
    for name, mesh in dict.fromkeys((str(row["program"]), str(row["mesh"])) for row in rows):
        pairs = {pair.name: pair for pair in compared(name, mesh, plans)}
        for row in rows:
            pair = pairs.get(str(row["plan"]))
            if (row["program"], row["mesh"]) != (name, mesh) or pair is None:
                continue
            local = lowered_state(pair.local, pair.local_state)
            loops = local.text.count("loop of ")
            if str(loops) == str(row["loops"]) and pair.name not in FOUND_FOR_LOCAL:
                left.append({**row, **predictions(pair)})
    return left


def row_of(
    name: str, mesh: str, pair: Compared, *, full: bool, timeout: float
) -> dict[str, object]:
    """The row of a plan; raises :class:`ToastError` if it cannot be lowered or compiled."""
    hardware = pair.xla.hardware
    local = lowered_state(pair.local, pair.local_state)
    verdicts = (
        judge(
            pair.xla.space.analysis.program, shardings_of(pair.xla, pair.xla_state), hardware,
            full=full, timeout=timeout,
        ),
        judge(
            pair.local.space.analysis.program, shardings_of(pair.local, pair.local_state),
            hardware, local=local.module, full=full, timeout=timeout,
        ),
    )  # fmt: skip
    row: dict[str, object] = {
        "program": name,
        "mesh": mesh,
        "plan": pair.name,
        "equal": int(local.counts() == pair.local.local_collectives(pair.local_state)),
        "whole": len(local.gathered),
        "loops": local.text.count("loop of "),
    }
    row |= predictions(pair)
    for form, verdict in zip(("xla", "local"), verdicts, strict=True):
        step = verdict.schedule.seconds if verdict.schedule else float("nan")
        row[f"{form} GiB"] = f"{verdict.peak_bytes / 2**30:.3f}"
        row[f"{form} ms"] = "does not fit" if verdict.out_of_memory else f"{1e3 * step:.3f}"
    return {column: row[column] for column in COLUMNS}


def totals(rows: list[dict[str, object]]) -> str:
    """The figures of the table."""

    def number(row: dict[str, object], column: str) -> float:
        try:
            return float(str(row[column]))
        except ValueError:
            return float("nan")

    equal = sum(int(str(row["equal"])) for row in rows)
    text = [f"{len(rows)} plans; collectives as predicted: {equal}"]
    ratios = np.array([number(r, "local ms") / number(r, "xla ms") for r in rows])
    ratios = ratios[np.isfinite(ratios)]
    if ratios.size:
        text.append(
            f"step of the local program over the annotated one: median {np.median(ratios):.3f}, "
            f"not longer in {np.mean(ratios <= 1 + TIE):.0%} and shorter in "
            f"{np.mean(ratios < 1 - TIE):.0%} of {ratios.size} (ties: {TIE:.0%})"
        )
    for form in ("xla", "local"):
        errors = np.array([
            number(r, f"{form} predicted GiB") / number(r, f"{form} GiB") - 1
            for r in rows if "fit" not in str(r[f"{form} ms"])
        ])  # fmt: skip
        errors = np.abs(errors[np.isfinite(errors)])
        if errors.size:
            text.append(
                f"peak of the {form} program: median error {np.median(errors):.1%}, "
                f"90th percentile {np.quantile(errors, 0.9):.1%}"
            )
    return "\n".join(text)


def write(rows: list[dict[str, object]], table: pathlib.Path) -> None:
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", default=",".join(MESHES), help="separated by commas")
    parser.add_argument("--plans", type=int, default=6, help="others than TOAST's and experts'")
    parser.add_argument("--table", type=pathlib.Path, default=TABLE)
    parser.add_argument("--again", action="store_true", help="also rows that are there already")
    parser.add_argument("--price", action="store_true", help="predict all rows again")
    parser.add_argument("--memory", action="store_true", help="memory only, which is faster")
    parser.add_argument("--minutes", type=float, default=10, help="limit of one compilation")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    if options.table.exists():
        with options.table.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    chosen = options.programs.split(",")
    if options.again:
        rows = [row for row in rows if row["program"] not in chosen]
    if options.price:
        rows, chosen = priced(rows, options.plans), []
        write(rows, options.table)
    done = {(row["program"], row["mesh"], row["plan"]) for row in rows}
    places = [(program, on) for program in chosen for on in MESHES[program]]
    for name, mesh in steps(places, " ".join):
        for pair in compared(name, mesh, options.plans):
            if (name, mesh, pair.name) in done:
                continue
            try:
                row = row_of(
                    name, mesh, pair, full=not options.memory, timeout=60 * options.minutes
                )
            except ToastError as error:
                print(f"{name} on {mesh}, {pair.name}: {error}", file=sys.stderr)
                continue
            rows.append(row)
            print(*row.values(), flush=True)
            write(rows, options.table)
    print(totals(rows))


if __name__ == "__main__":
    main()
