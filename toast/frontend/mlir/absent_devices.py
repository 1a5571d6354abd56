"""Tracing for devices that this machine lacks: what kernels ask JAX about them.

Some kernels ask for the kind of device, and JAX's fused attention for the version of cuDNN, while
they are traced.  They get the answers of the hardware of the plan.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

#: Kinds of TPU of which a JAX device has two cores.
_TWO_CORES = frozenset({"TPU v4", "TPU v5"})


class _Gpu(NamedTuple):
    """A kind of GPU: its multiprocessors, and its compute capability."""

    cores: int
    capability: tuple[int, int]


#: By a word of the kind of device (https://developer.nvidia.com/cuda-gpus, and the whitepapers).
_GPUS = {
    "P100": _Gpu(56, (6, 0)), "A100": _Gpu(108, (8, 0)), "H100": _Gpu(132, (9, 0)),
    "H200": _Gpu(132, (9, 0)), "B200": _Gpu(148, (10, 0)),
}  # fmt: skip

#: The versions of libraries that kernels are lowered for: cuDNN 9.11, CUDA 12.9.
_VERSIONS = {"cudnn_get_version": 91100}
_CUDA = 12090


class _CudaVersions:
    """In the place of ``cuda_versions``, which JAX has on machines with its CUDA plugin only."""

    def __getattr__(self, name: str) -> Callable[[], int]:
        if not name.endswith("_version"):
            raise AttributeError(name)
        return lambda: _VERSIONS.get(name, _CUDA)


def abstract_device(platform: Any) -> Any:
    """The device that code asks for while it is traced for another platform; ``None`` if unknown.

    :param platform: a :class:`toast.ports.HardwarePlatform`, or the user's text.
    """
    kind = getattr(platform, "device_kind", "")
    if not kind or platform == str(jax.export.default_export_platform()):
        return None
    if gpu := _gpu(kind):
        return jax.sharding.AbstractDevice(kind, gpu.cores, "gpu")
    return jax.sharding.AbstractDevice(kind, 2 if kind in _TWO_CORES else 1, str(platform))


def _gpu(kind: str) -> _Gpu | None:
    return next((gpu for word, gpu in _GPUS.items() if word in kind), None)


@contextlib.contextmanager
def traced_for(device: Any) -> Iterator[None]:
    """A context in which code that is traced gets the answers of an abstract device."""
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    gpu = _gpu(device.device_kind)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        if gpu is not None:
            _pretend_cuda(stack, gpu)
        yield


def _pretend_cuda(stack: contextlib.ExitStack, gpu: _Gpu) -> None:
    """Until the stack ends, JAX's modules have versions of CUDA and the capability of a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def capability(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    answers: list[tuple[Any, str, Any]] = [
        (cudnn, "check_compute_capability", lambda text: gpu.capability >= capability(text)),
        (
            cudnn,
            "is_cuda_compute_capability_equal",
            lambda text: gpu.capability == capability(text),
        ),
    ]
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "jax" and vars(module).get("cuda_versions", 0) is None:
            answers.append((module, "cuda_versions", _CudaVersions()))
    for module, name, answer in answers:
        if hasattr(module, name):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, answer)
