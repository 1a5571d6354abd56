"""Measure the size of reports, the time to write them, and the time to open them in a browser.

    python benchmarks/report.py [MODEL ...]

This needs Chromium and the extra toast-partitioner[test].
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from tests.report.browser import browser, missing, opened
from toast.cli.elapsed import steps
from toast.models import build
from toast.report import html_text

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["t2b", "unet"], help="models of the zoo")
    names: list[str] = parser.parse_args().models
    if missing():
        sys.exit(missing())
    print(
        f"{'model':<16}{'ops':>8}{'file':>10}{'write':>10}{'open':>10}{'filter':>10}{'unfold':>10}"
    )
    with browser() as started, tempfile.TemporaryDirectory() as folder:
        for name in steps(names):
            plan = toast.plan(build(name), mesh="data=4,model=4", hardware="tpu-v5e")
            begin = time.process_time()
            text = html_text(plan)
            write = time.process_time() - begin
            path = pathlib.Path(folder) / f"{name}.html"
            path.write_text(text)
            times: list[list[float]] = [[], [], []]
            for _ in range(REPEATS):
                begin = time.perf_counter()
                page = opened(started, path)
                times[0].append(time.perf_counter() - begin)
                times[1].append(
                    page.evaluate("""() => {
                      const begin = performance.now(), kind = document.getElementById("kind");
                      kind.value = "dot_general";
                      kind.dispatchEvent(new Event("change"));
                      document.body.getBoundingClientRect();
                      return (performance.now() - begin) / 1000;
                    }""")
                )
                times[2].append(
                    page.evaluate("""() => {
                      document.getElementById("filters").reset();
                      const begin = performance.now();
                      document.querySelectorAll(".fold > h4 > button")[2].click();
                      document.body.getBoundingClientRect();
                      return (performance.now() - begin) / 1000;
                    }""")
                )
                page.close()
            spent = "".join(f"{statistics.median(each):>9.2f}s" for each in times)
            ops = len(plan.analysis.program.ops)
            print(f"{name:<16}{ops:>8}{len(text) / 2**20:>7.2f}MiB{write:>9.2f}s{spent}")


if __name__ == "__main__":
    main()
