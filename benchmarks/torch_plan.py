"""The time and memory of a plan for a PyTorch train step of Llama 3 8B, on the meta device.

``python benchmarks/torch_plan.py`` needs the extra ``torch``.  It plans all 32 layers with AdamW,
from ``examples/torch_llama.py``, and prints the seconds of each stage, their sum and the peak
memory of the process (its largest resident set).  Imports are not in the sum; the cache is off.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import resource
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import elapsed

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "torch_llama.py"


def example() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("torch_llama", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", default="data=8,model=4")
    parser.add_argument("--hardware", default="h100")
    options = parser.parse_args()
    os.environ["TOAST_CACHE"] = "off"

    begin = time.perf_counter()
    with elapsed() as show:
        show("imports")
        llama = example()
        # What a first plan imports.
        llama.plan(
            dataclasses.replace(llama.CONFIGS["small"], layers=1), "data=2", options.hardware,
            settings=toast.Settings(rounds=1),
        )  # fmt: skip
    print(f"{time.perf_counter() - begin:6.1f} s  imports, and a small plan (not in the sum)")

    begin = time.perf_counter()
    config = dataclasses.replace(llama.CONFIGS["8b"], layers=options.layers)
    with elapsed() as show:
        show("trace")
        plan = llama.plan(config, options.mesh, options.hardware, progress=show)
    placements = plan.to_torch().text
    whole = time.perf_counter() - begin
    for stage, seconds in plan.seconds.items():
        print(f"{seconds:6.1f} s  {stage}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{whole:6.1f} s  whole plan; {memory / 2**30:.2f} GiB")
    print(plan)
    print(f"{len(plan.analysis.program.ops):,} ops, {len(placements):,} placements")


if __name__ == "__main__":
    main()
