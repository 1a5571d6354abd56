"""Measure the stages of ``toast plan t2b``, and compare pricing with Shardy's propagation.

    python benchmarks/pipeline.py [--layers 18] [--mesh data=4,model=4] [--hardware tpu-v5e]

Everything runs in one process, so the ratios are comparable between machines.  The script compares
the number of states priced per second with one propagation of the same module by Shardy.  A search
that propagates after every action pays one propagation per state.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import sys
import time
from collections.abc import Callable

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast import api
from toast.apply import annotate
from toast.cli.elapsed import elapsed
from toast.cost import CostModel, Memo
from toast.facts import Relations
from toast.frontend import mlir
from toast.hardware import Mesh, load
from toast.models import build
from toast.program import Shardings
from toast.space import Scope, Space, States


def states_to_price(model: CostModel, most: int) -> States:
    """At most ``most`` distinct states after one or two actions, ``[states, classes, axes]``."""
    space = model.space
    every = range(len(space.actions))
    children = space.apply_each(space.initial, every)
    grandchildren = [space.apply_each(child, every) for child in children]
    return np.unique(np.concatenate([children, *grandchildren]), axis=0)[:most]


def changes_to_price(model: CostModel, state: States) -> States:
    """Single changes of a plan, as a local search tries them, ``[states, classes, axes]``.

    They change colors, parts of colors, and the op classes with the longest times.
    """
    space, seconds = model.space, model.waiting(state)
    hottest = np.argsort(-seconds, kind="stable")[:24]
    classes = space.refinements.rows(Scope.CLASS, hottest)
    rows = np.concatenate([space.parts_by(seconds)[:256], classes])
    _, refined = space.refine(state, rows)
    return np.concatenate([space.apply_each(state, range(len(space.actions))), refined])


def _rate(
    begin: Callable[[], Callable[[States], object]],
    states: States,
    batch: int,
    seconds: float = 2.0,
) -> float:
    """States priced per second.  Each pass over the states uses a new function from ``begin``."""
    priced, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        price = begin()
        for first in range(0, len(states), batch):
            part = states[first : first + batch]
            price(part)
            priced += len(part)
    return priced / (time.perf_counter() - start)


def propagation_seconds(plan: toast.Plan) -> float:
    """Seconds of one run of Shardy's propagation from the plan's argument shardings."""
    program = plan.analysis.program
    arguments = {v: plan.shardings.of(program, v) for v in program.argument_values}
    bare = Shardings(plan.mesh, arguments, {}, plan.shardings.results)
    module = annotate(program, bare)
    mlir.forget_shardings_of_ops(module)
    begin = time.perf_counter()
    mlir.run_passes(module, "builtin.module(sdy-propagation-pipeline)")
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--mesh", default="data=4,model=4")
    parser.add_argument("--hardware", default="tpu-v5e")
    options = parser.parse_args()

    with elapsed() as show:
        report(options, show)


def report(options: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Measure and print all stages; ``show`` shows which of them runs."""
    show("lowering")
    begin = time.perf_counter()
    program = api.program_of(build("t2b", layers=options.layers))
    lowering = time.perf_counter() - begin
    begin = time.perf_counter()
    relations = Relations(program)
    for name in ("op", "operand", "result", "value", "dim", "argument"):
        getattr(relations, name)
    facts = time.perf_counter() - begin
    show("analysis")
    begin = time.perf_counter()
    analysis = toast.analyze(program, cache=False)
    analyzing = time.perf_counter() - begin
    show("search")
    begin = time.perf_counter()
    plan = toast.plan(analysis, mesh=options.mesh, hardware=options.hardware)
    planning = time.perf_counter() - begin
    begin = time.perf_counter()
    analysis.explain("params.layers[0].wq:0", f"params.layers[{options.layers - 1}].wo:2")
    chain = time.perf_counter() - begin
    begin = time.perf_counter()
    analysis.explain_conflict(len(analysis.resolutions) - 1)
    conflict = time.perf_counter() - begin

    rows = [("lowering", lowering), ("facts as DataFrames", facts)]
    rows += [(name, spent) for name, spent in analysis.seconds.items() if name != "lowering"]
    rows += [(name, plan.seconds[name]) for name in ("decision space", "search")]
    print(f"t2b, {options.layers} layers, mesh {options.mesh}, {options.hardware}")
    print(f"{len(program.ops)} ops, {analysis.counts()['names']} names\n")
    for name, spent in rows:
        print(f"{name:28s} {spent:8.3f} s")
    print(f"{'facts + rules + analysis':28s} {facts + analyzing:8.3f} s   (at most 3)")
    print(f"{'whole plan, no lowering':28s} {analyzing + planning:8.3f} s   (at most 20)")
    print(f"{'explain two dimensions':28s} {chain:8.3f} s   (at most 1)")
    print(f"{'explain a conflict':28s} {conflict:8.3f} s   (at most 1)\n")

    show("rates")
    model = CostModel(Space(analysis, Mesh.parse(options.mesh)), load(options.hardware))
    propagation = propagation_seconds(plan)
    print(f"{'Shardy propagation':28s} {propagation:8.3f} s")
    states, changes = states_to_price(model, 2048), changes_to_price(model, plan.state)
    for what, rate in (
        *(
            (f"batches of {n}", _rate(lambda: model.price, states[: 4 * n], n))
            for n in (1, 32, 256)
        ),
        ("by parts, batches of 256", _rate(lambda: Memo(model).price, states, 256)),
        ("changes of the plan, by parts", _rate(lambda: Memo(model).price, changes, 256)),
    ):
        print(
            f"{what:32}{rate:8.0f} states/s  "
            f"{rate * propagation:8.0f} states per Shardy propagation"
        )
    rate = plan.states / plan.seconds["search"]
    print(f"{'the search':32}{rate:8.0f} states/s  ({plan.states} states)")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{'peak RSS':28s} {peak:8.2f} GiB")


if __name__ == "__main__":
    main()
