"""Train steps with parameters over 1, 4 and 16 devices: predictions, and XLA's TPU compiler.

    python benchmarks/spread_parameters.py [--hardware tpu-v5e,tpu-v6e] [--layers 3] [--page]

All plans divide the batch over 16 devices (``data=4,model=4``).  They differ in the devices that a
parameter is divided over: data parallelism keeps it whole, the others divide its width over the
first axis or over both.  Where XLA scatters the gradients of weights over many devices, their
products become loops of small ones: the compiler's *kernels* grow, not its communication.  The
table has predicted and compiled times of each, and of the plan that the search finds.

``--page`` writes the table into docs/fidelity.md.  It needs libtpu, but no TPU, and some minutes.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterator

import strangers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cost import CostModel
from toast.evaluation.baselines import manual_states
from toast.evaluation.oracle import judge
from toast.hardware import Mesh, load
from toast.models import build
from toast.plan.shard import shardings_of
from toast.search import Settings, find
from toast.space import Space

MESH = Mesh.parse("data=4,model=4")
#: Models and their batch.
CASES = (("vit-l", 256), ("dit-xl", 128))
_BATCH, _WIDTH = "images", "params['positions']"
PLANS = {"1": (), "4": ("first",), "16": ("all",)}


def rows(name: str, batch: int, chip: str, layers: int) -> Iterator[str]:
    """The lines of the table for one model and one kind of device."""
    hardware = load(chip)
    model = build(name, layers=layers, batch=batch, unroll=1)
    analysis = toast.analyze(model, platform=hardware.platform)
    space = Space(analysis, MESH)
    price, scheduled = CostModel(space, hardware), CostModel(space, hardware.as_scheduled_for)
    plans = {
        f"parameters over {devices}": [(_BATCH, 0, "all"), *((_WIDTH, -1, axes) for axes in over)]
        for devices, over in PLANS.items()
    }
    states = dict(manual_states(price, plans))
    limit = hardware.memory_limit_bytes
    states["found"] = find(price, memory_bytes=limit, settings=Settings(budget=60.0)).state
    for plan, state in states.items():
        seen = strangers.scheduled(scheduled, state)
        verdict = judge(analysis.program, shardings_of(price, state), hardware, full=True)
        if verdict.schedule is None:
            yield f"| {name}, {chip} | {plan} | does not fit | | | | |"
            continue
        theirs = verdict.schedule
        ours = (1e3 * (seen.products + seen.memory - seen.left_out), 1e3 * seen.seconds)
        xla = (1e3 * theirs.compute_seconds, 1e3 * theirs.seconds)
        yield (
            f"| {name}, {chip} | {plan} | {ours[0]:.1f} | {xla[0]:.1f} | {ours[1]:.1f} | "
            f"{xla[1]:.1f} | {ours[1] / xla[1]:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", default="tpu-v5e,tpu-v6e")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    lines = [
        "| program | plan | kernels, ms | XLA's | step, ms | XLA's | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    for chip in options.hardware.split(","):
        for case in CASES:
            for line in rows(*case, chip, options.layers):
                print(line, flush=True)
                lines.append(line)
    if options.page:
        strangers.write_block(strangers.PAGE, "parameters over devices", "\n".join(lines))


if __name__ == "__main__":
    main()
