"""Predictions and XLA's TPU compiler on several programs and meshes; writes docs/fidelity.md.

    python benchmarks/fidelity.py [--plans 6]

This needs libtpu, but no TPU.  It compiles about a hundred plans in full, which takes an hour.
Results are cached in ~/.cache/toast, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.evaluation.oracle.explicit import explicit_collectives
from toast.evaluation.validate import StateComparison, Validation, plot, states_to_compare, validate
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.plan.shard import shardings_of
from toast.space import Space

MESHES = ("data=4,model=4", "data=16", "data=2,model=2,x=2")
HARDWARE = "tpu-v5e"
#: Programs that are slow to compile; they use only the first mesh.
LARGE = ("t2b, 2 layers", "t2b-scan, 2 layers")
DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    def step(parameters: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    return step


def residual_mlp(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for up, down in parameters:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean((x - y) ** 2)


def convnet(parameters: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    *kernels, last = parameters
    for kernel in kernels:
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x)
    scores = jax.nn.log_softmax(x.mean((1, 2)) @ last)
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], 1))


def programs() -> dict[str, toast.Analysis]:
    half = jnp.bfloat16
    layers = [(shape(4096, 16384), shape(16384, 4096))] * 4
    kernels = [
        shape(3, 3, 64, 256, dtype=half), shape(3, 3, 256, 512, dtype=half),
        shape(3, 3, 512, 512, dtype=half), shape(512, 1024, dtype=half),
    ]  # fmt: skip
    images = shape(256, 64, 64, 64, dtype=half), shape(256, dtype=jnp.int32)
    return {
        "t2b, 1 layer": toast.analyze(build("t2b", layers=1)),
        "t2b, 2 layers": toast.analyze(build("t2b", layers=2)),
        "t2b-scan, 2 layers": toast.analyze(build("t2b-scan", layers=2)),
        "residual MLP": toast.analyze(
            trained(residual_mlp), layers, shape(8192, 4096), shape(8192, 4096), donate=(0,)
        ),
        "convnet": toast.analyze(trained(convnet), kernels, *images, donate=(0,)),
    }


def like_shardy(analysis: toast.Analysis, mesh: Mesh, plans: int) -> tuple[int, int]:
    """The number of plans with exactly Shardy's explicit collectives, and the number of plans."""
    model = CostModel(Space(analysis, mesh), load(HARDWARE))
    name = analysis.program.name
    strategies = ZOO[name].strategies if name in ZOO else {}
    equal = count = 0
    for _, state in states_to_compare(model, plans=plans, strategies=strategies):
        ours = model.reshards(state)
        theirs = explicit_collectives(analysis.program, shardings_of(model, state))
        equal += ours == theirs
        count += 1
    return equal, count


def figures(rows: Sequence[StateComparison]) -> str:
    found = Validation(tuple(rows), load(HARDWARE).memory_limit_bytes)
    (peak, worst, _), (time, slowest, _) = found.peak_errors(), found.time_errors()
    squeezed = found.squeezed()
    rest = Validation(tuple(row for row in rows if row not in squeezed), found.memory_bytes)
    _, high, _ = rest.peak_errors()
    exact = np.mean([abs(row.argument_error) < 1e-3 for row in rows])
    outputs = np.mean([abs(row.output_error) < 1e-3 for row in rows])
    near = np.mean([abs(row.sent_error) <= 0.1 for row in rows])
    return (
        f"{len(rows)} | {peak:.1%} | {worst:.1%} | {len(squeezed)} | {high:.1%} | {exact:.0%} | "
        f"{outputs:.0%} | {near:.0%} | {time:.0%} | {slowest:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=6)
    plans = parser.parse_args().plans
    every: list[StateComparison] = []
    groups: list[Validation] = []
    lines = []
    taus = []
    refused = misjudged = equal = explicit = 0
    every_program = programs()
    for name in steps(every_program):
        analysis = every_program[name]
        rows: list[StateComparison] = []
        strategies = ZOO["t2b"].strategies if name.startswith("t2b") else {}
        for text in MESHES[:1] if name in LARGE else MESHES:
            mesh = Mesh.parse(text)
            found = validate(
                analysis, mesh, load(HARDWARE), plans=plans, strategies=strategies, full=True
            )
            groups.append(found)
            agree, pairs = found.pairs()
            taus.append(
                f"| {name} | {text} | {len(found.compiled)} | {pairs} | {found.tau():.2f} |"
            )
            rows += found.compiled
            refused += sum(r.verdict is not None and r.verdict.out_of_memory for r in found.rows)
            misjudged += len(found.misjudged())
            if name != "t2b-scan, 2 layers":  # Shardy's text has each layer once
                same, all_plans = like_shardy(analysis, mesh, plans)
                equal, explicit = equal + same, explicit + all_plans
        every += rows
        lines.append(f"| {name} | {figures(rows)} |")
        print(lines[-1], flush=True)
    lines.append(f"| all | {figures(every)} |")
    print(lines[-1], *taus, sep="\n")
    counted = [found.pairs() for found in groups]
    agree, pairs = (sum(column) for column in zip(*counted, strict=True))
    versions = ", ".join(
        f"{p} {importlib.metadata.version(p)}" for p in ("jax", "jaxlib", "libtpu")
    )
    text = (
        f"Written by `benchmarks/fidelity.py` with {versions}, for {HARDWARE}. The plans are "
        "TOAST's plan, the unsharded program, expert strategies (t2b), single actions and random "
        "states.\n\n"
        "| program | plans that fit | peak: median error | 95th percentile | squeezed | "
        "95th percentile of the others | arguments exact | outputs exact | "
        "bytes sent within 10 % | step: median error | 95th percentile |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        + "\n".join(lines)
        + f"\n\nFor {refused} more plans, XLA runs out of memory; we predicted for {misjudged} of "
        "them that they fit with more than 10 % to spare. A plan is *squeezed* if we predict more "
        "memory than a device has and XLA makes it fit by recomputing values.\n\n"
        "The collectives (kind, axes, bytes, number) are exactly those of Shardy's explicit "
        f"reshards in {equal} of {explicit} plans (the scanned program is not counted).\n\n"
        "Order of step times (Kendall's tau; pairs within 15 % of each other are ties):\n\n"
        "| program | mesh | plans | pairs | tau |\n| --- | --- | --- | --- | --- |\n"
        + "\n".join(taus)
        + "\n\nTau over all pairs of plans of the same program and mesh: "
        f"{(2 * agree - pairs) / pairs:.2f} ({pairs} pairs).\n\n"
        "![Predictions over XLA's values](fidelity.svg)\n"
    )
    page = DOCS / "fidelity.md"
    head, rest = page.read_text().split("<!-- figures -->\n")
    page.write_text(
        head + "<!-- figures -->\n" + text + "<!-- end -->" + rest.split("<!-- end -->")[1]
    )
    (DOCS / "fidelity.svg").write_text(plot(Validation(tuple(every), 0.0)))


if __name__ == "__main__":
    main()
