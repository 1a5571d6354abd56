"""Running a sharded program: the annotated module as a function that ``jax.jit`` compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.experimental import mesh_utils

from toast.apply.annotate import annotate
from toast.errors import PlanError
from toast.frontend import mlir
from toast.frontend.jax import Calling
from toast.hardware import Mesh
from toast.program import Program, Shardings, Spec, TensorType

#: Collectives as XLA's compiled text spells them.
_COLLECTIVE = re.compile(
    r"\s(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r"(?:[^\n]*?channel_id=(\d+))?"
)

#: Custom calls that ``jax.debug.print``, ``pure_callback`` and ``io_callback`` become.
_CALLBACK = re.compile(r"python_\w*callback")

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})

#: What a plan runs on: a mesh with its devices in order, or devices to be ordered.
Devices: TypeAlias = jax.sharding.Mesh | Sequence[Any]

_NUMPY = {"i1": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a StableHLO element type."""
    if name not in _NUMPY:
        if found := re.fullmatch(r"(ui|i|f)(\d+)", name):
            kinds = {"ui": "uint", "i": "int", "f": "float"}
            name = kinds[found.group(1)] + found.group(2)
        elif name.startswith("f8"):
            name = "float8_" + name.removeprefix("f8")
    dtype: np.dtype[Any] = np.dtype(jax.numpy.dtype(_NUMPY.get(name, name)))
    return dtype


def aval(type_: TensorType) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a value, as JAX says them."""
    return jax.ShapeDtypeStruct(type_.shape, numpy_dtype(type_.dtype))


def jax_mesh(shardings: Shardings, devices: Devices | None = None) -> jax.sharding.Mesh:
    """The plan's mesh on real devices, each axis along links of the hardware where it has such.

    A ``jax.sharding.Mesh`` keeps its order of devices.  Raises :class:`toast.errors.PlanError` when
    there are too few devices, or that mesh has another shape.
    """
    mesh = shardings.mesh
    if isinstance(devices, jax.sharding.Mesh):
        if devices.axis_sizes != mesh.sizes:
            raise PlanError(
                f"the plan is for mesh {mesh}, not {Mesh.of(devices)}; make a new plan, or "
                "use a mesh of the same sizes"
            )
        return jax.sharding.Mesh(devices.devices, mesh.names)
    try:
        found = list(jax.devices() if devices is None else devices)
    except TypeError:
        raise PlanError(
            f"devices {devices!r}: give a jax.sharding.Mesh, or a list of devices"
        ) from None
    if len(found) < mesh.devices:
        raise PlanError(
            f"mesh {mesh} needs {mesh.devices} devices, but JAX has {len(found)}; to run on CPU "
            f"devices, set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.devices}"
        )
    return jax.sharding.Mesh(device_grid(mesh, found[: mesh.devices]), mesh.names)


def device_grid(mesh: Mesh, devices: Sequence[Any]) -> Any:
    """The devices in the shape of ``mesh``, in the order that JAX finds best for their links.

    Where the mesh gives an order of its own, its axes are laid out in that.
    """
    sizes = [mesh.sizes[axis] for axis in mesh.placed]
    try:
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
    """PartitionSpecs for JAX's arrays; those of random keys hide the dimensions of their words."""
    return [_partition(spec[: len(a.shape)]) for spec, a in zip(specs, avals, strict=True)]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def _wrapped(result: Any, aval: Any) -> Any:
    """A flat result as the function returned it: the words of random keys become keys again."""
    if not _is_key(aval):
        return result
    implementation: list[Any] = []
    jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), aval)
    return jax.random.wrap_key_data(result, impl=implementation[0])


def in_shardings(program: Program, shardings: Shardings) -> Any:
    """PartitionSpecs in the structure of the arguments.

    A tuple with one pytree per positional argument; for a function planned with keyword arguments
    the pair of that tuple and their dictionary; for a program from a file a flat tuple.
    """
    specs = [shardings.of(program, v) for v in program.argument_values]
    calling = _calling(program)
    if calling is None:
        return tuple(_partition(spec) for spec in specs)
    positional, keywords = jax.tree.unflatten(calling.in_tree, _specs(specs, calling.in_avals))
    return (positional, keywords) if keywords else positional


def out_shardings(program: Program, shardings: Shardings) -> Any:
    """PartitionSpecs in the structure of the result; a flat tuple for a program from a file."""
    calling = _calling(program)
    if calling is None:
        return tuple(_partition(spec) for spec in shardings.results)
    return jax.tree.unflatten(calling.out_tree, _specs(shardings.results, calling.out_avals))


class JitShardings(NamedTuple):
    """What ``jax.jit`` takes: pytrees of ``jax.sharding.NamedSharding``."""

    in_shardings: Any
    out_shardings: Any


def jit_shardings(
    program: Program, shardings: Shardings, *, devices: Devices | None = None
) -> JitShardings:
    """The shardings of arguments and results on real devices, as ``jax.jit`` takes them.

    In the structures of :func:`in_shardings` and :func:`out_shardings`.
    """
    mesh = jax_mesh(shardings, devices)
    return JitShardings(*jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        (in_shardings(program, shardings), out_shardings(program, shardings)),
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    ))  # fmt: skip


def word_size(program: Program) -> contextlib.AbstractContextManager[Any]:
    """Where arguments and results keep their 64 bits, whatever JAX's own setting.

    Everything that lowers or calls what :func:`flat_jit` makes has to stand in it.
    """
    outside = (*program.argument_values, *program.result_values)
    wide = any(numpy_dtype(program.values[v].type.dtype).name in _WIDE for v in outside)
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _platform(mesh: jax.sharding.Mesh | None) -> str:
    """The platform to compile for: that of the mesh's devices, which need not be JAX's default."""
    platform = jax.default_backend() if mesh is None else str(mesh.devices.flat[0].platform)
    if platform == jax.default_backend():
        return str(jax.export.default_export_platform())
    return {"gpu": "cuda"}.get(platform, platform)


def _refuse_callbacks(program: Program) -> None:
    """A call into Python knows its function by its place in the process that traced it."""
    for op in range(len(program.ops)):
        signature = program.signatures[program.ops[op].signature]
        if _CALLBACK.search(str(signature.attribute("call_target_name") or "")):
            raise PlanError(
                f"{program.name}: {program.describe(op)} calls Python, which only JAX can "
                "arrange; remove debug prints and callbacks, or pass plan.in_shardings and "
                "plan.out_shardings to jax.jit of your function"
            )


def flat_jit(
    program: Program, module: Any, mesh: jax.sharding.Mesh | None, shardings: Shardings | None
) -> Any:
    """``jax.jit`` of a module over flat arguments, sharded as told or on one device.

    The module travels inside a ``jax.export.Exported`` made for a stub of the same signature: JAX
    then compiles, places and donates as for any function.  It is a portable artifact, the form JAX
    reads back, written so that ops of other dialects (CHLO, Shardy) may stand in it as they are.
    """
    _refuse_callbacks(program)
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

    def call(*arguments: Any) -> Any:
        return exported.call(*arguments)

    call.__name__ = exported.fun_name
    if mesh is None or shardings is None:
        return jax.jit(call)
    return jax.jit(
        call,
        in_shardings=[_named(mesh, shardings.of(program, v)) for v in program.argument_values],
        out_shardings=[_named(mesh, spec) for spec in shardings.results],
        donate_argnums=tuple(sorted(program.donated)),
    )


@contextlib.contextmanager
def _quiet_donation() -> Iterator[None]:
    """Not every backend can reuse every donated buffer; that is no news to the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*donated buffers were not usable.*")
        yield


class Runnable:
    """A sharded program that is called like the function it was made from.

    Programs read from files take their arguments flat and return a list.
    """

    def __init__(
        self, program: Program, shardings: Shardings, *, devices: Devices | None = None
    ) -> None:
        self.mesh = jax_mesh(shardings, devices)
        self._calling = _calling(program)
        self._program = program
        self.shardings = shardings
        self._jit = flat_jit(program, annotate(program, shardings), self.mesh, shardings)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Place the arguments as planned, run, and return results with planned shardings."""
        results = self.run_flat(self._flatten(arguments, keywords))
        if self._calling is None:
            return results
        wrapped = map(_wrapped, results, self._calling.out_avals)
        return jax.tree.unflatten(self._calling.out_tree, wrapped)

    def run_flat(self, arguments: Sequence[Any]) -> list[Any]:
        """Run on flat arguments; results are flat too."""
        self._refuse_shared(arguments)
        with word_size(self._program), _quiet_donation():
            return list(self._jit(*map(self._place, range(len(arguments)), arguments)))

    def _refuse_shared(self, arguments: Sequence[Any]) -> None:
        """An array that is given away cannot be another argument too: its buffer is overwritten."""
        first: dict[int, int] = {}
        for index, leaf in enumerate(arguments):
            other = first.setdefault(id(leaf), index)
            if other != index and isinstance(leaf, jax.Array):
                for donated, kept in ((other, index), (index, other)):
                    if donated in self._program.donated:
                        names = self._program.arguments
                        raise PlanError(
                            f"{self._program.name}: argument {names[donated]} is donated, and the "
                            f"same array is argument {names[kept]}; pass a copy of it"
                        )

    def _place(self, index: int, leaf: Any) -> Any:
        """Argument ``index`` on the mesh as planned."""
        value = self._program.argument_values[index]
        type_ = self._program.values[value].type
        leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        shape, dtype = np.shape(leaf), jax.dtypes.canonicalize_dtype(jax.dtypes.result_type(leaf))
        if shape != type_.shape or dtype != numpy_dtype(type_.dtype):
            raise PlanError(
                f"{self._program.name}: argument {self._program.arguments[index]} was planned as "
                f"{type_}, got {dtype.name}{list(shape)}; pass the planned type or make a new plan"
            )
        return jax.device_put(leaf, _named(self.mesh, self.shardings.of(self._program, value)))

    def _flatten(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        if self._calling is None:
            expected = len(self._program.arguments)
            if keywords or len(arguments) != expected:
                raise PlanError(
                    f"{self._program.name} takes {expected} flat arguments, got "
                    f"{len(arguments)}; pass them in the order of the file"
                )
            return list(arguments)
        flat: list[Any]
        flat, tree = jax.tree.flatten((arguments, keywords))
        if tree != self._calling.in_tree:
            raise PlanError(
                f"{self._program.name} was planned for arguments of another pytree structure; "
                "pass the structure that was planned"
            )
        return flat

    def lower(self) -> Any:
        """JAX's lowering of the sharded program, as ``jax.jit(...).lower``."""
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
    """The sharded program as a callable; see :class:`Runnable`."""
    return Runnable(program, shardings, devices=devices)


def collectives_in(text: str) -> dict[str, int]:
    """Collectives in XLA's compiled text by kind, named as StableHLO does.

    Async pairs count once; so do the copies of one collective, known by its channel, that the TPU
    compiler puts into fusions.  One collective may carry several arrays where XLA combined some.
    """
    found = enumerate(_COLLECTIVE.findall(text))
    distinct = {(kind, channel or f"line {number}") for number, (kind, channel) in found}
    counts = collections.Counter(kind.replace("-", "_") for kind, _ in distinct)
    return dict(sorted(counts.items()))
