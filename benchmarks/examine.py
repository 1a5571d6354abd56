"""Kernels of a plan of the corpus: XLA's, beside those that TOAST prices.

    python benchmarks/examine.py SEED PLAN [--keep FILE] [--text FILE] [--most 25]

It compiles one plan of the open corpora (strangers.csv, strangers_deep.csv, engineers.csv) to the
end and prints, largest first:

* places of the program, by the paths of JAX, with XLA's and TOAST's time of their kernels;
* XLA's kernels, with their runs in a step, time, type and path; alike ones are one row;
* TOAST's ops, with the terms of their price.

``--keep`` keeps the text of the scheduled program, and ``--text`` reads it instead of compiling.
Only open programs (even seeds) can be examined.  It needs libtpu, but no TPU.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import strangers

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from toast.cost import CostModel, break_down
from toast.evaluation.oracle import judge
from toast.evaluation.oracle.hlo import Module
from toast.evaluation.oracle.schedule import CLOCK_HZ
from toast.plan.shard import shardings_of
from toast.program import Program
from toast.space import States

#: Parts of a path that say how JAX runs the program, and not what it computes.
_WRAPPERS = re.compile(
    r"^(jit|pjit|jvp|transpose|checkpoint|rematted_computation|closed_call|while|body|cond|vmap"
    r"|remat|shard_map|scan|call_exported|branch_\d+_fun)(\(.*\))?$"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of the scheduled program."""

    computation: str
    opcode: str
    #: The type of its result, with the layout.
    type: str
    #: The path of the op that it is for.
    path: str
    #: Its runs in a step.
    runs: int
    #: The time of one run.
    seconds: float


def kernels(module: Module, clock_hz: float) -> Iterator[Kernel]:
    """The kernels of a scheduled program that take time; those of all branches of conditionals."""
    todo = [(module.entry, 1)]
    while todo:
        computation, runs = todo.pop()
        for instruction in module.computations.get(computation, ()):
            if instruction.opcode == "while":
                body = instruction.attribute("body") or ""
                todo.append((body, runs * module.trips(instruction)))
            elif instruction.opcode in ("call", "conditional"):
                todo += [(called, runs) for called in instruction.called]
            elif instruction.cycles:
                path = re.search(r'op_name="([^"]*)"', instruction.line)
                fused = instruction.attribute("calls") or ""
                inside = module.computations.get(fused, ())
                kind = "product" if any(i.opcode == "convolution" for i in inside) else ""
                yield Kernel(
                    computation, kind or instruction.opcode, instruction.type,
                    path[1] if path else "", runs, instruction.cycles / clock_hz,
                )  # fmt: skip


def place(path: str) -> str:
    """What a path of JAX says of the place in the program: its loops, and its last names."""
    backward = "backward " if "transpose(" in path else ""
    remade = "again " if "rematted" in path else ""
    loops = "loop " * path.count("while/body")
    names = [part for part in path.split("/") if part and not _WRAPPERS.match(part)]
    return loops + backward + remade + "/".join(names[-2:])


def table(rows: Sequence[tuple[float, str]], most: int) -> str:
    """The largest rows, by the absolute value of their seconds."""
    largest = sorted(rows, key=lambda row: -abs(row[0]))[:most]
    return "\n".join(f"{1e3 * seconds:10.3f} ms  {text}" for seconds, text in largest)


def priced_ops(
    program: Program, model: CostModel, state: States
) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """The ops whose kernels take time: their number, seconds, and seconds by term."""
    broken = break_down(model, state)
    seconds = broken.product_seconds + broken.memory_seconds
    for op in range(len(program.ops)):
        if seconds[op] > 0:
            terms = {name: float(of[op]) for name, of in broken.term_seconds.items() if of[op]}
            yield op, float(seconds[op]), terms


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("plan")
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--most", type=int, default=25)
    options = parser.parse_args()
    if options.seed % 2:
        parser.error(
            f"seed {options.seed}: programs with odd seeds are held out; examine even ones"
        )
    tables = [strangers.TABLE, strangers.DEEP, strangers.ENGINEERS]
    known = [row for table in tables for row in strangers.read(table)]
    rows = {row.plan: row for row in known if row.seed == options.seed}
    if options.plan not in rows:
        parser.error(
            f"no plan {options.plan!r}; seed {options.seed} has {', '.join(rows) or 'none'}"
        )
    stranger = strangers.program_of(options.seed)
    model = strangers.models_of(stranger, "xla")[1]
    program = model.space.analysis.program
    state = strangers.unpacked(rows[options.plan].state, model.space.initial)
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or options.keep or pathlib.Path(folder) / "scheduled.txt"
        if not options.text:
            shardings = shardings_of(model, state)
            verdict = judge(program, shardings, model.hardware, full=True, keep=text)
            if verdict.out_of_memory:
                parser.error(
                    f"{options.plan} of seed {options.seed} does not fit: nothing to examine"
                )
        scheduled = [*kernels(Module.parse(text.read_text()), CLOCK_HZ[stranger.hardware])]
    places: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    alike: dict[tuple[str, ...], list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for kernel in scheduled:
        where, spent = place(kernel.path), kernel.runs * kernel.seconds
        places[where][0] += spent
        key = (kernel.opcode, re.sub(r"S\(\d\)", "", kernel.type)[:100], where)
        for index, amount in enumerate((spent, kernel.runs, 1)):
            alike[key][index] += amount
    ops: list[tuple[float, str]] = []
    for op, seconds, terms in priced_ops(program, model, state):
        where = place(program.location(op).path)
        places[where][1] += seconds
        types = [str(program.values[value].type) for value in program.ops[op].results[:1]]
        parts = ", ".join(f"{name} {1e3 * s:.3f}" for name, s in terms.items())
        what = f"{program.repeats[op]:5d} x {program.kind(op)} {' '.join(types)} {where}: {parts}"
        ops.append((seconds, what))
    total = [sum(of[side] for of in places.values()) for side in (0, 1)]
    print(f"kernels: XLA {1e3 * total[0]:.3f} ms, TOAST {1e3 * total[1]:.3f} ms")
    print("\nplaces: TOAST less XLA; XLA; TOAST")
    both = [
        (t - x, f"{1e3 * x:10.3f} {1e3 * t:10.3f}  {where}") for where, (x, t) in places.items()
    ]
    print(table(both, options.most))
    print("\nXLA's kernels: time; runs; different kernels")
    alike_rows = [
        (spent, f"{runs:8.0f} runs, {number:4.0f} kernels  {' '.join(key)}")
        for key, (spent, runs, number) in alike.items()
    ]
    print(table(alike_rows, options.most))
    print("\nTOAST's ops: time; runs; terms in ms")
    print(table(ops, options.most))


if __name__ == "__main__":
    main()
