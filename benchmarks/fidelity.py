"""Predictions against XLA's TPU compiler, over programs and meshes; writes docs/fidelity.md.

    python benchmarks/fidelity.py [--plans 6]

Needs libtpu, not a TPU. Verdicts are kept in ~/.cache/toast, so that a run that was broken off goes
on where it was. Takes a few minutes.
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

import toast
from toast.hardware import Mesh, load
from toast.models import ZOO, build
from toast.validate import Compared, validate

MESHES = ("data=4,model=4", "data=16", "data=2,model=2,x=2")
HARDWARE = "tpu-v5e"
#: Programs that are slow to compile, on the first mesh only.
LARGE = ("t2b, 2 layers", "t2b-scan, 2 layers")


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


def gathered(rows: Sequence[Compared]) -> float:
    """Share of plans whose all-gathers move within 10 % of the bytes of XLA's."""
    near = []
    for row in rows:
        assert row.verdict is not None
        ours = sum(c.bytes for c in row.predicted.collectives if c.kind == "all_gather")
        theirs = sum(c.bytes for c in row.verdict.collectives if c.kind == "all_gather")
        near.append(abs(ours - theirs) <= 0.1 * max(theirs, 2**20))
    return float(np.mean(near)) if near else np.nan


def figures(rows: Sequence[Compared]) -> str:
    errors = np.abs([row.peak_error for row in rows])
    exact = np.mean([abs(row.argument_error) < 1e-3 for row in rows])
    return (
        f"{len(rows)} | {np.median(errors):.1%} | {np.quantile(errors, 0.95):.1%} | {exact:.0%} | "
        f"{gathered(rows):.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=6)
    plans = parser.parse_args().plans
    every: list[Compared] = []
    lines = []
    refused = misjudged = 0
    for name, analysis in programs().items():
        rows: list[Compared] = []
        for mesh in MESHES:
            print(f"{name}, {mesh}", file=sys.stderr)
            found = validate(analysis, Mesh.parse(mesh), load(HARDWARE), plans=plans)
            rows += found.compiled
            refused += sum(r.verdict is not None and r.verdict.out_of_memory for r in found.rows)
            misjudged += len(found.misjudged())
        every += rows
        lines.append(f"| {name} | {figures(rows)} |")
        print(lines[-1])
    lines.append(f"| all | {figures(every)} |")
    print(lines[-1])
    versions = ", ".join(
        f"{p} {importlib.metadata.version(p)}" for p in ("jax", "jaxlib", "libtpu")
    )
    page = pathlib.Path(__file__).resolve().parent.parent / "docs" / "fidelity.md"
    text = page.read_text()
    begin, end = "<!-- figures -->\n", "<!-- end -->"
    table = (
        f"Made by `benchmarks/fidelity.py` with {versions}; meshes {', '.join(MESHES)} of "
        f"{HARDWARE}; the found plan, the unsharded program, single actions and random states.\n\n"
        "| program | plans that fit | peak: median error | 95th percentile | arguments exact | "
        "all-gathers within 10 % |\n| --- | --- | --- | --- | --- | --- |\n"
        + "\n".join(lines)
        + f"\n\nOut of memory, says XLA: {refused} more plans; {misjudged} of them seemed to fit "
        "with more than 10 % to spare.\n"
    )
    head, rest = text.split(begin)
    page.write_text(head + begin + table + end + rest.split(end)[1])


if __name__ == "__main__":
    main()
