"""Plan and run the steps of `tests/libraries/steps.py`, and print the table of docs/programs.md.

    python benchmarks/libraries.py [STEP ...]

Each step is planned for a mesh of eight CPU devices, run three times in shards with donation, and
compared with its unsharded run.  Libraries that are not installed are left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOAST_CACHE"] = "off"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.libraries import steps
from tests.libraries.measured import measured
from toast.cli import elapsed

HEADER = """\
| library | step | ops | without rule | lowering (s) | planning (s) | losses differ by |
| --- | --- | ---: | ---: | ---: | ---: | ---: |"""


def main() -> None:
    print(HEADER)
    for name in elapsed.steps(sys.argv[1:] or steps.LIBRARIES):
        package, _ = steps.LIBRARIES[name]
        try:
            version = importlib.metadata.version(package)
            step = getattr(steps, name)()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        result = measured(step)
        print(
            f"| {package} {version} | {name.replace('_', ' ')} "
            f"| {len(result.analysis.program.ops):,} | {len(result.without_rule)} "
            f"| {result.lowering_s:.1f} | {result.planning_s:.1f} | {result.loss_error:.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
