"""The largest size that fits, or the fewest devices, for functions of sizes."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toast import api, inputs
from toast.analysis import Analysis, lowering_of
from toast.errors import SearchError, TargetError
from toast.fitting.fit_table import Fit
from toast.fitting.requests import RequestPlanner, limited
from toast.fitting.size_question import find_fit
from toast.inputs import AnyHardware, AnyMesh
from toast.program import MemoryPolicy
from toast.search import Settings


def fit(
    target: Any,
    arguments: Any = None,
    /,
    *,
    find: str = "batch",
    sizes: Mapping[str, int] | None = None,
    mesh: AnyMesh | None = None,
    devices: int | None = None,
    hardware: AnyHardware,
    remat: str | MemoryPolicy | None = None,
    microbatches: int | None = None,
    donate: int | Sequence[int] | None = (),
    platform: Any = None,
    trip_counts: Any = None,
    rules: Sequence[str | pathlib.Path] = (),
    memory_bytes: float | None = None,
    settings: Settings | None = None,
    progress: api.Progress | None = None,
    cache: bool = True,
    lowering: str = "xla",
    **options: Any,
) -> Fit:
    """Finds the largest size that fits, or the fewest devices, and plans that do.

    Sizes are those of ``sizes``, doubled, or halved down to 1 and rounded down to what the mesh
    divides; and then sizes between the largest one that fits and the next one, in steps of 3 to
    6 %, or of what the mesh and the microbatches divide (:attr:`Fit.next_size`).  Numbers of
    devices are powers of two.

    :param target: a function, as for :func:`toast.plan`, if there are ``arguments``; otherwise a
        function of the sizes, by name, that returns a :class:`toast.models.Model`.
    :param arguments: a function of the sizes, by name, that returns the tuple of example arguments;
        or the tuple itself, for ``find="devices"``.
    :param find: the name of a size, such as ``"batch"`` or ``"sequence"``; or ``"devices"``.
    :param sizes: the sizes to begin with, by name.  By default, those of the function of sizes.
        ``batch`` and ``sequence`` count as rows and tokens.
    :param mesh: as for :func:`toast.plan`, with ``devices`` and ``hardware``; neither is given for
        ``find="devices"``, which searches meshes of each size.
    :param remat: a memory policy for all plans.  By default, and with ``"auto"``, each size is
        planned with the joint decision; a program with nothing to recompute stays as it is.
    :param microbatches: their number for all plans; by default, that of the program and more, while
        these help.
    :param memory_bytes: the memory limit per device; by default that of the hardware.
    :param settings: the settings of the searches; their ``budget`` limits the whole question, and
        what was found until then is returned.
    :param options: ``safety``, ``constraints``, ``overlap``, ``resolution``, ``uneven`` and
        ``stages`` of :func:`toast.plan`; the other parameters are those there.
    :raises toast.errors.TargetError: if the target has no such size, or cannot be traced with the
        sizes to begin with.

    >>> import jax, jax.numpy as jnp, toast
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> mlp = lambda x, w: jax.nn.relu(x @ w)
    >>> found = toast.fit(
    ...     mlp, lambda batch: (f32(batch, 512), f32(512, 2048)), find="batch", sizes={"batch": 64},
    ...     mesh="data=4", hardware="tpu-v5e", memory_bytes=2**24,
    ... )
    >>> found.value, found.best.peak_bytes < 2**24
    (5888, True)
    """
    machine = inputs.machine_of(hardware)
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise SearchError(f"settings {settings!r}: use toast.Settings(seed=1), for example")
    lowering = lowering_of(lowering)
    for name in options:
        if name not in _OPTIONS:
            raise TargetError(f"{name}: is no option of toast.fit; use {', '.join(_OPTIONS)}")
    bound = _bound(target, arguments, sizes, find)

    def analysis_of(
        sizes: Mapping[str, int], policy: str | MemoryPolicy | None, microbatches: int | None,
        progress: Callable[[Any], None],
    ) -> Analysis:  # fmt: skip
        function, given = bound.at(sizes)
        return api.analyze(
            function, *given, donate=donate, platform=api.platform_of(platform, machine),
            trip_counts=trip_counts, rules=rules, progress=progress, cache=cache, lowering=lowering,
            remat=policy, microbatches=microbatches,
        )  # fmt: skip

    planner = RequestPlanner(
        analysis_of, limited(machine, memory_bytes), settings, progress, **options
    )
    return find_fit(
        planner, find=find, sizes=bound.sizes, mesh=mesh, devices=devices, remat=remat,
        microbatches=microbatches,
    )  # fmt: skip


#: The options of :func:`toast.plan` that are the same for all plans.
_OPTIONS = ("safety", "constraints", "overlap", "resolution", "uneven", "stages")


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A target with the sizes that it is a function of."""

    target: Any
    arguments: Any
    sizes: dict[str, int]

    def at(self, sizes: Mapping[str, int]) -> tuple[Any, tuple[Any, ...]]:
        """The target with some sizes, and its arguments."""
        if self.arguments is None:
            return self.target(**sizes), ()
        if not callable(self.arguments):
            return self.target, self.arguments
        given = self.arguments(**sizes)
        if not isinstance(given, tuple):
            raise TargetError(
                f"arguments: the function of sizes returned {type(given).__name__}; return the "
                "tuple of arguments, also if there is only one"
            )
        return self.target, given


def _bound(target: Any, arguments: Any, sizes: Mapping[str, int] | None, find: str) -> _Bound:
    """The target with the sizes to begin with; raises :class:`toast.errors.TargetError`."""
    from toast.models import Model

    if isinstance(arguments, list):
        arguments = tuple(arguments)
    of_sizes = target if arguments is None else arguments
    fixed = isinstance(arguments, tuple) or isinstance(target, Model)
    if fixed and find != "devices":
        raise TargetError(
            f"find={find!r}: the arguments have one size; pass a function of it, such as lambda "
            f"{find}: (params, f32({find}, 1024))"
        )
    if isinstance(target, Model) and arguments is None:
        return _Bound(lambda **_sizes: target, None, {})
    if not callable(target) or not (fixed or callable(of_sizes)):
        raise TargetError(
            "toast.fit needs a function with a function of sizes that returns its arguments, or a "
            "function of sizes that returns a toast.models.Model"
        )
    if fixed:
        return _Bound(target, arguments, {})
    known = {
        name: p.default if inputs.is_whole(p.default) else None
        for name, p in inspect.signature(of_sizes).parameters.items()
    }
    if not known:
        raise TargetError("the function of sizes has no parameters; name them, such as batch")
    chosen: dict[str, int] = {}
    for name, size in {**known, **dict(sizes or {})}.items():
        if name not in known:
            raise TargetError(f"sizes: the function has no size {name}; it has {', '.join(known)}")
        if size is None or not inputs.is_whole(size) or size < 1:
            missing = "has no value" if size is None else f"is {size!r}"
            raise TargetError(
                f"size {name} {missing}; give a whole number to begin with: sizes={{{name!r}: 8}}"
            )
        chosen[name] = int(size)
    return _Bound(target, arguments, chosen)
