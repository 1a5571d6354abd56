"""Converts JAX functions to a :class:`Program`; arguments are named by their pytree paths."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from toast.errors import TargetError, ToastError
from toast.frontend import jax_libraries, memory_tracing, mlir
from toast.frontend.found_blocks import finding_blocks
from toast.frontend.jax_lowering import check_platform, lower, read
from toast.frontend.mlir.absent_devices import abstract_device, traced_for
from toast.program import Program, TracedMemory


@dataclasses.dataclass(frozen=True)
class Calling:
    """The pytrees of a traced function; a plan uses them to be called like the function.

    JAX drops unused arguments from the modules of ``Lowered`` and ``Exported``; ``leaves`` has the
    positions of the others.
    """

    #: The tree of ``(args, kwargs)``.
    in_tree: Any
    #: Shape and dtype of each leaf of the arguments, in order, and whether its type is weak.
    in_avals: tuple[Any, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    #: The values of static arguments by name, and of static leaves by position.
    static: Mapping[str | int, Any] = dataclasses.field(default_factory=dict)
    #: The leaves of the arguments that the program has; ``None`` if it has all of them.
    leaves: tuple[int, ...] | None = None

    #: The leaves of ``out_tree`` that are no arrays, by position.
    out_static: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    #: The Python functions that callbacks of the program name by number.
    callbacks: tuple[Callable[..., Any], ...] = ()
    #: The leaves of the arguments whose new values are the last results of the program, in order:
    #: variables that a function of ``nnx.jit`` updates in place.
    updates: tuple[int, ...] = ()
    #: The first leaf for each leaf of a variable that occurs again in the arguments.
    repeated: Mapping[int, int] = dataclasses.field(default_factory=dict)
    #: Arrays that the function closes over: the last arguments of the program.
    captured: tuple[Any, ...] = ()

    def returned(self, results: Iterable[Any], static: Callable[[Any], Any]) -> Any:
        """The tree of the function's results, with ``static`` of each static leaf.

        ``results`` are those of the program.
        """
        rest, other = iter(results), self.out_static
        count = range(self.out_tree.num_leaves)
        return jax.tree.unflatten(
            self.out_tree, [static(other[n]) if n in other else next(rest) for n in count]
        )

    def updated(self, results: Sequence[Any]) -> dict[int, Any]:
        """The new values of updated variables among results, by leaf of the arguments."""
        return dict(zip(self.updates, results[len(results) - len(self.updates) :], strict=True))

    @property
    def arguments(self) -> Sequence[int]:
        """The position of each argument of the program among the leaves, captured arrays last."""
        count = len(self.in_avals)
        leaves = range(count) if self.leaves is None else self.leaves
        return [*leaves, *range(count, count + len(self.captured))]


def from_function(
    function: Callable[..., Any],
    *arguments: Any,
    donate: int | Sequence[int] | None = (),
    name: str | None = None,
    platform: Any = None,
    **keywords: Any,
) -> Program:
    """Traces ``function`` at example arguments and converts it.

    :param arguments: pytrees of arrays or ``jax.ShapeDtypeStruct``; no array is read.
    :param donate: positions of arguments whose buffers results may reuse, as in
        ``jax.jit(donate_argnums=...)``.  For a function of ``jax.jit``, the arguments that it
        donates are added.
    :param name: the name of the program; by default that of the function.
    :param platform: the platform to lower for, as for :func:`toast.frontend.jax_lowering.lower`.
        A value that is not text is an argument of the function.
    :param keywords: keyword arguments.  Keywords that are static in ``jax.jit`` stay static.
    :raises toast.errors.TargetError: if JAX cannot trace the function.
    """
    return from_call(function, arguments, keywords, donate=donate, name=name, platform=platform)


def from_call(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    *,
    donate: int | Sequence[int] | None = (),
    name: str | None = None,
    platform: Any = None,
) -> Program:
    """:func:`from_function` for a function with keyword arguments of any name."""

    def program() -> Program:
        return _program(
            function, arguments, donate=donate, name=name, platform=platform,
            keywords=dict(keywords),
        )  # fmt: skip

    try:
        return program()
    except TargetError as error:
        # Some kernels ask for the device while they are traced.
        device = abstract_device(platform)
        if error.__cause__ is None or device is None:
            raise
        with contextlib.suppress(Exception), traced_for(device):
            return program()
        raise


def _program(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    *,
    donate: int | Sequence[int] | None,
    name: str | None,
    platform: Any,
    keywords: dict[str, Any],
) -> Program:
    """The program of a function (:func:`from_function`)."""
    name = name or str(getattr(function, "__name__", "function"))
    listed = donate is None or isinstance(donate, int | Iterable)
    places: set[Any] = {donate} if isinstance(donate, int) else {*((listed and donate) or ())}
    if not listed or not all(isinstance(place, int) for place in places):
        raise TargetError(f"{name}: donate={donate!r}: use positions of arguments")
    if not isinstance(platform, str | None):  # an argument of the function
        platform, keywords = None, {**keywords, "platform": platform}
    check_platform(platform)
    if not callable(function) or isinstance(function, jax.stages.Compiled):
        raise TargetError(
            f"{name}: {type(function).__name__} is not a function; pass the function itself"
        )
    names: set[str] = set()
    static: dict[str | int, Any] = {}
    library: jax_libraries.Filtered | None = None
    memory = memory_tracing.requested_trace()
    with warnings.catch_warnings():
        # "Some donated buffers were not usable" is not an error here.
        warnings.simplefilter("ignore", UserWarning)
        try:
            library = jax_libraries.filtered(function, arguments, keywords)
            if library is None and isinstance(function, jax.stages.Wrapped):
                info = function.trace(*arguments, **keywords).args_info
                if len(info[0]) < len(arguments):
                    library = jax_libraries.with_static_positions(
                        function, arguments, keywords, info
                    )
            if library:
                function = library.function
                places |= {key for key in library.donated if isinstance(key, int)}
                names = {key for key in library.donated if isinstance(key, str)}
                arguments, keywords = library.arguments, library.keywords
            elif isinstance(function, jax.stages.Wrapped):
                fixed = {key: keywords.pop(key) for key in [*keywords] if key not in info[1]}
                function = functools.partial(function, **fixed) if fixed else function
                static.update(fixed)
                places |= {
                    i for i, argument in enumerate(info[0]) if jax_libraries.all_donated(argument)
                }
                names = {
                    key for key, argument in info[1].items() if jax_libraries.all_donated(argument)
                }
            else:
                function = jax_libraries.updating_nothing(function)
            jitted = jax.jit(
                function, donate_argnums=sorted(places), donate_argnames=sorted(names),
                keep_unused=True,
            )  # fmt: skip
            with contextlib.ExitStack() as context:
                if memory is not None:
                    context.enter_context(memory_tracing.tracing(memory))
                    context.enter_context(finding_blocks(memory))
                traced = jitted.trace(*arguments, **keywords)
            lowering = lower(traced, name, platform)
        except ToastError:  # also that of an annotation
            raise
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            if _has_tensors((arguments, keywords)):
                raise TargetError(
                    f"{name}: a function of JAX cannot take a torch.Tensor; pass an nn.Module (or "
                    "toast.frontend.torch.TrainStep) instead of the function, or arrays of JAX"
                ) from error
            raise TargetError(
                f"{name}: JAX cannot trace it: {type(error).__name__}: {first}"
                f"{_remedy(first, platform)}"
            ) from error
    leaves, in_tree = jax.tree.flatten((arguments, keywords))
    outputs, out_tree = jax.tree.flatten(traced.out_info)
    calling = Calling(
        in_tree=in_tree,
        in_avals=tuple(
            jax.ShapeDtypeStruct(jax.numpy.shape(x), _dtype(x), weak_type=jax_libraries.is_weak(x))
            for x in leaves
        ),
        out_tree=out_tree,
        out_avals=tuple(
            jax.ShapeDtypeStruct(o.shape, o.dtype, weak_type=bool(getattr(o, "weak_type", False)))
            for o in outputs
        ),
        static=static,
        callbacks=mlir.callbacks_of(lowering.lowered),
    )
    calling = calling if library is None else _with_static_leaves(calling, library)
    program = read(lowering, name, calling)
    if memory is not None:
        differentiated = any(program.passes)
        program = _with_memory(program, memory.record(name, differentiated=differentiated))
    return _with_named_updates(program) if calling.updates else program


def _with_memory(program: Program, memory: TracedMemory) -> Program:
    """``program``, also in its form for this machine, with how it was traced."""
    source = program.source
    if source.here is not None:
        source = dataclasses.replace(source, here=_with_memory(source.here, memory))
    return dataclasses.replace(program, source=source, memory=memory)


def _with_named_updates(program: Program) -> Program:
    """``program`` with the paths of arguments as names of the results that update them."""
    calling = program.source.calling
    paths = dict(zip(calling.arguments, program.arguments, strict=True))
    own = program.results[: len(program.results) - len(calling.updates)]
    # The function is traced with a pair of results, of which the first has its own.
    names = ["result" + path.removeprefix("result[0]") for path in own]
    source = program.source
    if source.here is not None:
        source = dataclasses.replace(source, here=_with_named_updates(source.here))
    return dataclasses.replace(
        program, source=source, results=(*names, *(paths[leaf] for leaf in calling.updates))
    )


def _with_static_leaves(calling: Calling, library: jax_libraries.Filtered) -> Calling:
    """``calling`` of the function of a library, whose trees have leaves that are no arrays."""
    arrays, leaves = iter(calling.in_avals), range(library.in_tree.num_leaves)
    own = [n for n in leaves if n not in library.static and n not in library.repeated]
    nothing = jax.ShapeDtypeStruct((), bool)
    avals = {leaf: next(arrays) for leaf in own}
    avals |= {leaf: avals.get(first, nothing) for leaf, first in library.repeated.items()}
    return dataclasses.replace(
        calling,
        in_tree=library.in_tree,
        in_avals=tuple(avals.get(leaf, nothing) for leaf in leaves),
        out_tree=library.out_tree,
        static=library.static,
        leaves=tuple(own),
        out_static=library.out_static,
        updates=library.updates,
        repeated=library.repeated,
    )


def _remedy(message: str, platform: str | None) -> str:
    """What to do about an error of a trace, where it is known; else empty."""
    if "interpret mode is supported on CPU" in message:
        return (
            "; the kernel needs another platform, which this machine need not have: pass "
            'platform="tpu" or "cuda" (--platform)'
        )
    if "TPU version must be" in message:
        return (
            "; the kernel asks for a TPU of this machine: pass its block sizes, such as "
            "num_queries_per_block"
        )
    if "different trace level" in message:
        return (
            "; a step that updates a module must take it as an argument: plan nnx.jit(step) with "
            "the module and the other arguments"
        )
    if platform == "cuda" and "AbstractDevice" in message:
        return (
            "; the kernel depends on the GPU: lower it on a machine that has one, or under "
            "jax.sharding.use_abstract_mesh of a mesh with that AbstractDevice"
        )
    return ""


def _has_tensors(tree: Any) -> bool:
    """Whether there is a tensor of PyTorch in a pytree."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and any(isinstance(leaf, tensor) for leaf in jax.tree.leaves(tree))


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jax.numpy.result_type(leaf)
