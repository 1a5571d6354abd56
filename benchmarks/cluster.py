"""Measure a search over many meshes on a local Dask cluster against one process.

    python benchmarks/cluster.py [--model t2b] [--devices 64] [--hardware tpu-v5e] [--workers 2]
        [--repeat 1]

Both plan the same program, which is analyzed before; the workers have started and imported TOAST
when the clock starts.  ``times as fast`` is the time of one process over that of the cluster.  What
the machine allows is printed first: how much more work its workers do at the same time than one of
them alone.  It is far from the number of workers where these share cores, caches or a clock.  The
plans are equal, or the script fails.  This needs ``pip install 'toast-partitioner[dask]'``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import distributed
import numpy as np

import toast
from toast.cli.elapsed import steps
from toast.models import build


def import_search() -> None:
    """Import in a worker what it needs."""
    importlib.import_module("toast.search")


def loops(seconds: float) -> int:
    """How often a worker does a little work in this time."""
    values = np.random.default_rng(0).random((512, 64))
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        count += bool((values * values).sum() + sum(range(1000)))
    return count


def capacity(client: distributed.Client, seconds: float = 3) -> float:
    """The work of all workers together, over that of one alone."""
    one, *_ = workers = [*client.scheduler_info()["workers"]]
    (alone,) = client.run(loops, seconds, workers=[one]).values()
    return float(sum(client.run(loops, seconds, workers=workers).values()) / alone)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="t2b", help="a model of the zoo")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--hardware", default="tpu-v5e")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="pairs of runs")
    options = parser.parse_args()
    analysis = toast.analyze(build(options.model))

    def seconds(executor: concurrent.futures.Executor | None) -> tuple[float, toast.Plan]:
        begin = time.perf_counter()
        plan = toast.plan(
            analysis, devices=options.devices, hardware=options.hardware, executor=executor
        )
        return time.perf_counter() - begin, plan

    with (
        distributed.LocalCluster(
            n_workers=options.workers, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(import_search)
        print(f"{options.workers} workers do {capacity(client):.2f} times the work of one")
        print("| one process (s) | cluster (s) | times as fast |\n| ---: | ---: | ---: |")
        for _ in steps(range(options.repeat), lambda _: "both runs"):
            alone, here = seconds(None)
            shared, there = seconds(client.get_executor())
            if (here.digest, here.mesh) != (there.digest, there.mesh):
                print("the plans differ", file=sys.stderr)
                return 1
            print(f"| {alone:.1f} | {shared:.1f} | {alone / shared:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
