"""Predicted memory under recomputation, against XLA's TPU compiler.

    python benchmarks/recomputation.py [--programs 0:8] [--record]
    python benchmarks/recomputation.py --report [--price --record] [--page]

The programs are those of ``layered_steps.py``.  Each has several pairs of a memory policy and a
sharding: no recomputation, full, policies of MaxText, and the joint plan's; and the plan that the
search finds for the policy, FSDP, or FSDP with Megatron.  Each program is traced with the policy,
priced, and compiled for the devices of the mesh.  Whoever mends the cost model may look at the even
programs; the odd ones are held out.

``--record`` writes each pair into benchmarks/recomputation.csv; pairs that are there already are
not compiled again.  ``--steps`` compiles to the end, for the compiler's step, which takes minutes.
``--price`` predicts all rows again with present prices.  ``--page`` writes the figures into
docs/memory-accuracy.md.

This needs libtpu, but no TPU, and 10 to 40 seconds for a pair.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pathlib
import sys
from collections.abc import Iterator, Sequence

import jax
import layered_steps
import numpy as np
import strangers
from grammar import Stranger

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cost import CostModel
from toast.evaluation.baselines import manual_states
from toast.search import Settings

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "memory-accuracy.md"
TABLE = pathlib.Path(__file__).resolve().parent / "recomputation.csv"

#: A plan that needs this much more than a device has is wrong if it was said to fit.
CLEARLY = 1.03

#: Policies and shardings of every program.
PAIRS = (
    ("none", "found"), ("none", "FSDP"), ("full", "found"), ("full", "FSDP + Megatron"),
    ("minimal", "FSDP"), ("save_qkv_proj", "found"), ("auto", "found"),
)  # fmt: skip

#: Further policies of MaxText: each program has two of them, with another sharding.
OTHERS = (
    "minimal_with_context", "save_dot_except_mlp", "save_out_proj", "qkv_proj_offloaded",
    "save_dot_with_context_except_mlp", "minimal_offloaded", "save_dot_except_mlpwi",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row(strangers.Row):
    """A pair of a policy and a sharding (``plan``) of a program (``seed``)."""

    #: A preset, or ``auto``.
    remat: str
    #: The policy that the program is traced with.
    policy: str

    @property
    def name(self) -> str:
        """The name of the program."""
        return self.program.split(",")[0]

    @property
    def judged(self) -> bool:
        """Whether the compiler says whether the plan fits."""
        return self.compiled or self.verdict == "out of memory"

    @property
    def error(self) -> float:
        """The predicted peak over the compiler's, minus one."""
        return self.peak_gib / self.xla_peak_gib - 1

    @property
    def wrongly_fits(self) -> bool:
        """Whether it is said to fit, and clearly does not."""
        needed = self.xla_peak_gib > CLEARLY * self.limit_gib
        return self.fits and self.verdict == "out of memory" and needed


def pairs_of(number: int) -> Iterator[tuple[str, str]]:
    """The policies and shardings of a program."""
    yield from PAIRS
    yield OTHERS[number % len(OTHERS)], "FSDP + Megatron"
    yield OTHERS[(number + 3) % len(OTHERS)], "FSDP"


def models_of(stranger: Stranger, policy: str) -> tuple[CostModel, CostModel]:
    """The cost models of a program that is traced with a policy."""
    jax.clear_caches()  # how often constants are stated depends on what was traced before
    gc.collect()
    return strangers.models_of(stranger, "xla", remat=policy, microbatches=1)


def row_of(stranger: Stranger, remat: str, plan: str, *, full: bool) -> Row:
    """The row of a pair; ``full`` for the compiler's step, too."""
    policy, joint = remat, None
    settings = Settings(seed=stranger.seed, budget=strangers.SEARCH_S)
    if remat == "auto":
        joint = toast.plan(
            stranger.model, mesh=stranger.mesh, hardware=stranger.hardware, remat="auto",
            microbatches=1, uneven=0, settings=Settings(seed=stranger.seed),
        )  # fmt: skip
        policy = str(joint.policy)
    models = models_of(stranger, policy)
    model = models[0]
    if plan == "found":
        # JAX may state constants another number of times, so that a joint plan is only a start.
        state = toast.plan(
            model.space.analysis, mesh=stranger.mesh, hardware=stranger.hardware, start=joint,
            uneven=0, settings=settings,
        ).state  # fmt: skip
    else:
        state = dict(manual_states(model, stranger.strategies))[plan]
    found = plan == "found"
    row = strangers.judged(models, stranger, plan, found, state, lowering="xla", full=full)
    return Row(**dataclasses.asdict(row), remat=remat, policy=policy)


def priced(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows with present predictions."""
    stacks = layered_steps.stacks()
    for row in rows:
        stranger = stacks[row.seed].stranger(row.seed)
        yield from strangers.priced_by(models_of(stranger, row.policy), stranger, [row])


def figures(name: str, rows: Sequence[Row]) -> str:
    """A row of the report."""
    errors = [row.error for row in rows if row.compiled]
    sizes = np.abs(errors)
    worst = f"{errors[int(np.argmax(sizes))]:+.0%}" if errors else "-"
    peak = f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.95):.1%}" if errors else "- | -"
    judged = [row for row in rows if row.judged]
    said = sum(row.fits for row in judged)
    return (
        f"| {name} | {len(rows)} | {len(errors)} | {peak} | {worst} | "
        f"{sum(row.wrongly_fits for row in judged)} of {said} | "
        f"{sum(row.compiled and not row.fits for row in judged)} of {len(judged) - said} |"
    )


def report(rows: Sequence[Row]) -> str:
    """The errors of the peak by halves, programs and policies, as a table in Markdown."""
    lines = [
        "| | pairs | compiled | peak: median error | 95th percentile | worst | "
        "said to fit, and does not | said not to fit, and does |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        figures("**all**", rows),
        figures("**open**", [row for row in rows if not row.held_out]),
        figures("**held out**", [row for row in rows if row.held_out]),
        *(figures(f"**{form}**", [row for row in rows if f", {form}," in row.program])
          for form in ("scanned", "unrolled")),
    ]  # fmt: skip
    for number in sorted({row.seed for row in rows}):
        mine = [row for row in rows if row.seed == number]
        words = mine[0].program.split(", ")
        held = ", held out" * mine[0].held_out
        lines.append(figures(f"{words[0]} ({words[2]}{held})", mine))
    policies = {row.remat: None for row in sorted(rows, key=lambda row: row.seed)}
    lines += [figures(f"`{name}`", [r for r in rows if r.remat == name]) for name in policies]
    timed = [(r.scheduled_step_ms, r.xla_step_ms) for r in rows if r.xla_step_ms > 0]
    if timed:
        lines += ["", f"The step (median, 90th percentile and worst error of {len(timed)} pairs): "
                  f"{strangers.errors(timed).replace(' | ', ', ')}."]  # fmt: skip
    lost = [row for row in rows if not row.judged]
    lines += [f"* {row.name}, {row.remat}, {row.plan}: {row.verdict}" for row in lost]
    return "\n".join(lines)


def text_of(row: Row) -> str:
    """A row in one line."""
    return (
        f"{row.name}, {row.remat}, {row.plan}: {row.verdict[:80]}; peak {row.peak_gib:.2f} and "
        f"{row.xla_peak_gib:.2f} GiB ({row.error:+.0%}), {row.xla_live_gib:.2f} alive, step "
        f"{row.step_ms:.0f} and {row.xla_step_ms:.0f} ms, {row.compile_s:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    stacks = layered_steps.stacks()
    parser.add_argument("--programs", type=strangers.seeds_in, default=range(len(stacks)))
    parser.add_argument("--record", action="store_true", help="write the table")
    parser.add_argument("--steps", action="store_true", help="compile to the end")
    parser.add_argument("--report", action="store_true", help="compile nothing")
    parser.add_argument("--page", action="store_true", help="write the figures into the docs")
    parser.add_argument("--price", action="store_true", help="predict all rows again")
    options = parser.parse_args()
    rows = strangers.rows_in(TABLE, Row)
    done = {(row.seed, row.remat, row.plan) for row in rows}
    wanted = [
        (number, *pair) for number in options.programs for pair in pairs_of(number)
        if not options.report and (number, *pair) not in done
    ]  # fmt: skip
    for number, remat, plan in wanted:
        row = row_of(stacks[number].stranger(number), remat, plan, full=options.steps)
        print(text_of(row), flush=True)
        rows.append(row)
        if options.record:
            strangers.write(rows, TABLE)
    if options.price:
        rows = []
        for row in priced(strangers.rows_in(TABLE, Row)):
            print(text_of(row), flush=True)
            rows.append(row)
        if options.record:
            strangers.write(rows, TABLE)
    text = report(rows)
    print(text)
    if options.page:
        strangers.write_block(PAGE, "recomputation", text)


if __name__ == "__main__":
    main()
