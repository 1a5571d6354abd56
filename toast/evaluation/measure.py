"""Measures the devices of this machine through JAX: products, memory and collectives.

Every figure is the time of a program that XLA compiles, so that it is what programs of plans reach.
A measurement is a chain of equal ops in one program: each needs the result of the one before, so
that none is merged with another, and the time of starting the program is shared by all.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from toast.apply.module_functions import numpy_dtype
from toast.errors import HardwareError
from toast.hardware import Hardware
from toast.hardware.measured_tables import COLUMNS, MEASURABLE, PRODUCT_COLUMNS

#: Runs of a measurement with its first ones, if an op is so slow that there are few repeats.
_RUNS = 8
#: Ops of a chain, for large and for small ones.
_SHORT_CHAIN, _LONG_CHAIN = 2, 16
#: Products of a chain, at most; the seconds of a chain, which hide the start of its program; and
#: the seconds of the smallest product.
_LONGEST_CHAIN, _CHAIN_SECONDS, _LEAST_SECONDS = 64, 5e-4, 4e-6
#: A measurement repeats its program for as many seconds at least, and as often.
_REPEAT_SECONDS, _LEAST_REPEATS, _BLOCKS = 0.02, 2, 3
#: Shares of the time for products, memory and collectives.
_SHARES = {"products": 0.45, "memory": 0.05, "collectives": 0.5}

#: Rows, columns and depth of products: first those that tell most, then steps of a language model,
#: and shapes that fill waves of tiles differently.
_PRODUCTS = (
    *((size, size, size) for size in (4096, 512, 1024, 8192, 2048)), (128, 4096, 4096),
    (8192, 14336, 4096), (16, 4096, 14336), (8192, 4096, 14336), (1024, 1024, 16384),
    (1, 4096, 4096), (640, 4096, 4096), (2048, 8192, 1024), (8192, 8192, 512),
    (1280, 5120, 5120), (16384, 8192, 8192), (640, 1024, 1024), (4096, 1024, 4096),
    (256, 16384, 4096), (64, 32768, 4096), (8192, 4096, 4096), (128, 128, 4096),
    *((size, size, size) for size in (256, 1536, 3072, 6144)), (8192, 8192, 128),
    (512, 512, 65536), (32, 8192, 8192), (2304, 2304, 4608), (128, 512, 128), (1, 2048, 2048),
    *((size, size, size) for size in (128, 12288)),
)  # fmt: skip

#: Bytes of collectives, from coarse to fine.
_SIZES = tuple(2**power for power in (12, 20, 16, 23, 26, 28, 14, 18, 21, 24, 22, 25, 27, 29))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What the devices of a machine reach."""

    #: JAX's name of their kind, and how many there are.
    device_kind: str
    devices: int
    #: ``m, n, k, dtype, seconds``.
    products: pd.DataFrame
    #: Bytes per second that a kernel reads and writes.
    memory_bytes_per_s: float
    #: ``collective, devices, bytes, seconds``; empty for one device.
    collectives: pd.DataFrame


def devices_of(hardware: Hardware) -> list[Any]:
    """The devices of this machine that the hardware file describes.

    Raises :class:`toast.errors.HardwareError` if there are none, with what was found instead.
    """
    try:
        found = jax.devices(hardware.platform) if hardware.platform else jax.devices()
    except RuntimeError:
        others = jax.devices()
        raise HardwareError(
            f"{hardware.name} describes {hardware.device_kind or hardware.platform + ' devices'}, "
            f"but JAX found {_kinds(others)} here; run this on a machine with such devices, with "
            f"JAX for {hardware.platform}"
        ) from None
    wanted = hardware.device_kind
    if wanted and any(device.device_kind != wanted for device in found):
        raise HardwareError(
            f"{hardware.name} describes {wanted}, but JAX found {_kinds(found)} here; use the "
            "hardware file of these devices, or a copy with their figures and device_kind"
        )
    return list(found)


def _kinds(devices: Sequence[Any]) -> str:
    kinds = [device.device_kind for device in devices]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def measure(
    hardware: Hardware,
    *,
    seconds: float = 120.0,
    progress: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure the devices that ``hardware`` describes, in about ``seconds``.

    Sizes come from coarse to fine until the time is over.  Collectives are those of 2, 4, 8, ...
    devices of this process, at most of a node.  ``progress`` is called with messages.

    Raises :class:`toast.errors.HardwareError` as :func:`devices_of` does.
    """
    here = jax.process_index()
    devices = [device for device in devices_of(hardware) if device.process_index == here]
    say = progress or (lambda _: None)
    say("measuring memory")
    memory = _memory_rate(hardware, devices[0], seconds * _SHARES["memory"])
    products = _products(hardware, devices[0], seconds * _SHARES["products"], say)
    link = hardware.interconnect
    most = link.devices_per_node if link.topology == "switch" else 1
    collectives = _collectives(hardware, devices[:most], seconds * _SHARES["collectives"], say)
    return Measurement(devices[0].device_kind, len(devices), products, memory, collectives)


def _seconds(run: Callable[[Any], Any], value: Any) -> float:
    """Seconds of ``run``, which takes its own results: the median of several blocks."""
    value = jax.block_until_ready(run(value))
    start = time.perf_counter()
    value = jax.block_until_ready(run(value))
    once = time.perf_counter() - start
    repeats = max(_LEAST_REPEATS, int(_REPEAT_SECONDS / max(once, 1e-6)))
    blocks = []
    for _ in range(_BLOCKS):
        start = time.perf_counter()
        for _ in range(repeats):
            value = run(value)
        jax.block_until_ready(value)
        blocks.append((time.perf_counter() - start) / repeats)
    return statistics.median(blocks)


def _memory_rate(hardware: Hardware, device: Any, seconds: float) -> float:
    """Bytes per second of a kernel that reads and writes a large array."""
    size = int(min(2**30, hardware.memory_limit_bytes / 16)) // 4
    best, end = 0.0, time.perf_counter() + seconds
    run = jax.jit(lambda x: x + 1, donate_argnums=0)
    for elements in (size // 4, size):
        array = jax.device_put(np.zeros(elements, np.float32), device)
        best = max(best, 8 * elements / _seconds(run, array))
        if time.perf_counter() > end:
            break
    return best


def _products(
    hardware: Hardware, device: Any, seconds: float, say: Callable[[str], None]
) -> pd.DataFrame:
    """The times of products of the element types that programs use most."""
    end = time.perf_counter() + seconds
    rows: list[tuple[int, int, int, str, float]] = []
    dtypes = [d for d in ("bf16", "f32") if d in hardware.flops_per_s] or ["f32"]
    for shape in _PRODUCTS:
        for dtype in dtypes if shape[0] in (512, 2048, 4096) else dtypes[:1]:
            m, n, k = shape
            left = end - time.perf_counter()
            rate = hardware.flops_per_s.get(dtype, min(hardware.flops_per_s.values()))
            expected = max(2.0 * m * n * k / rate, _LEAST_SECONDS)
            if rows and _RUNS * _SHORT_CHAIN * expected > left:
                continue
            say(f"measuring products: {m}x{k} by {k}x{n}, {dtype}")
            rows.append((m, n, k, dtype, _product_seconds(shape, dtype, device, expected)))
    return pd.DataFrame(rows, columns=list(PRODUCT_COLUMNS))


def _product_seconds(
    shape: tuple[int, int, int], dtype: str, device: Any, expected: float
) -> float:
    m, n, k = shape
    random = np.random.default_rng(0)
    type_ = numpy_dtype(dtype)
    left, right = (
        jax.device_put(jnp.asarray(random.normal(0, 0.01, sides), type_), device)
        for sides in ((m, k), (k, n))
    )
    links = min(max(math.ceil(_CHAIN_SECONDS / expected), _SHORT_CHAIN), _LONGEST_CHAIN)

    def chain(left: Any, right: Any, multiply: bool) -> Any:
        for _ in range(links):
            corner = (left @ right)[:1, :1] if multiply else left[-1:, -1:] * 1.01
            # The next product needs this one: an element of its operand changes, in place.
            left = lax.dynamic_update_slice(left, corner.astype(left.dtype), (0, 0))
        return left

    run = jax.jit(chain, static_argnums=2, donate_argnums=0)
    idle = 0.0
    if links > _SHORT_CHAIN:
        idle = _seconds(lambda value: run(value, right, False), jnp.array(left, copy=True))
    busy = _seconds(lambda value: run(value, right, True), left)
    return max(busy - idle, 0.05 * busy) / links


def _collectives(
    hardware: Hardware, devices: Sequence[Any], seconds: float, say: Callable[[str], None]
) -> pd.DataFrame:
    """The times of all collectives on 2, 4, 8, ... devices."""
    counts = [2**power for power in range(1, 20) if 2**power <= len(devices)]
    end = time.perf_counter() + seconds
    rows: list[tuple[str, int, int, float]] = []
    rates: dict[tuple[str, int], float] = {}  # of large sizes
    for size in _SIZES if 4 * _SIZES[0] <= hardware.memory_limit_bytes else ():
        for kind, count in itertools.product(MEASURABLE, counts):
            expected = size / rates.get((kind, count), np.inf)
            if 4 * size > hardware.memory_limit_bytes or (
                rows and _RUNS * _SHORT_CHAIN * expected > end - time.perf_counter()
            ):
                continue
            say(f"measuring {kind} of {size} bytes on {count} devices")
            taken = _collective_seconds(kind, size, devices[:count])
            rates[kind, count] = max(rates.get((kind, count), 0.0), size / taken)
            rows.append((kind, count, size, taken))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _collective_seconds(kind: str, size: int, devices: Sequence[Any]) -> float:
    """``size`` is counted as in ``nccl-tests``; see :data:`toast.hardware.COLLECTIVES`."""
    count, elements = len(devices), max(size // 4, 2 * len(devices))
    elements -= elements % count
    part = elements // count
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    links = _SHORT_CHAIN if size > 2**22 else _LONG_CHAIN

    def one(x: Any) -> Any:
        """``x`` after a collective, in the shape that the next one takes."""
        if kind == "all_reduce":
            return lax.psum(x, "x")
        if kind == "all_to_all":
            return lax.all_to_all(x, "x", 0, 0, tiled=True)
        if kind == "all_gather":
            return lax.all_gather(x, "x", tiled=True)[1 : part + 1]
        scattered = lax.psum_scatter(x, "x", tiled=True)
        return lax.dynamic_update_slice(x, scattered, (1,))

    def chain(x: Any) -> Any:
        for _ in range(links):
            x = one(x)
        return x

    spec = PartitionSpec("x")
    run = jax.jit(
        jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        donate_argnums=0,
    )
    local = part if kind == "all_gather" else elements
    zeros = jax.device_put(np.zeros(local * count, np.float32), NamedSharding(mesh, spec))
    return _seconds(run, zeros) / links
