"""Times of single kernels: the estimates of XLA's TPU compiler, and TOAST's predictions.

    python benchmarks/tpu_kernels.py [--hardware tpu-v5e,tpu-v6e] [--summary] [--fit]

This needs libtpu, but no TPU.  For each kind of TPU, it compiles one module with independent
kernels: matrix products and batches of them, elementwise kernels, reductions, and exponentials.
The compiler estimates the cycles of every kernel; named scopes tell which kernels belong together.
The script prints the compiler's time of each kernel, TOAST's prediction with the hardware file, and
their ratio; then the errors by kind.  ``--summary`` prints only the errors.  A module takes one or
two minutes to compile; its text is kept in ``--folder``, and is compiled again only if the kernels
or libtpu change.

``[tile]``, ``product_latency_s`` and ``[efficiency]`` of the files of TPUs v4, v5e, v5p and v6e
were fitted to such estimates.  ``--fit`` fits them again, to every second product of each kind, and
to every second elementwise kernel.  It prints the keys of the hardware file, and the errors of
products of both halves.  The half that was not fitted to is held out.

* The products in ``LISTED`` have the sizes of layers of open models, and round numbers.  The files
  were fitted to most of them.  Those in ``drawn()`` are random, and the files do not know them.
* The order of the norm that joins the times of computing, storing and moving is 3 for all.
* ``efficiency.matmul`` of v6e is not fitted here.  It is 0.63, fitted to published steps
  (docs/fidelity.md), and stands for what slows whole steps below the compiler's estimates.  So
  predictions with the file of v6e are longer than these estimates, and ``--fit`` finds more.
* Products of vectors run on the vector unit, so that no figure of the fit describes them.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import importlib.metadata
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import toast
from toast.cost import CostModel
from toast.evaluation.oracle import judge
from toast.evaluation.oracle.hlo import Module
from toast.evaluation.oracle.schedule import CLOCK_HZ
from toast.hardware import Hardware, Mesh, load
from toast.plan.shard import shardings_of
from toast.space import Space

Floats = npt.NDArray[np.float64]

#: The smallest slice of each kind; all devices compute the same.
MESH = "replica=4"
ORDER = 3.0
#: Products of these kinds are fitted to.
FITTED = ("product bf16", "product f32", "batch", "drawn product bf16", "drawn product f32",
          "drawn batch")  # fmt: skip
#: Elementwise kernels with fewer bytes do not tell the rate of memory.
LARGE = 2**25

#: Rows, depth and columns.
LISTED = (
    (4096, 4096, 14336), (4096, 14336, 4096), (8192, 4096, 1024), (8192, 8192, 8192),
    (16384, 2048, 2048), (4096, 1024, 28672), (2048, 5120, 5120), (1024, 4096, 4096),
    (4096, 4096, 1024), (4096, 512, 4096), (4096, 256, 4096), (4096, 128, 4096), (512, 4096, 512),
    (1024, 8192, 1024), (256, 1024, 256), (2048, 2048, 512), (8192, 512, 512), (32768, 1024, 1024),
    (16384, 768, 3072), (16384, 3072, 768), (4096, 768, 768), (128, 4096, 4096), (16, 4096, 4096),
    (32, 8192, 1024), (768, 16384, 3072), (3072, 16384, 768), (4096, 8192, 4096),
    (2048, 1024, 50304), (300, 700, 900), (1000, 1000, 1000), (4096, 4096, 4096),
    (2048, 2048, 2048), (1024, 1024, 1024), (8192, 1024, 4096), (512, 8192, 512), (8, 4096, 14336),
    (64, 4096, 4096), (256, 4096, 4096), (1024, 16384, 1024),
)  # fmt: skip
#: Products, and rows, depth and columns of each.
LISTED_BATCHES = (
    (16, 2048, 128, 2048), (16, 2048, 2048, 128), (64, 512, 64, 512), (64, 512, 512, 64),
    (128, 128, 64, 1024), (8, 4096, 128, 4096), (32, 16, 128, 2048), (256, 256, 256, 256),
    (32, 1024, 128, 1024), (32, 1024, 1024, 128), (32, 1024, 64, 1024), (64, 8, 128, 4096),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    kind: str
    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


def product(kind: str, dtype: str, *size: int) -> Kernel:
    """A product of ``size``: products in a batch (if four numbers), rows, depth and columns."""
    *batch, rows, depth, columns = size
    shapes = (*batch, rows, depth), (*batch, depth, columns)
    arguments = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return Kernel("x".join(map(str, size)), kind, jnp.matmul, arguments)


def drawn(number: int = 48, seed: int = 0) -> Iterator[Kernel]:
    """Random products of 1e8 to 1e12 FLOPs and up to 256 MiB; half of the sizes are ragged."""
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
        if batch > 1:
            yield product("drawn batch", dtype, batch, rows, depth, columns)
        else:
            short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
            yield product(f"drawn product {short}", dtype, rows, depth, columns)


def adam(p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    first, second = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second


def normalized(x: Any, gain: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * gain


def memory_bound() -> Iterator[Kernel]:
    """Elementwise kernels, reductions, and kernels with exponentials."""

    def kernel(name: str, kind: str, function: Callable[..., Any], *shapes: Any) -> Kernel:
        arguments = (jax.ShapeDtypeStruct(shape, dtype) for *shape, dtype in shapes)
        return Kernel(name, kind, function, tuple(arguments))

    wide, long = (4096, 8192, "bfloat16"), (8192, 4096, "float32")
    square = (4096, 4096, "float32")
    yield kernel("add f32", "elementwise", jnp.add, square, square)
    yield kernel("add bf16", "elementwise", jnp.add, wide, wide)
    yield kernel("scale", "elementwise", lambda x: x * 3, square)
    yield kernel("round", "elementwise", lambda x: x.astype("bfloat16"), square)
    yield kernel("adam", "elementwise", adam, *[square] * 4)
    yield kernel("fused", "elementwise", lambda x, y, z: jnp.maximum(x * y + z, 0), *[wide] * 3)
    yield kernel("adam, small", "elementwise", adam, *[(2048, 1024, "float32")] * 4)
    yield kernel("add f32, small", "elementwise", jnp.add, *[(256, 1024, "float32")] * 2)
    yield kernel("sum of rows", "reduction", lambda x: x.sum(-1), long)
    yield kernel("sum of columns", "reduction", lambda x: x.sum(0), long)
    yield kernel("layer norm", "reduction", normalized, (8192, 4096, "bfloat16"),
                 (4096, "bfloat16"))  # fmt: skip
    yield kernel("softmax", "exponentials", jax.nn.softmax, (32, 1024, 1024, "float32"))
    yield kernel("gelu", "exponentials", jax.nn.gelu, wide)


def all_kernels() -> list[Kernel]:
    """All kernels, in the order of the module."""
    return [
        *(product("product bf16", "bfloat16", *size) for size in LISTED),
        *(product("product f32", "float32", *size) for size in LISTED[::4]),
        *(product("batch", "bfloat16", *size) for size in LISTED_BATCHES),
        *(product("products of vectors", "bfloat16", b, 1, 128, 4096) for b in (64, 256)),
        *drawn(),
        *memory_bound(),
    ]


def compiled_seconds(hardware: Hardware, kernels: Sequence[Kernel], folder: pathlib.Path) -> Floats:
    """``[K]`` seconds of each kernel, from the compiler's estimated cycles."""

    def program(*groups: Any) -> list[Any]:
        results = []
        for number, (kernel, group) in enumerate(zip(kernels, groups, strict=True)):
            with jax.named_scope(f"kernel_{number}_"):
                results.append(kernel.function(*group))
        return results

    version = importlib.metadata.version("libtpu")
    content = hashlib.sha256(str(jax.make_jaxpr(program)(*(k.arguments for k in kernels))).encode())
    kept = folder / f"{hardware.name}-libtpu-{version}-{content.hexdigest()[:12]}.txt"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        analysis = toast.analyze(program, *(kernel.arguments for kernel in kernels), platform="tpu")
        model = CostModel(Space(analysis, Mesh.parse(MESH)), hardware)
        shardings = shardings_of(model, model.space.unsharded)
        judge(analysis.program, shardings, hardware, full=True, timeout=1800, keep=kept)
    module = Module.parse(kept.read_text())
    cycles: collections.Counter[int] = collections.Counter()

    def count(computation: str, times: int) -> None:
        for instruction in module.computations.get(computation, ()):
            if instruction.opcode == "while":
                trips = times * module.trips(instruction)
                count(instruction.attribute("body") or "", trips)
                continue
            scope = re.search(r"\bkernel_(\d+)_", instruction.line)
            cycles[int(scope[1]) if scope else -1] += times * instruction.cycles

    count(module.entry, 1)
    if other := cycles.pop(-1, 0):
        print(f"{hardware.name}: {other / (other + cycles.total()):.1%} of all cycles in no kernel")
    return np.array([cycles[number] for number in range(len(kernels))]) / CLOCK_HZ[hardware.name]


@dataclasses.dataclass(frozen=True)
class Products:
    """The work of one product per row, as :class:`toast.cost.terms.kernels.ProductWork` sees it."""

    size: Floats  # [P, 4] rows, columns, depth and products in a batch
    moved: Floats  # [P] bytes of operands and results
    f32: npt.NDArray[np.bool_]  # [P]

    def take(self, rows: npt.NDArray[np.bool_]) -> Products:
        return Products(self.size[rows], self.moved[rows], self.f32[rows])

    def seconds(self, hardware: Hardware) -> Floats:
        """``[P]`` predicted seconds."""
        prices, memory = hardware.products, hardware.memory_bytes_per_s
        peak = np.where(self.f32, hardware.peak("f32"), hardware.peak("bf16"))
        computing = prices.seconds(self.size, 2 * self.size.prod(axis=1) / peak, memory)
        stored, one = self.size[:, 0] * self.size[:, 1] * self.size[:, 3], np.ones(len(self.size))
        seconds = prices.kernel_seconds(computing, stored, self.moved, one, memory)
        return np.asarray(seconds + hardware.product_latency_s)


#: Fitted figures: keys of the hardware file, first guess, lower and upper bound.
FIGURES = {
    "efficiency.matmul": (0.9, 0.4, 1.0), "tile.results_per_s": (1.2e11, 1e10, 1e13),
    "tile.window_bytes": (2e6, 1e3, 4e7), "tile.memory": (0.7, 0.3, 1.0),
    "product_latency_s": (1e-6, 1e-8, 5e-6), "f32 over bf16": (0.8, 0.3, 1.0),
}  # fmt: skip


def with_figures(hardware: Hardware, figures: Sequence[float]) -> Hardware:
    """The hardware with values of ``FIGURES``."""
    matmul, results, window, memory, latency, f32 = figures
    products = dataclasses.replace(
        hardware.products, results_per_s=results, window_bytes=window, order=ORDER,
        memory_share=memory / hardware.memory_efficiency,
    )  # fmt: skip
    flops = {**hardware.flops_per_s, "f32": f32 * hardware.flops_per_s["bf16"]}
    return dataclasses.replace(
        hardware, matmul_efficiency=matmul, products=products, product_latency_s=latency,
        flops_per_s=flops,
    )  # fmt: skip


def fitted(hardware: Hardware, work: Products, seconds: Floats) -> dict[str, float]:
    """The figures with the least errors, in logarithms."""
    first, low, high = np.log(np.array(list(FIGURES.values()))).T

    def residuals(x: Floats) -> Floats:
        figures = np.exp(x).tolist()
        return np.log(work.seconds(with_figures(hardware, figures)) / seconds)

    found = least_squares(residuals, first, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return {key: float(f"{x:.3g}") for key, x in zip(FIGURES, np.exp(found.x), strict=True)}


HEADER = (
    "| kernels | number | mean error | worst | median ratio |\n| --- | ---: | ---: | ---: | ---: |"
)


def row(name: str, ratio: Floats) -> str:
    """The errors of predictions, from their ratios to the compiler's times."""
    off = np.abs(ratio - 1)
    figures = f"{len(ratio)} | {off.mean():.0%} | {off.max():.0%} | {np.median(ratio):.2f}"
    return f"| {name} | {figures} |"


def report_fit(models: Sequence[CostModel], kinds: npt.NDArray[np.str_], seconds: Floats) -> None:
    """Fit the figures to every second kernel of each kind; print them, and the errors of all."""
    hardware = models[0].hardware
    second = np.array([np.count_nonzero(kinds[:i] == kind) % 2 for i, kind in enumerate(kinds)])
    use = np.isin(kinds, FITTED)
    tables = [model.tables for model, here in zip(models, use, strict=True) if here]
    work = Products(
        np.array([t.products.size[0] for t in tables]),
        np.array([t.tensors.bytes.sum() for t in tables]),
        np.array([t.dtypes[t.ops.dtype[t.products.op_class[0]]] == "f32" for t in tables]),
    )
    part, known = second[use] == 0, seconds[use]
    found = fitted(hardware, work.take(part), known[part])
    large = np.array([m.initial_seconds * hardware.memory_bytes_per_s > LARGE for m in models])
    ratio = np.array([m.initial_seconds for m in models]) / seconds
    plain = large & (kinds == "elementwise")
    share = np.exp(np.log(ratio[plain & (second == 0)]).mean())
    print(f"\n{hardware.name}, fitted to {part.sum()} products and to large elementwise kernels:")
    for key, figure in {**found, "efficiency.memory": hardware.memory_efficiency * share}.items():
        print(f"  {key} = {figure:.3g}")
    print(HEADER)
    fit = work.seconds(with_figures(hardware, list(found.values()))) / known
    for name, rows in (("fitted", part), ("held out", ~part)):
        print(row(f"products, {name}, by the fit", fit[rows]))
        print(row(f"products, {name}, by the file", ratio[use][rows]))
        chosen = plain & (second == (name == "held out"))
        print(row(f"elementwise, {name}, by the fit", ratio[chosen] / share))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hardware", default=",".join(CLOCK_HZ), help="kinds, with commas")
    parser.add_argument("--folder", type=pathlib.Path, help="for the compiled modules",
                        default=pathlib.Path("~/.cache/toast/kernels").expanduser())  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="print no row per kernel")
    parser.add_argument("--fit", action="store_true", help="fit the figures of hardware files")
    options = parser.parse_args()
    kernels = all_kernels()
    kinds = np.array([kernel.kind for kernel in kernels])
    spaces = [
        Space(toast.analyze(k.function, *k.arguments, platform="tpu"), Mesh.parse(MESH))
        for k in kernels
    ]
    for hardware in map(load, options.hardware.split(",")):
        seconds = compiled_seconds(hardware, kernels, options.folder)
        models = [CostModel(space, hardware) for space in spaces]
        predicted = np.array([model.initial_seconds for model in models])
        print(f"\n{hardware.name}")
        if not options.summary:
            print("| kernel | compiler, us | predicted, us | ratio |\n| --- | ---: | ---: | ---: |")
            for kernel, one, other in zip(kernels, seconds * 1e6, predicted * 1e6, strict=True):
                print(
                    f"| {kernel.kind} {kernel.name} | {one:.4g} | {other:.4g} | {other / one:.2f} |"
                )
            print()
        print(HEADER)
        for kind in dict.fromkeys(kinds.tolist()):
            print(row(kind, (predicted / seconds)[kinds == kind]))
        if options.fit:
            report_fit(models, kinds, seconds)


if __name__ == "__main__":
    main()
