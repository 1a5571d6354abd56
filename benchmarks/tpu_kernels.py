"""Times of single kernels: the estimates of XLA's TPU compiler, and TOAST's predictions.

    python benchmarks/tpu_kernels.py [--hardware tpu-v5e,tpu-v6e]
        [--fit | --convolutions [whole | depthwise | groups]]

For each kind of TPU, libtpu compiles one module with independent kernels, without a TPU, in some
minutes.  It estimates the cycles of every kernel; named scopes tell which is which.  The script
prints the compiler's time, TOAST's prediction and their ratio, and the errors by kind of kernel.

``[tile]``, ``product_latency_s`` and ``[efficiency]`` of the files of TPUs v4, v5e, v5p and v6e
were fitted to such estimates.  ``--fit`` fits them again, to every second kernel of each kind, and
prints keys of the hardware file and the errors of both halves; the other half is held out.

* ``LISTED`` has sizes of layers of open models, and round numbers.  The files were fitted to most
  of them.  The sizes of ``drawn`` are random, and the files do not know them.
* ``efficiency.matmul`` of v6e is not the fitted one.  It is 0.67, fitted to published steps
  (docs/fidelity.md), and stands for what slows whole steps below the compiler's estimates.
* ``--convolutions`` compiles random convolutions of images and their gradients instead, of all
  features, of each one, or of groups.  Copies that change layouts before and after them do not
  count.
* XLA moves some operands into fast memory beside earlier kernels.  The time of their kernel lacks
  the move: they have a row of their own, and the fit leaves out the bytes of such operands.
* The compiler's estimates of kernels of one op are longer than those of fusions.  Programs have few
  of them.  ``efficiency.memory`` is fitted to float32 fusions that move ``LARGE`` bytes or more.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cli.elapsed import steps
from toast.cost import CostModel
from toast.cost.tables import Tables
from toast.evaluation.oracle import judge
from toast.evaluation.oracle.hlo import Module
from toast.evaluation.oracle.schedule import CLOCK_HZ
from toast.hardware import Hardware, Mesh, load
from toast.plan.shard import shardings_of
from toast.space import Space

Floats = npt.NDArray[np.float64]

MESH = Mesh.parse("replica=4")  # a small slice; all devices compute the same
ORDER = 3.0  # of the norm that joins computing, storing and moving; not fitted
LARGE = 2**25

#: Rows, depth and columns, after the number of products in a batch.
LISTED = """
    4096x4096x14336 4096x14336x4096 8192x4096x1024 8192x8192x8192 16384x2048x2048
    4096x1024x28672 2048x5120x5120 1024x4096x4096 4096x4096x1024 4096x512x4096 4096x256x4096
    4096x128x4096 512x4096x512 1024x8192x1024 256x1024x256 2048x2048x512 8192x512x512
    32768x1024x1024 16384x768x3072 16384x3072x768 4096x768x768 128x4096x4096 16x4096x4096
    32x8192x1024 768x16384x3072 3072x16384x768 4096x8192x4096 2048x1024x50304 300x700x900
    1000x1000x1000 4096x4096x4096 2048x2048x2048 1024x1024x1024 8192x1024x4096 512x8192x512
    8x4096x14336 64x4096x4096 256x4096x4096 1024x16384x1024
""".split()  # noqa: SIM905
BATCHES = """
    16x2048x128x2048 16x2048x2048x128 64x512x64x512 64x512x512x64 128x128x64x1024
    8x4096x128x4096 32x16x128x2048 256x256x256x256 32x1024x128x1024 32x1024x1024x128
    32x1024x64x1024 64x8x128x4096
""".split()  # noqa: SIM905
VECTORS = "64x1x128x4096", "256x1x128x4096"


class Kernel(NamedTuple):
    """A function that XLA compiles to one kernel."""

    kind: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def kernel(kind: str, name: str, function: Callable[..., Any], number: int, *shape: Any) -> Kernel:
    """A kernel of ``number`` arrays of ``shape``: sizes, and the element type."""
    return Kernel(kind, name, function, (jax.ShapeDtypeStruct(shape[:-1], shape[-1]),) * number)


def product(kind: str, dtype: str, size: str) -> Kernel:
    """A product of ``size``: products in a batch (if four numbers), rows, depth and columns."""
    *batch, rows, depth, columns = map(int, size.split("x"))
    left, right = (*batch, rows, depth), (*batch, depth, columns)
    arguments = jax.ShapeDtypeStruct(left, dtype), jax.ShapeDtypeStruct(right, dtype)
    return Kernel(kind, size, jnp.matmul, arguments)


def drawn(number: int = 48, seed: int = 0) -> Iterator[Kernel]:
    """Random products of 1e8 to 1e12 FLOPs; half of the sizes are ragged."""
    random = np.random.default_rng(seed)
    while number:
        ragged = random.random() < 0.5
        rows, depth, columns = (
            int(2 ** random.uniform(low, 14) if ragged else 2 ** random.integers(low, 15))
            for low in (3, 6, 6)
        )
        form, batch = random.integers(4), int(2 ** random.integers(1, 7))
        batch, dtype = (batch if form == 0 else 1), ("float32" if form == 1 else "bfloat16")
        elements = batch * (rows * depth + depth * columns + rows * columns)
        if not 1e8 < 2 * batch * rows * depth * columns < 1e12 or elements * 4 > 2**28:
            continue
        number -= 1
        kind = "batch" if batch > 1 else "f32" if form == 1 else "bf16"
        size = f"{batch}x" * (batch > 1) + f"{rows}x{depth}x{columns}"
        yield product(f"product, {kind}, drawn", dtype, size)


def convolved(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=images.shape[-1] // kernel.shape[-2],
    )  # fmt: skip


def convolutions(form: str = "whole", number: int = 24, seed: int = 0) -> Iterator[Kernel]:
    """Random convolutions, and the gradients of their images and kernels.

    Each result sums over all features (``whole``) of windows of 3x3, over one feature
    (``depthwise``) or over those of a group (``groups``) of windows of 3x3 to 7x7.
    """
    random = np.random.default_rng(seed)
    while number:
        images, pixels = int(random.integers(8, 256)), int(random.choice([14, 28, 32, 56, 64]))
        features = int(random.choice([64, 96, 128, 192, 256]))
        dtype, out = (
            str(random.choice(["bfloat16", "float32"])),
            features * int(random.integers(1, 3)),
        )
        group, window = features, 3
        if form != "whole":
            group = 1 if form == "depthwise" else int(random.choice([8, 16, 32]))
            window, out = int(random.choice([3, 5, 7])), features
        if not 2**20 < images * pixels**2 * out < 2**26:
            continue
        number -= 1
        before, after, kernel = (
            jax.ShapeDtypeStruct(shape, dtype) for shape in (
                (images, pixels, pixels, features), (images, pixels, pixels, out),
                (window, window, group, out),
            )
        )  # fmt: skip
        name = f"{images}x{pixels}x{pixels}x{features} to {out}, {dtype}"
        if form != "whole":
            name += f", {window}x{window}, groups of {group}"
        yield Kernel("convolution", name, convolved, (before, kernel))

        def of_images(g: Any, k: Any, x: Any = before) -> Any:
            return jax.linear_transpose(lambda x: convolved(x, k), x)(g)[0]

        def of_kernel(g: Any, x: Any, k: Any = kernel) -> Any:
            return jax.linear_transpose(lambda k: convolved(x, k), k)(g)[0]

        yield Kernel("convolution, gradient of images", name, of_images, (after, kernel))
        yield Kernel("convolution, gradient of kernel", name, of_kernel, (after, before))


def adam(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    first, second = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second


def elementwise(kind: str, *shape: Any) -> list[Kernel]:
    return [
        kernel(kind, "scale", lambda x: x * 3, 1, *shape),
        kernel(kind, "update", lambda w, g: w - 0.1 * g, 2, *shape),
        kernel(kind, "gate", lambda x, y, z: jnp.maximum(x * y + z, 0), 3, *shape),
    ]


def all_kernels() -> list[Kernel]:
    """All kernels, in the order of the module."""
    square, long = (4096, 4096, "float32"), (8192, 4096, "float32")
    wide, small = (4096, 8192, "bfloat16"), (512, 1024, "float32")
    return [
        *(product("product, bf16", "bfloat16", size) for size in LISTED),
        *(product("product, f32", "float32", size) for size in LISTED[::4]),
        *(product("product, batch", "bfloat16", size) for size in BATCHES),
        *(product("vectors", "bfloat16", size) for size in VECTORS),
        *drawn(),
        *elementwise("fused, f32", *square),
        kernel("fused, f32", "adam", adam, 4, *square),
        *elementwise("fused, f32", *long)[:2],
        kernel("fused, f32, small", "adam", adam, 4, *small),
        *elementwise("fused, f32, small", *small)[1:2],
        *elementwise("fused, bf16", *wide),
        kernel("one op", "add f32", jnp.add, 2, *square),
        kernel("one op", "add bf16", jnp.add, 2, *wide),
        kernel("one op", "round", lambda x: x.astype("bfloat16"), 1, *square),
        kernel("one op", "sum of rows", lambda x: x.sum(-1), 1, *long),
        kernel("fused reduction", "squares of rows", lambda x: (x * x).sum(-1), 1, *long),
        kernel("fused reduction", "squares of columns", lambda x: (x * x).sum(0), 1, *long),
        kernel("exponentials", "softmax", jax.nn.softmax, 1, 32, 1024, 1024, "float32"),
        kernel("exponentials", "gelu", jax.nn.gelu, 1, *wide),
    ]


def compiled(
    hardware: Hardware, kernels: Sequence[Kernel], folder: pathlib.Path
) -> tuple[Floats, Floats]:
    """``[K]`` seconds of each kernel by the compiler, and bytes of operands in fast memory."""

    def program(*groups: Any) -> list[Any]:
        results = []
        for number, (kernel, group) in enumerate(zip(kernels, groups, strict=True)):
            with jax.named_scope(f"kernel_{number}_"):
                results.append(kernel.function(*group))
        return results

    arguments = [kernel.arguments for kernel in kernels]
    content = hashlib.sha256(str(jax.make_jaxpr(program)(*arguments)).encode()).hexdigest()[:12]
    version = importlib.metadata.version("libtpu")
    kept = folder / f"{hardware.name}-libtpu-{version}-{content}.txt"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        analysis = toast.analyze(program, *arguments, platform="tpu")
        model = CostModel(Space(analysis, MESH), hardware)
        shardings = shardings_of(model, model.space.unsharded)
        judge(analysis.program, shardings, hardware, full=True, timeout=1800, keep=kept)
    module = Module.parse(kept.read_text())
    cycles, fast = np.zeros(len(kernels) + 1), np.zeros(len(kernels) + 1)
    defined = {i.name: i for i in module.computations[module.entry]}
    for instruction in defined.values():
        scope = re.search(r"\bkernel_(\d+)_", instruction.line)
        number = int(scope[1]) if scope else -1
        if number >= 0 and kernels[number].kind.startswith("convolution"):
            called = [i for name in instruction.called for i in module.computations.get(name, ())]
            if "convolution" not in {i.opcode for i in (instruction, *called)}:
                continue
        cycles[number] += instruction.cycles
        operands = [defined[name] for name in instruction.operands if name in defined]
        if instruction.cycles:
            fast[number] += sum(o.result_bytes for o in operands if "S(1)" in o.type)
    print(f"\n{hardware.name}: {cycles[-1] / cycles.sum():.1%} of all cycles belong to no kernel")
    return cycles[:-1] / CLOCK_HZ[hardware.name], fast[:-1]


#: Keys of the hardware file with first guess, lower and upper bound.
FIGURES = {
    "efficiency.matmul": (0.9, 0.4, 1.0), "tile.results_per_s": (1.2e11, 1e10, 1e13),
    "tile.window_bytes": (2e6, 1e3, 4e7), "tile.memory": (0.7, 0.3, 1.0),
    "product_latency_s": (1e-6, 1e-8, 5e-6), "flops_per_s.f32 over bf16": (0.7, 0.3, 2.0),
}  # fmt: skip


def with_figures(hardware: Hardware, figures: Floats) -> Hardware:
    """The hardware with these values of ``FIGURES``."""
    matmul, results, window, memory, latency, f32 = figures.tolist()
    products = dataclasses.replace(
        hardware.products, results_per_s=results, window_bytes=window, order=ORDER,
        memory_share=memory / hardware.memory_efficiency,
    )  # fmt: skip
    flops = {**hardware.flops_per_s, "f32": f32 * hardware.flops_per_s["bf16"]}
    return dataclasses.replace(
        hardware, matmul_efficiency=matmul, products=products, product_latency_s=latency,
        flops_per_s=flops,
    )  # fmt: skip


def product_seconds(hardware: Hardware, tables: Sequence[Tables], fast: Floats) -> Floats:
    """``[P]`` seconds of products without moves of ``fast`` bytes: those of ``ProductWork``."""
    size = np.array([t.products.size[0] for t in tables])
    peaks = [hardware.peak(t.dtypes[t.ops.dtype[t.products.op_class[0]]]) for t in tables]
    moved = np.array([t.tensors.bytes.sum() for t in tables])
    moved = np.maximum(moved - fast, moved / 10)
    stored, rate = size[:, 0] * size[:, 1] * size[:, 3], hardware.memory_bytes_per_s
    at_peak = 2 * size.prod(axis=1) / np.array(peaks)
    computing = hardware.products.seconds(size, at_peak, rate)
    seconds = hardware.products.kernel_seconds(computing, stored, moved, np.ones(len(size)), rate)
    return np.asarray(seconds + hardware.product_latency_s)


def head(*names: str) -> str:
    return f"\n| {' | '.join(names)} |\n| --- {'| ---: ' * (len(names) - 1)}|"


def row(name: str, ratio: Floats) -> str:
    """The errors of predictions, from their ratios to the compiler's times."""
    off = np.abs(ratio - 1) if len(ratio) else np.array([np.nan])
    middle = np.median(ratio) if len(ratio) else np.nan
    return f"| {name} | {len(ratio)} | {off.mean():.0%} | {off.max():.0%} | {middle:.2f} |"


ERRORS = head("kernels", "number", "mean error", "worst", "median ratio")


def report_fit(models: Sequence[CostModel], kinds: list[str], known: Floats, fast: Floats) -> None:
    """Fit the figures to every second kernel of each kind; print them, and the errors of all."""
    file = models[0].hardware
    second = np.array([kinds[:i].count(kind) % 2 for i, kind in enumerate(kinds)])
    products = np.array([kind.startswith("product") for kind in kinds])
    f32 = np.array([", f32" in kind for kind in kinds])
    ratio = np.array([model.initial_seconds for model in models]) / known
    fused = f32 & ~products & (fast == 0) & (ratio * known * file.memory_bytes_per_s > LARGE)
    share = np.exp(np.log(ratio[fused & (second == 0)]).mean())

    def ratios(hardware: Hardware, here: npt.NDArray[np.bool_]) -> Floats:
        tables = [models[i].tables for i in np.flatnonzero(here).tolist()]
        return product_seconds(hardware, tables, fast[here]) / known[here]

    def residuals(x: Floats) -> Floats:
        return np.log(ratios(with_figures(file, np.exp(x)), products & (second == 0)))

    guess, low, high = np.log(np.array(list(FIGURES.values()))).T
    found = least_squares(residuals, guess, bounds=(low, high), loss="soft_l1", f_scale=0.1).x
    print(f"\nfitted to {sum(products & (second == 0))} products and the fused kernels:\n")
    for key, figure in zip(FIGURES, np.exp(found), strict=True):
        print(f"    {key} = {figure:.3g}")
    print(f"    efficiency.memory = {file.memory_efficiency * share:.3g}\n{ERRORS}")
    for half, name in enumerate(("fitted", "held out")):
        for form, here in ("bf16 products", products & ~f32), ("f32 products", products & f32):
            here = here & (second == half)
            print(row(f"{form}, {name}, fit", ratios(with_figures(file, np.exp(found)), here)))
            print(row(f"{form}, {name}, file", ratios(file, here)))
        print(row(f"fused f32, {name}, fit", ratio[fused & (second == half)] / share))
        print(row(f"fused f32, {name}, file", ratio[fused & (second == half)]))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hardware", default=",".join(CLOCK_HZ), help="kinds, with commas")
    parser.add_argument("--folder", default="~/.cache/toast/kernels", help="of compiled modules")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--fit", action="store_true", help="fit the figures of hardware files")
    form.add_argument(
        "--convolutions", nargs="?", const="whole", choices=["whole", "depthwise", "groups"],
        help="compile convolutions instead",
    )  # fmt: skip
    options = parser.parse_args()
    every = [*convolutions(options.convolutions)] if options.convolutions else all_kernels()
    folder = pathlib.Path(options.folder).expanduser()
    spaces = [Space(toast.analyze(k.function, *k.arguments, platform="tpu"), MESH) for k in every]
    for hardware in map(load, steps(options.hardware.split(","))):
        seconds, fast = compiled(hardware, every, folder)
        # Some kernels have no estimate under their name, on v6e two of the 130.
        known = np.flatnonzero(seconds).tolist()
        kernels, seconds, fast = [every[i] for i in known], seconds[known], fast[known]
        models = [CostModel(spaces[i], hardware) for i in known]
        predicted = np.array([model.initial_seconds for model in models])
        print(head("kernel", "compiler, us", "predicted, us", "ratio"))
        for k, one, other in zip(kernels, seconds * 1e6, predicted * 1e6, strict=True):
            print(f"| {k.kind}: {k.name} | {one:.4g} | {other:.4g} | {other / one:.2f} |")
        print(ERRORS)
        kinds = [k.kind for k in kernels]
        seen = np.where(fast > 0, "operand in fast memory", kinds)
        for kind in dict.fromkeys(seen.tolist()):
            print(row(kind, (predicted / seconds)[seen == kind]))
        if options.fit:
            report_fit(models, kinds, seconds, fast)


if __name__ == "__main__":
    main()
