"""Runs a sharded program: the annotated module as a function that ``jax.jit`` compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils

from toast.apply.annotate import annotate
from toast.apply.callbacks import callbacks_in, calling
from toast.apply.hosts import check_hosts
from toast.boundary.printable import shortened
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend.jax import Calling
from toast.frontend.jax_libraries import ArgumentVariable, nodes_of, write_back
from toast.hardware import Mesh
from toast.program import Program, Shardings, Spec, TensorType

#: Collectives in XLA's compiled text.
_COLLECTIVE = re.compile(
    r"\s(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r"(?:[^\n]*?channel_id=(\d+))?"
)

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

#: The devices of a plan: a mesh, or devices in any order.
Devices: TypeAlias = jax.sharding.Mesh | Sequence[Any]

_NUMPY = {"i1": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a StableHLO element type."""
    if name not in _NUMPY:
        if number := re.fullmatch(r"(ui|i|f)(\d+)", name):
            kinds = {"ui": "uint", "i": "int", "f": "float"}
            name = kinds[number.group(1)] + number.group(2)
        elif number := re.fullmatch(r"f([468])(e\w+)", name):
            name = f"float{number.group(1)}_{number.group(2)}"
    dtype: np.dtype[Any] = np.dtype(jax.numpy.dtype(_NUMPY.get(name, name)))
    return dtype


def aval(type_: TensorType) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a type as a ``jax.ShapeDtypeStruct``."""
    return jax.ShapeDtypeStruct(type_.shape, numpy_dtype(type_.dtype))


def jax_mesh(shardings: Shardings, devices: Devices | None = None) -> jax.sharding.Mesh:
    """The plan's mesh on real devices, with each axis along links of the hardware if possible.

    :param devices: a ``jax.sharding.Mesh``, which stays as it is, or a list of devices; by default
        ``jax.devices()``.
    :raises toast.errors.PlanError: if there are too few devices, or the mesh has other sizes.
    """
    return on_devices(shardings, devices)[0]


def on_devices(
    shardings: Shardings, devices: Devices | None = None
) -> tuple[jax.sharding.Mesh, Shardings]:
    """The mesh of :func:`jax_mesh`, and the shardings in the names of its axes.

    A ``jax.sharding.Mesh`` keeps its devices, its axis types and its names, so that results can be
    used with other arrays on it.  Its axes of several devices are those of the plan with the same
    names or, if the names differ, in the same order.
    """
    mesh = shardings.mesh
    if isinstance(devices, jax.sharding.Mesh):
        return devices, _renamed(shardings, devices)
    try:
        available = list(jax.devices() if devices is None else devices)
    except TypeError:
        raise PlanError(
            f"devices {devices!r}: give a jax.sharding.Mesh, or a list of devices"
        ) from None
    if isinstance(devices, str) or not all(isinstance(d, jax.Device) for d in available):
        raise PlanError(
            f"devices {devices!r}: give a jax.sharding.Mesh, or a list of devices such as "
            "jax.devices()"
        )
    if len(set(available)) < len(available):
        twice = next(device for device in available if available.count(device) > 1)
        raise PlanError(f"devices: {twice} is listed twice; list each device once")
    if len(available) < mesh.devices:
        raise PlanError(
            f"mesh {mesh} needs {mesh.devices} devices, but JAX has {len(available)}; to run on "
            "CPU devices, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.devices}"
        )
    grid = device_grid(mesh, available[: mesh.devices])
    return jax.sharding.Mesh(grid, mesh.names), shardings


def axis_names(mesh: Mesh, devices: Devices | None) -> dict[str, str]:
    """The axes of ``devices``, if they are a ``jax.sharding.Mesh``, by those of a plan's ``mesh``.

    An axis of one device that it lacks is left out.  Raises :class:`toast.errors.PlanError` if its
    sizes are not those of ``mesh``.
    """
    if not isinstance(devices, jax.sharding.Mesh):
        return {name: name for name in mesh.names}
    other = Mesh.of(devices)
    ours, theirs = ([axis for axis in m.axes if axis[1] > 1] for m in (mesh, other))
    ones = {name for name, size in other.axes if size == 1}
    if dict(ours) == dict(theirs):
        names = {name: name for name, _ in ours}
    elif [size for _, size in ours] == [size for _, size in theirs]:
        names = {name: own for (name, _), (own, _) in zip(ours, theirs, strict=True)}
    else:
        raise PlanError(
            f"the plan is for mesh {mesh}, not {other}; make a new plan, or "
            "use a mesh of the same sizes"
        )
    return names | {name: name for name, size in mesh.axes if size == 1 and name in ones}


def _renamed(shardings: Shardings, devices: jax.sharding.Mesh) -> Shardings:
    """Shardings in the axis names of a mesh; an axis of one device that it lacks is left out."""
    names, other = axis_names(shardings.mesh, devices), Mesh.of(devices)
    if other.axes == shardings.mesh.axes:
        return shardings

    def renamed(spec: Spec) -> Spec:
        return tuple(tuple(names[axis] for axis in axes if axis in names) for axes in spec)

    return Shardings(
        other,
        {value: renamed(spec) for value, spec in shardings.values.items()},
        {use: renamed(spec) for use, spec in shardings.uses.items()},
        tuple(map(renamed, shardings.results)),
        {value: renamed(spec) for value, spec in shardings.sums.items()},
        {axis: names[own] for axis, own in shardings.manual_axes.items()},
    )


def device_grid(mesh: Mesh, devices: Sequence[Any]) -> Any:
    """The devices as an array of the shape of ``mesh``, in JAX's best order for their links.

    If the mesh has its own device order, its axes are placed in that order.
    """
    sizes = [mesh.sizes[axis] for axis in mesh.placed]
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    outermost = [math.prod(sizes[:end]) for end in range(len(sizes) + 1)]
    try:
        if slices > 1 and slices in outermost:
            # The first axes go over slices, which a network joins, the others stay inside.
            end = outermost.index(slices)
            ones = [1] * end, [1] * (len(sizes) - end)
            grid = mesh_utils.create_hybrid_device_mesh(
                [*ones[0], *sizes[end:]], [*sizes[:end], *ones[1]], devices,
                allow_split_physical_axes=True,
            )  # fmt: skip
        else:
            grid = mesh_utils.create_device_mesh(
                sizes, devices, allow_split_physical_axes=True, contiguous_submeshes=False
            )
    except (AssertionError, NotImplementedError, ValueError):  # for example a part of a torus
        grid = np.array(devices, dtype=object).reshape(sizes)
    return grid.transpose(np.argsort(mesh.placed))


def _partition(spec: Spec) -> jax.sharding.PartitionSpec:
    parts = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
    return jax.sharding.PartitionSpec(*parts)


def _named(mesh: jax.sharding.Mesh, spec: Spec) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, _partition(spec))


def _calling(program: Program) -> Calling | None:
    return getattr(program.source, "calling", None)


def _specs(specs: Sequence[Spec], avals: Sequence[Any]) -> list[jax.sharding.PartitionSpec]:
    """PartitionSpecs for JAX's arrays; those of random keys omit the dimension of their words."""
    return [_partition(spec[: len(a.shape)]) for spec, a in zip(specs, avals, strict=True)]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def _wrapped(result: Any, aval: Any) -> Any:
    """A flat result as the function returns it: the words of random keys become keys."""
    if not _is_key(aval):
        return result
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(result, impl=implementation[0])


def in_shardings(program: Program, shardings: Shardings) -> Any:
    """PartitionSpecs of the arguments, in the structure of ``jax.jit(in_shardings=...)``.

    A tuple with one pytree per positional argument.  For a function planned with keyword arguments,
    a pair of that tuple and the dictionary of the keywords.  For a program from a file, a flat
    tuple.
    """
    specs = [shardings.of(program, v) for v in program.argument_values]
    calling = _calling(program)
    if calling is None:
        return tuple(_partition(spec) for spec in specs)
    positional, keywords = jax.tree.unflatten(calling.in_tree, _leaf_specs(calling, specs))
    return (positional, keywords) if keywords else positional


def _leaf_specs(calling: Calling, specs: Sequence[Spec]) -> list[jax.sharding.PartitionSpec]:
    """PartitionSpecs of the leaves of a function's arguments; those the program lacks are whole."""
    count = len(calling.in_avals)
    of_leaves: list[Spec] = [()] * (count + len(calling.captured))
    for leaf, spec in zip(calling.arguments, specs, strict=True):
        of_leaves[leaf] = spec
    for leaf, first in calling.repeated.items():
        of_leaves[leaf] = of_leaves[first]
    return _specs(of_leaves[:count], calling.in_avals)


def out_shardings(program: Program, shardings: Shardings) -> Any:
    """PartitionSpecs in the structure of the results; a flat tuple for a program from a file."""
    calling = _calling(program)
    if calling is None:
        return tuple(_partition(spec) for spec in shardings.results)
    specs = _specs(shardings.results, calling.out_avals)
    arguments = [shardings.of(program, value) for value in program.argument_values]
    of_variables = dict(enumerate(_leaf_specs(calling, arguments)))
    of_variables |= calling.updated(specs)

    def other(leaf: Any) -> jax.sharding.PartitionSpec:
        is_variable = isinstance(leaf, ArgumentVariable)
        return of_variables[leaf.leaf] if is_variable else _partition(())

    return calling.returned(specs, other)


class JitShardings(NamedTuple):
    """Arguments of ``jax.jit``: pytrees of ``jax.sharding.NamedSharding``."""

    #: Those of the arguments.
    in_shardings: Any
    #: Those of the results.
    out_shardings: Any


def jit_shardings(
    program: Program, shardings: Shardings, *, devices: Devices | None = None
) -> JitShardings:
    """The shardings of arguments and results on real devices, for ``jax.jit``.

    They have the structures of :func:`in_shardings` and :func:`out_shardings`.  ``devices`` and
    errors are those of :func:`jax_mesh`.
    """
    mesh, shardings = on_devices(shardings, devices)
    return JitShardings(*jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        (in_shardings(program, shardings), out_shardings(program, shardings)),
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    ))  # fmt: skip


def word_size(program: Program) -> contextlib.AbstractContextManager[Any]:
    """A context in which 64-bit arguments and results stay 64-bit, whatever JAX's setting is.

    Results of :func:`flat_jit` must be lowered and called in it.
    """
    return jax.enable_x64(True) if _is_wide(program) else contextlib.nullcontext()


def _is_wide(program: Program) -> bool:
    """Whether an argument or a result has 64-bit elements."""
    outside = {*program.argument_values, *program.result_values}
    dtypes = {program.values[v].type.dtype for v in outside}
    return any(numpy_dtype(dtype).name in _WIDE for dtype in dtypes)


def platform_of(devices: Devices | None) -> str:
    """The platform that a program for these devices is lowered for, in JAX's words."""
    if devices is None or isinstance(devices, jax.sharding.Mesh):
        return _platform(devices)
    try:
        first = next(iter(devices), None)
    except TypeError:
        return _platform(None)  # :func:`on_devices` reports it
    return _lowering_platform(str(getattr(first, "platform", jax.default_backend())))


def _platform(mesh: jax.sharding.Mesh | None) -> str:
    """The platform to compile for: that of the mesh's devices, or JAX's default without a mesh."""
    return _lowering_platform(
        jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)
    )


def _lowering_platform(platform: str) -> str:
    """The platform of devices, in the words of ``lowering_platforms``."""
    if platform == jax.default_backend():
        return str(jax.export.default_export_platform())
    return {"gpu": "cuda"}.get(platform, platform)


def module_function(
    program: Program, module: Any, mesh: jax.sharding.Mesh | None
) -> Callable[..., list[Any]]:
    """A module as a function of flat arguments, which ``jax.jit`` traces and compiles.

    The module replaces that of a ``jax.export.Exported`` of a stub with the same signature, so that
    JAX compiles, places and donates as for any function.  It is serialized as a portable artifact,
    which JAX can read and which may contain ops of other dialects (CHLO, Shardy).

    :param program: the program of the module.
    :param module: the MLIR module, for example from :func:`toast.apply.annotate`.
    :param mesh: the mesh with devices; ``None`` for one device.
    :raises toast.errors.PlanError: if the program calls Python functions of another process.
    """
    callbacks = callbacks_in(program)
    if _platform(mesh) == "tpu":
        module = mlir.without_unset(module)
    types = [program.values[v].type for v in program.argument_values]
    outs = [aval(program.values[v].type) for v in program.result_values]

    def stub(*_arguments: Any) -> list[Any]:
        return [jax.numpy.zeros(o.shape, o.dtype) for o in outs]

    with word_size(program):
        exported = jax.export.export(jax.jit(stub, keep_unused=True), platforms=[_platform(mesh)])(
            *map(aval, types)
        )
    exported = dataclasses.replace(
        exported,
        fun_name=re.sub(r"\W", "_", program.name),
        mlir_module_serialized=mlir.portable_artifact(module),
        nr_devices=1 if mesh is None else mesh.size,
    )

    def run(*arguments: Any) -> list[Any]:
        return calling(exported.call(*arguments), callbacks)

    run.__name__ = exported.fun_name
    return run


def flat_jit(
    program: Program, module: Any, mesh: jax.sharding.Mesh | None, shardings: Shardings | None
) -> Any:
    """``jax.jit`` of a module with flat arguments, sharded on a mesh or on one device.

    :param program: the program of the module.
    :param module: the MLIR module (:func:`module_function`).
    :param mesh: the mesh with devices; ``None`` for one device.
    :param shardings: the shardings of arguments and results; ``None`` for one device.
    :raises toast.errors.PlanError: if the program calls Python functions of another process.
    """
    return _flat_jit(program, module_function(program, module, mesh), mesh, shardings)


def _flat_jit(
    program: Program,
    run: Callable[..., list[Any]],
    mesh: jax.sharding.Mesh | None,
    shardings: Shardings | None,
) -> Any:
    if mesh is None or shardings is None:
        return jax.jit(run)
    return jax.jit(
        run,
        in_shardings=[_named(mesh, shardings.of(program, v)) for v in program.argument_values],
        out_shardings=[_named(mesh, spec) for spec in shardings.results],
        donate_argnums=tuple(sorted(program.donated)),
    )


def _untransformed(program: Program, arguments: Sequence[Any]) -> Sequence[Any]:
    """Arguments of a planned program, for which ``jax.grad`` and ``jax.vmap`` raise a clear error.

    Without it, the derivatives of the stub, which are zero, would be taken for those of the
    program, and arguments of ``vmap`` would be placed as if they were not mapped.
    """
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in arguments):
        return arguments

    def refuse_derivative(primals: Any, tangents: Any) -> Any:
        raise PlanError(
            f"{program.name}: a planned program cannot be differentiated; plan the function that "
            "computes the gradient, such as the train step"
        )

    def refuse_map(*_: Any) -> Any:
        raise PlanError(
            f"{program.name}: jax.vmap cannot map a planned program, whose shapes are fixed; plan "
            "the function that vmap returns"
        )

    mapped = jax.custom_batching.custom_vmap(lambda *leaves: leaves)
    mapped.def_vmap(refuse_map)
    guard = jax.custom_jvp(lambda *leaves: mapped(*leaves))
    guard.defjvp(refuse_derivative)
    return list(guard(*arguments))


@contextlib.contextmanager
def _quiet_donation() -> Iterator[None]:
    """Suppresses JAX's warning that a backend did not reuse a donated buffer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*donated buffers were not usable.*")
        yield


class _Argument(NamedTuple):
    """An argument as the compiled program takes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.NamedSharding


class PytreeJit(NamedTuple):
    """A sharded program as a function of ``jax.jit`` with the pytrees of the planned function."""

    #: Its arguments are the positional ones, the values of the keywords, and the captured arrays.
    function: Any
    #: The sharding of each leaf of the arguments that are not static, by position or name.
    shardings: Mapping[int | str, list[jax.sharding.NamedSharding]]
    #: The captured arrays.
    captured: Sequence[Any]


class Runnable:
    """A sharded program as a callable with the arguments and results of its function.

    A program from a file takes flat arguments and returns a list.
    """

    def __init__(
        self,
        program: Program,
        shardings: Shardings,
        *,
        devices: Devices | None = None,
        module_of: Callable[[Program, Shardings], Any] = annotate,
    ) -> None:
        """``module_of`` writes the module, from the shardings in the names of the devices' axes."""
        self.mesh, self.shardings = on_devices(shardings, devices)
        check_hosts(program, self.mesh, self.shardings)
        self._calling = _calling(program)
        self._program = program
        shardings = self.shardings
        self._function = module_function(program, module_of(program, shardings), self.mesh)
        self._jit = _flat_jit(program, self._function, self.mesh, shardings)
        # A step of a large model has thousands of arguments: what does not change is computed here.
        self._is_wide = _is_wide(program)
        self._arguments = [
            _Argument(a.shape, np.dtype(a.dtype), _named(self.mesh, shardings.of(program, value)))
            for value in program.argument_values
            for a in [aval(program.values[value].type)]
        ]
        avals = () if self._calling is None else self._calling.out_avals
        self._keys = [number for number, leaf in enumerate(avals) if _is_key(leaf)]
        self._captured = [] if self._calling is None else list(self._calling.captured)
        self._captured_placed = False
        # Whether it updates or returns nnx variables of its arguments.
        self._has_variables = self._calling is not None and (
            bool(self._calling.updates)
            or any(isinstance(leaf, ArgumentVariable) for leaf in self._calling.out_static.values())
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Places the arguments, runs the program, and returns results with planned shardings.

        Raises :class:`toast.errors.PlanError` for arguments of other types or another structure.
        """
        results = self.run_flat(self._flatten(arguments, keywords))
        if self._calling is None:
            return results
        for number in self._keys:
            results[number] = _wrapped(results[number], self._calling.out_avals[number])
        if not self._has_variables:
            return self._calling.returned(results, lambda leaf: leaf)
        nodes, _ = nodes_of((arguments, keywords))
        write_back(nodes, self._calling.updated(results))
        return self._calling.returned(
            results, lambda leaf: nodes[leaf.node] if isinstance(leaf, ArgumentVariable) else leaf
        )

    def run_flat(self, arguments: Sequence[Any]) -> list[Any]:
        """Runs the program on flat arguments; returns flat results."""
        self._refuse_shared(arguments)
        words = jax.enable_x64(True) if self._is_wide else contextlib.nullcontext()
        with words, _quiet_donation():
            placed = self._placed(_untransformed(self._program, arguments))
            with self.naming_platforms():
                return list(self._jit(*placed))

    @contextlib.contextmanager
    def naming_platforms(self) -> Iterator[None]:
        """An error of XLA names the platforms if the program was lowered for another one."""
        try:
            yield
        except Exception as error:
            planned, here = self._program.platform, _platform(self.mesh)
            if planned in ("", here):
                raise
            raise PlanError(
                f"{self._program.name} was lowered for {planned}, and {here} cannot run it: "
                f"{shortened(str(error), 200)}; run it there, or plan a form for platform={here!r}"
            ) from error

    def _refuse_shared(self, arguments: Sequence[Any]) -> None:
        """Refuses a donated array that is also another argument: its buffer is overwritten."""
        if len(set(map(id, arguments))) == len(arguments):
            return
        first: dict[int, int] = {}
        for index, leaf in enumerate(arguments):
            other = first.setdefault(id(leaf), index)
            if other != index and isinstance(leaf, jax.Array):
                for donated, second in ((other, index), (index, other)):
                    if donated in self._program.donated:
                        names = self._program.arguments
                        raise PlanError(
                            f"{self._program.name}: argument {names[donated]} is donated, and the "
                            f"same array is argument {names[second]}; pass a copy of it"
                        )

    def _placed(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments on the mesh with their planned shardings.

        Arrays that are there already, such as the results of the last step, stay as they are.
        """
        placed, elsewhere = list(arguments), []
        for index, (leaf, planned) in enumerate(zip(arguments, self._arguments, strict=True)):
            there = (
                isinstance(leaf, jax.Array)
                and not isinstance(leaf, jax.core.Tracer)
                and leaf.dtype == planned.dtype
                and leaf.shape == planned.shape
                and leaf.sharding == planned.sharding
            )
            if not there:
                elsewhere.append(index)
        moved = self._moved([placed[index] for index in elsewhere], elsewhere)
        for index, leaf in zip(elsewhere, moved, strict=True):
            placed[index] = leaf
        return placed

    def _moved(self, leaves: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        """Arguments with these indices, of the planned types and on the mesh."""
        checked = [self._checked(index, leaf) for index, leaf in zip(indices, leaves, strict=True)]
        moved = jax.device_put(checked, [self._arguments[index].sharding for index in indices])
        return list(moved)

    def _checked(self, index: int, leaf: Any) -> Any:
        """Argument ``index``, of the planned type; the words of random keys."""
        planned = self._arguments[index]
        leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
        if shape != planned.shape or dtype != planned.dtype:
            value = self._program.argument_values[index]
            raise PlanError(
                f"{self._program.name}: argument {self._program.arguments[index]} was planned as "
                f"{self._program.values[value].type}, got {dtype.name}{list(shape)}; pass the "
                "planned type or make a new plan"
            )
        return leaf

    def _flatten(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any], captured: Any = None
    ) -> list[Any]:
        """The arguments of the program; ``captured`` replaces the captured arrays."""
        if self._calling is None:
            expected = len(self._program.arguments)
            if keywords or len(arguments) != expected:
                raise PlanError(
                    f"{self._program.name} takes {expected} flat arguments, got "
                    f"{len(arguments)}; pass them in the order of the file"
                )
            return list(arguments)
        left_out = []
        for name, planned in self._calling.static.items():
            if isinstance(name, str) and name in keywords:
                self._check_static(name, planned, keywords.pop(name))
            elif isinstance(name, str):
                left_out.append(name)
        flat: list[Any]
        flat, tree = jax.tree.flatten((arguments, keywords))
        if tree != self._calling.in_tree:
            by_name = f"{', '.join(left_out)} by name, and the others in " if left_out else ""
            raise PlanError(
                f"{self._program.name} was planned for arguments of another pytree structure; "
                f"pass {by_name}the structure that was planned"
            )
        for number, planned in self._calling.static.items():
            if isinstance(number, int):
                self._check_static(f"leaf {number} of its arguments", planned, flat[number])
        for leaf, first in self._calling.repeated.items():
            if flat[leaf] is not flat[first]:
                raise PlanError(
                    f"{self._program.name}: leaves {first} and {leaf} of its arguments were "
                    "planned as one shared variable; pass modules that share it"
                )
        flat += self._captured_arrays() if captured is None else captured
        return [flat[leaf] for leaf in self._calling.arguments]

    def _captured_arrays(self) -> list[Any]:
        """The captured arrays with their planned shardings; the first call places them."""
        if self._captured and not self._captured_placed:
            last = range(len(self._arguments))[-len(self._captured) :]
            with jax.ensure_compile_time_eval():
                self._captured = self._moved(self._captured, last)
            self._captured_placed = True
        return self._captured

    def pytree_jit(
        self,
        count: int,
        names: Sequence[str] = (),
        *,
        static: Set[int | str] = frozenset(),
        donated: Set[int | str] = frozenset(),
    ) -> PytreeJit | None:
        """``jax.jit`` of the program with the pytrees of its function, which dispatches the calls.

        A call costs as much as one of ``jax.jit``: nothing is checked or placed in Python.  Keyword
        arguments follow the positional ones.

        :param count: the number of positional arguments.
        :param names: the names of keyword arguments, in the order in which they are passed.
        :param static: the positions and names of static arguments.
        :param donated: the positions and names of donated arguments.
        :returns: ``None`` for a program from a file, and for one with 64-bit arrays unless JAX's
            setting allows these.
        """
        planned = self._calling
        if planned is None or (self._is_wide and not jax.config.jax_enable_x64):
            return None

        captured = self._captured_arrays()
        end = count + len(names)
        weak = [n for n, o in enumerate(planned.out_avals) if getattr(o, "weak_type", False)]

        def run(*values: Any) -> Any:
            by_name = dict(zip(names, values[count:end], strict=True))
            flat = self._flatten(values[:count], by_name, [*values[end:]])
            checked = [
                # A number of Python has a weak type, which the program does not have.
                jax.lax.convert_element_type(self._checked(index, leaf), argument.dtype)
                for index, (leaf, argument) in enumerate(zip(flat, self._arguments, strict=True))
            ]
            results = self._function(*_untransformed(self._program, checked))
            for number in self._keys:
                results[number] = _wrapped(results[number], planned.out_avals[number])
            for number in weak:  # else the next call, with these results, is compiled anew
                results[number] = jax.lax.convert_element_type_p.bind(
                    results[number], new_dtype=results[number].dtype, weak_type=True, sharding=None
                )
            return planned.returned(results, lambda leaf: leaf)

        run.__name__ = re.sub(r"\W", "_", self._program.name)
        places = {name: count + number for number, name in enumerate(names)}
        static_places, donated_places = (
            sorted(key if isinstance(key, int) else places[key] for key in keys)
            for keys in (static, donated)
        )
        specs = [self.shardings.of(self._program, v) for v in self._program.argument_values]
        leaves = [
            jax.sharding.NamedSharding(self.mesh, spec) for spec in _leaf_specs(planned, specs)
        ]
        positional, keywords = jax.tree.unflatten(planned.in_tree, leaves)
        every: dict[int | str, Any] = {**dict(enumerate(positional)), **keywords}
        traced = {key: every[key] for key in (*range(count), *names) if key not in static}
        return PytreeJit(
            jax.jit(
                run,
                in_shardings=(
                    *traced.values(),
                    *(array.sharding for array in captured),
                ),
                out_shardings=jax.tree.map(
                    lambda spec: jax.sharding.NamedSharding(self.mesh, spec),
                    out_shardings(self._program, self.shardings),
                    is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
                ),
                static_argnums=tuple(static_places),
                donate_argnums=tuple(donated_places),
            ),
            {key: jax.tree.leaves(own) for key, own in traced.items()},
            captured,
        )

    def _check_static(self, name: str, planned: Any, value: Any) -> None:
        """Refuses another value of a static argument: it is a constant of the program."""
        if value is not planned and not bool(value == planned):
            raise PlanError(
                f"{self._program.name} was planned with the static {name} = "
                f"{shortened(repr(planned))}, got {shortened(repr(value))}; make a new plan for it"
            )

    def lower(self) -> Any:
        """JAX's lowering of the sharded program (``jax.jit(...).lower``)."""
        types = [self._program.values[v].type for v in self._program.argument_values]
        with word_size(self._program):
            return self._jit.lower(*map(aval, types))

    def compiled_text(self) -> str:
        """XLA's optimised program for one device, with its collectives."""
        with _quiet_donation():
            return str(self.lower().compile().as_text())


def callable_of(
    program: Program, shardings: Shardings, *, devices: Devices | None = None
) -> Callable[..., Any]:
    """The sharded program as a callable (:class:`Runnable`).

    ``devices`` and errors are those of :func:`jax_mesh`; further errors those of :func:`annotate`.
    """
    return Runnable(program, shardings, devices=devices)


def collectives_in(text: str) -> dict[str, int]:
    """The number of collectives of each kind in XLA's compiled text, by StableHLO name.

    An asynchronous pair counts once, as do copies of one collective (with one channel) that the TPU
    compiler puts into fusions.  A collective may carry several arrays that XLA combined.
    """
    matches = enumerate(_COLLECTIVE.findall(text))
    distinct = {(kind, channel or f"line {number}") for number, (kind, channel) in matches}
    counts = collections.Counter(kind.replace("-", "_") for kind, _ in distinct)
    return dict(sorted(counts.items()))
