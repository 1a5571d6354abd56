"""``toast.jit``: ``jax.jit`` with the best sharding.

A function is planned at its first call, and again for arguments of other shapes.  Later calls are
dispatched by ``jax.jit`` itself and cost as much as its calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from toast import api, apply, inputs, ports
from toast.errors import MeshError, PlanError, PlanWarning, TargetError
from toast.frontend import jax_libraries
from toast.frontend.built_in import TORCH_TARGETS
from toast.frontend.jax import from_call
from toast.hardware import Hardware
from toast.inputs import AnyHardware, AnyMesh
from toast.plan import Applied, Plan, joint_plan, misfit_note, read
from toast.plan.step_reshards import donation_text, jit_text
from toast.program import MemoryPolicy, Program
from toast.units import listed

#: The options of :func:`toast.plan` that :func:`jit` passes on.
_OPTIONS = frozenset(
    name
    for name, parameter in inspect.signature(api.plan).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
) - {"mesh", "devices", "hardware", "donate", "platform"}

#: Those that also apply to a kept plan.
_OPTIONS_OF_KEPT = frozenset({"memory_bytes", "safety", "trip_counts", "rules", "progress"})

#: Calls with arguments elsewhere before every call looks where its arguments are.
_MISPLACED = 3

_RED, _PLAIN = "\033[1;31m", "\033[0m"


def jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    mesh: AnyMesh | Sequence[Any] | None = None,
    plan: Plan | str | pathlib.Path | None = None,
    hardware: AnyHardware | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """``jax.jit`` with the best sharding: plans at the first call, compiles and runs.

    Arguments of other shapes, or other static arguments, are planned again; a
    :class:`toast.errors.PlanWarning` says so.  Arguments may be anywhere; results are sharded, so
    that the next call takes them as they are.

    :param function: the function; also one of ``jax.jit``, ``flax.nnx.jit`` or
        ``equinox.filter_jit``, whose own donated and static arguments are used.  Without it, the
        result is a decorator.
    :param mesh: the devices: a ``jax.sharding.Mesh``, a list of devices, or text such as
        ``"data=4,model=2"``.  By default, the mesh of ``jax.set_mesh``, else all devices, in the
        best mesh.
    :param plan: a kept plan or its file, instead of a search.  It is applied to the function
        (:func:`toast.apply_plan`).
    :param hardware: as for :func:`toast.plan`; by default that of the devices, or of ``plan``.
    :param donate_argnums: as for ``jax.jit``, with ``donate_argnames``, ``static_argnums`` and
        ``static_argnames``.
    :param options: further options of :func:`toast.plan`, such as ``constraints``, ``settings``,
        ``lowering``, ``remat`` or ``microbatches``.
    :raises toast.errors.PlanError: for an unknown option, or one that a kept plan excludes.  A
        function that ``jax.jit`` refuses raises JAX's own error.

    >>> import jax.numpy as jnp, toast
    >>> step = toast.jit(lambda x, w: jnp.tanh(x @ w), mesh="data=1", hardware="tpu-v5e")
    >>> step(jnp.ones((64, 32)), jnp.ones((32, 16))).shape
    (64, 16)
    """
    jit_options: dict[str, Any] = {
        "donate_argnums": donate_argnums, "donate_argnames": donate_argnames,
        "static_argnums": static_argnums, "static_argnames": static_argnames,
    }  # fmt: skip
    jit_options = {name: value for name, value in jit_options.items() if value is not None}
    allowed = _OPTIONS if plan is None else _OPTIONS_OF_KEPT
    if unknown := sorted({*options} - allowed):
        why = " for a kept plan" if unknown[0] in _OPTIONS else ""
        raise PlanError(
            f"toast.jit has no option {unknown[0]!r}{why}; use the options of jax.jit, mesh, plan, "
            f"hardware, {', '.join(sorted(allowed))}"
        )
    if function is None:
        return functools.partial(
            jit, mesh=mesh, plan=plan, hardware=hardware, **jit_options, **options
        )
    if isinstance(function, functools.partial) and jax_libraries.is_nnx_jit(function.func):
        # A method of a module: its module is an argument like others.
        whole = jit(
            function.func, mesh=mesh, plan=plan, hardware=hardware, **jit_options, **options
        )
        return functools.partial(whole, *function.args, **function.keywords)
    return PlannedFunction(function, mesh, plan, hardware, jit_options, options)


@dataclasses.dataclass(frozen=True)
class _Devices:
    """Where a function runs: the mesh on devices, or what it is found from."""

    #: The mesh on devices; ``None`` before the first plan, or for the first devices.
    mesh: jax.sharding.Mesh | None
    #: The devices of a mesh that is to be found, or of a mesh without devices.
    devices: tuple[Any, ...]
    #: The options ``mesh`` and ``devices`` of :func:`toast.plan`.
    options: Mapping[str, Any]


class _Types(NamedTuple):
    """What of the arguments of a call distinguishes programs."""

    tree: Any
    #: The shape and dtype of each leaf, and whether its type is weak; the value of static leaves.
    leaves: tuple[Hashable, ...]
    static: tuple[Hashable, ...]


@dataclasses.dataclass
class _Variant:
    """A function for arguments of some types: its plan, and how it is called."""

    plan: Plan
    runnable: apply.Runnable
    #: Calls the program with the arguments of the function; the first call places them.
    call: Callable[..., Any]
    #: The function of ``jax.jit`` behind ``call``, if there is one.
    pytrees: apply.PytreeJit | None
    #: How often arguments were elsewhere.
    misplaced: int = 0


class PlannedFunction:
    """A function of :func:`toast.jit`, which is called like the function itself."""

    __name__: str

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: AnyMesh | Sequence[Any] | None,
        plan: Plan | str | pathlib.Path | None,
        hardware: AnyHardware | None,
        jit_options: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Parameters are those of :func:`jit`; ``jit_options`` are those of ``jax.jit``."""
        if isinstance(function, PlannedFunction):
            raise PlanError(f"{function.__name__} is planned already; pass the function itself")
        of_library = jax_libraries.is_jitted(function)
        name = getattr(function, "__name__", type(function).__name__)
        if TORCH_TARGETS.accepts(function):
            raise PlanError(
                f"{name} is of PyTorch, and toast.jit runs functions of JAX; use "
                f"toast.plan({name}, ...).to_torch()"
            )
        if of_library and jit_options:
            raise PlanError(
                f"{name} has its own options; pass {min(jit_options)} to the library's jit"
            )
        if not of_library and (jit_options or not isinstance(function, jax.stages.Wrapped)):
            if callable(function) and not isinstance(function, jax.stages.Wrapped):
                function = jax_libraries.updating_nothing(function)
            function = jax.jit(function, **jit_options)
        self._function = function
        self._of_library = of_library
        self._mesh_option, self._plan_option, self._hardware = mesh, plan, hardware
        self._options = dict(options)
        self._remat = self._options.pop("remat", None)
        self._microbatches = self._options.pop("microbatches", None)
        self._variants: dict[_Types, _Variant] = {}
        self._last: _Variant | None = None
        #: Whether calls go back to earlier variants; then each call looks for its variant.
        self._alternates = False
        #: The variants by the types of arguments that are all arrays.
        self._of_arrays: dict[Any, _Variant] = {}
        self._devices: _Devices | None = None
        self._machine: Hardware | None = None
        self._lock = threading.RLock()
        functools.update_wrapper(self, function)
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<toast.jit of {self.__name__}, planned for {len(self._variants)} sets of types>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the function; plan it first for arguments of new types."""
        variant = self._chosen(arguments, keywords) if self._alternates else self._last
        if variant is not None:
            try:
                return variant.call(*arguments, **keywords)
            except Exception as error:
                if not self._calls_for_another(variant, error, arguments, keywords):
                    raise
        known = len(self._variants)
        variant = self._variant(arguments, keywords)
        # Calls that go back to earlier types will do so again; the others fail first, slowly.
        self._alternates |= variant is not self._last and known == len(self._variants) > 1
        self._last = variant
        return self._placed_call(variant, arguments, keywords)

    @property
    def plan(self) -> Plan:
        """The plan of the last call; before it, raises :class:`toast.errors.PlanError`."""
        if self._last is None:
            raise PlanError(
                f"{self.__name__} has no plan before its first call; call it, or use plan_for(...)"
            )
        return self._last.plan

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of the plans; raises :class:`toast.errors.PlanError` before the first one."""
        if self._last is not None:
            return self._last.runnable.mesh
        if self._devices is None or self._devices.mesh is None:
            raise PlanError(
                f"{self.__name__} has no mesh before its first plan; call it, or use plan_for(...)"
            )
        return self._devices.mesh

    def plan_for(self, *arguments: Any, **keywords: Any) -> Plan:
        """The plan for these arguments, arrays or ``jax.ShapeDtypeStruct``, without a run."""
        variant = self._variant(arguments, keywords)
        self._last = self._last or variant
        return variant.plan

    def init(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Initial values of arguments on :attr:`mesh`, sharded from birth (:meth:`Plan.init`)."""
        return self.plan.init(function, self.mesh, *arguments)

    def lower(self, *arguments: Any, **keywords: Any) -> Any:
        """JAX's lowering of the sharded program (``jax.jit(...).lower``)."""
        variant = self._variant(arguments, keywords)
        if variant.pytrees is None:
            return variant.runnable.lower()
        values = (*arguments, *(keywords[name] for name in sorted(keywords)))
        return variant.pytrees.function.lower(*values, *variant.pytrees.captured)

    def eval_shape(self, *arguments: Any, **keywords: Any) -> Any:
        """The types of the results, as of ``jax.eval_shape``; plans nothing."""
        if isinstance(self._function, jax.stages.Wrapped):  # it knows its static arguments
            return self._function.eval_shape(*arguments, **keywords)
        return jax.eval_shape(self._function, *arguments, **keywords)

    def clear_cache(self) -> None:
        """Forget all plans and compiled programs; devices and hardware stay those of the first."""
        with self._lock:
            self._variants.clear()
            self._of_arrays.clear()
            self._last, self._alternates = None, False

    # -- variants ----------------------------------------------------------------------------

    def _calls_for_another(
        self, variant: _Variant, error: Exception, arguments: Any, keywords: Any
    ) -> bool:
        """Whether a call failed because of types that it was not planned for, or of places."""
        if self._variants.get(self._types(arguments, keywords)) is not variant:
            return True
        if not isinstance(error, ValueError) or variant.pytrees is None:
            return False
        return self._placed(variant, arguments, keywords)[0]

    def _placing(self, variant: _Variant) -> Callable[..., Any]:
        """A function that calls a variant and places its arguments."""
        return lambda *own, **named: self._placed_call(variant, own, named)

    def _placed_call(self, variant: _Variant, arguments: Any, keywords: Any) -> Any:
        """A call after its arguments are moved to where the plan has them; the next ones are not.

        If arguments are elsewhere again and again, such as batches, the next ones are moved, too.
        """
        with variant.runnable.naming_platforms():
            if variant.pytrees is None:
                return variant.runnable(*arguments, **keywords)
            moved, arguments, keywords = self._placed(variant, arguments, keywords)
            variant.misplaced += moved
            direct = _calling(variant.pytrees, keywords)
            if variant.misplaced < _MISPLACED:
                variant.call = direct
            elif moved:
                variant.call = self._placing(variant)
            return direct(*arguments, **keywords)

    def _placed(
        self, variant: _Variant, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        """The arguments on the mesh of the plan, and whether any was elsewhere.

        What has no device yet, such as a numpy array, stays, and JAX places it in each call.  With
        several processes, JAX cannot.  A donated argument is placed: the result that takes its
        place is on the mesh, and JAX compiles a function again for arguments that are not.
        """
        assert variant.pytrees is not None
        several = jax.process_count() > 1
        _, donated = self._places(arguments, keywords)
        every: dict[int | str, Any] = dict(enumerate(arguments))
        every.update(keywords)
        flat = {place: jax.tree.flatten(every[place]) for place in variant.pytrees.shardings}
        moved = [
            (leaves, number, sharding)
            for place, (leaves, _) in flat.items()
            for number, sharding in enumerate(variant.pytrees.shardings[place])
            if _is_elsewhere(leaves[number], sharding, anywhere=several or place in donated)
        ]
        if not moved:
            return False, arguments, keywords
        arrays = jax.device_put(
            [leaves[number] for leaves, number, _ in moved], [sharding for *_, sharding in moved]
        )
        for (leaves, number, _), array in zip(moved, arrays, strict=True):
            leaves[number] = array
        every |= {place: jax.tree.unflatten(tree, leaves) for place, (leaves, tree) in flat.items()}
        return (
            True,
            tuple(every[place] for place in range(len(arguments))),
            {name: every[name] for name in keywords},
        )

    def _chosen(self, arguments: Any, keywords: Any) -> _Variant | None:
        """The variant for arguments, or the last one for new types."""
        leaves, tree = jax.tree.flatten((arguments, keywords))
        try:
            key = tree, tuple([(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves])
        except AttributeError:  # static arguments and numbers
            return self._variants.get(self._types(arguments, keywords), self._last)
        if key not in self._of_arrays:
            types = self._types(arguments, keywords)
            if types not in self._variants:
                return self._last
            self._of_arrays[key] = self._variants[types]
        return self._of_arrays[key]

    def _variant(self, arguments: Any, keywords: Any) -> _Variant:
        """The variant for arguments; plans a new one if necessary."""
        with self._lock:
            types = self._types(arguments, keywords)
            if types not in self._variants:
                self._variants[types] = self._new_variant(arguments, keywords)
            return self._variants[types]

    def _new_variant(self, arguments: Any, keywords: Any) -> _Variant:
        devices = self._devices_of_calls()
        machine = self._machine_of(devices)

        def planned(
            policy: str | MemoryPolicy | None, start: Plan | None = None,
            microbatches: int | None = None,
        ) -> Plan:  # fmt: skip
            count = microbatches or self._microbatches
            with api.traced_with(self._function, policy, count):
                program = self._program(arguments, keywords, machine, devices)
            return self._plan(program, machine, devices, start)

        policy, microbatches = self._memory()
        if policy == "auto":
            plan = joint_plan(planned, may_cut_batch=self._microbatches is None)
        else:
            plan = planned(policy, microbatches=microbatches)
        self._say_of(plan)
        if devices.mesh is None:
            mesh = apply.jax_mesh(plan.shardings, devices.devices or None)
            self._devices = dataclasses.replace(devices, mesh=mesh, options={"mesh": plan.mesh})
        assert self._devices is not None
        runnable = plan.jit(self._devices.mesh)
        pytrees = None
        if not self._of_library:
            static, donated = self._places(arguments, keywords)
            pytrees = runnable.pytree_jit(
                len(arguments), sorted(keywords), static=static, donated=donated, exact=True
            )
        variant = _Variant(plan, runnable, runnable, pytrees)
        if pytrees is not None:
            variant.call = self._placing(variant)
        return variant

    def _memory(self) -> tuple[str | MemoryPolicy | None, int | None]:
        """The memory policy of the next plan, and its microbatches.

        They are those of a kept plan or, with ``"auto"``, of the last one.
        """
        if self._plan_option is not None:
            kept = read(self._plan_option).memory
            return (None, None) if kept is None else (kept.policy, kept.microbatches)
        if self._remat == "auto" and self._last is not None:
            return self._last.plan.policy, self._last.plan.microbatches
        return self._remat, self._microbatches

    def _program(
        self, arguments: Any, keywords: Any, machine: Hardware, devices: _Devices
    ) -> Program:
        """The traced function; raises JAX's own error if JAX cannot trace it."""
        platform = ports.HardwarePlatform.of(machine)
        types = arguments, keywords
        if not self._of_library:
            types = jax.tree.map(_without_sharding, (arguments, keywords))

        def traced() -> Program:
            own, named = types
            return from_call(self._function, own, named, name=self.__name__, platform=platform)

        try:
            return traced()
        except TargetError as error:
            if error.__cause__ is None:
                raise
            failure = error
        if (mesh := _abstract_mesh(devices)) is not None:
            # What names axes, such as with_sharding_constraint(x, P("data")), needs the mesh.
            with jax.sharding.use_abstract_mesh(mesh):
                with contextlib.suppress(TargetError):
                    return traced()
                # A shard_map over explicit axes needs its arguments' shardings, too.
                types = arguments, keywords
                with contextlib.suppress(TargetError):
                    return traced()
        if hasattr(self._function, "trace"):
            self._function.trace(*arguments, **keywords)  # raises JAX's own error
        assert failure.__cause__ is not None
        raise failure.__cause__ from None

    def _plan(
        self, program: Program, machine: Hardware, devices: _Devices, start: Plan | None
    ) -> Plan:
        """The plan for a program, kept or searched; a search may begin with another plan."""
        known = self._known_plan(program)
        if known is not None:
            return api.apply_plan(known, program).plan
        if self._plan_option is not None:
            return self._applied(self._plan_option, program, devices)
        return self._searched(program, machine, devices, start)

    def _known_plan(self, program: Program) -> Plan | None:
        """An earlier plan for the same program with other pytrees, or other constants."""
        for known in self._variants.values():
            before = known.plan.analysis.program
            same = before.origin_digest == program.origin_digest
            if same and before.donated == program.donated:
                return known.plan
        return None

    def _say_of(self, plan: Plan) -> None:
        """Says what the user should know about a new plan."""
        program = plan.analysis.program
        if self._known_plan(program) is not None:
            return
        say = functools.partial(_say, self.__name__)
        if not plan.fits:
            say(misfit_note(plan), red=True)
        if plan.step_reshards:
            filtered = jax_libraries.is_filter_jit(self._function)
            text = (
                donation_text(plan.step_reshards, "equinox.filter_jit(donate=...)")
                if filtered
                else jit_text(plan.step_reshards)
            )
            say(text)
        if self._last is not None:
            say(
                "planned again, for other arguments: "
                f"{_changes(self._last.plan.analysis.program, program)}"
            )

    def _searched(
        self, program: Program, machine: Hardware, devices: _Devices, begin: Plan | None
    ) -> Plan:
        def search(start: Plan | None) -> Plan:
            return api.plan(
                program, hardware=machine, **{"start": start, **devices.options, **self._options}
            )

        if begin is None and self._last is not None:
            begin = self._last.plan
        try:
            if begin is not None:
                with contextlib.suppress(PlanError):  # nothing of the last plan applies to it
                    return search(begin)
            return search(None)
        except MeshError as error:  # an axis divides nothing, as in the last, smaller batch
            if self._last is None:
                raise
            _say(self.__name__, f"{error}; this call is sharded where the last plan still fits")
            return api.apply_plan(self._last.plan, program).plan

    def _applied(
        self, kept: Plan | str | pathlib.Path, program: Program, devices: _Devices
    ) -> Plan:
        """The kept plan, applied to a program."""
        mesh = devices.options.get("mesh")
        applied: Applied = api.apply_plan(
            kept, program, mesh=mesh, hardware=self._hardware, **self._options
        )
        if not applied.same_program and self._last is None:
            other = [*applied.gone, *(path for path, _ in applied.new)]
            other += [change.argument for change in applied.changed]
            differ = f", {listed(other)} differ" if other else ""
            _say(
                self.__name__,
                f"plan {applied.saved.name} is for another form of the program{differ}; the rest "
                "is sharded as it says; leave out plan= for a new search",
            )
        return applied.plan

    # -- what a call is made of --------------------------------------------------------------

    def _places(self, arguments: Any, keywords: Any) -> tuple[frozenset[Any], frozenset[Any]]:
        """The positions and names of static and of donated arguments."""
        info, count = getattr(self._function, "_jit_info", self._function), len(arguments)

        def places(kind: str) -> frozenset[Any]:
            numbers = getattr(info, f"{kind}_argnums", None) or ()
            numbers = (numbers,) if isinstance(numbers, int) else numbers
            own = {number % count for number in numbers if -count <= number < count}
            named = getattr(info, f"{kind}_argnames", None) or ()
            named = (named,) if isinstance(named, str) else named
            return frozenset({*own, *(name for name in named if name in keywords)})

        return places("static"), places("donate")

    def _static_of(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> dict[int | str, Any]:
        """The static arguments by position and by name."""
        static, _ = self._places(arguments, keywords)
        return {key: arguments[key] if isinstance(key, int) else keywords[key] for key in static}

    def _types(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _Types:
        """What of the arguments distinguishes programs."""
        static = self._static_of(arguments, keywords)
        fixed = [(key, _hashable(static[key])) for key in sorted(static, key=str)]
        arguments, keywords = _without(arguments, keywords, static)
        leaves, tree = jax.tree.flatten((arguments, keywords))
        return _Types(
            tree, tuple(jax_libraries.leaf_type(self._function, x) for x in leaves), tuple(fixed)
        )

    def _devices_of_calls(self) -> _Devices:
        """The devices and the mesh, which are those of the first plan."""
        if self._devices is not None:
            return self._devices
        mesh = self._mesh_option
        if mesh is None and self._plan_option is None:
            with contextlib.suppress(ValueError):  # in a function of jax.jit
                context = jax.sharding.get_mesh()
                mesh = None if context.empty else context
        if isinstance(mesh, jax.sharding.Mesh):
            found = _Devices(mesh, (), {"mesh": mesh})
        elif mesh is None and self._plan_option is not None:
            found = _Devices(None, (), {})
        elif mesh is None or isinstance(mesh, list | tuple):
            every = tuple(jax.devices() if mesh is None else mesh)
            options = {"devices": len(every)} if len(every) != 1 else {"mesh": "a=1"}
            found = _Devices(None, every, options)
        else:
            found = _Devices(None, (), {"mesh": mesh})
        self._devices = found
        return found

    def _machine_of(self, devices: _Devices) -> Hardware:
        """The hardware: the user's, that of a kept plan, or that of the devices."""
        if self._machine is not None:
            return self._machine
        if self._hardware is not None:
            self._machine = inputs.machine_of(self._hardware)
        elif isinstance(self._plan_option, Plan):
            self._machine = self._plan_option.hardware
        elif self._plan_option is not None:
            self._machine = api.machine_of_plan(self._plan_option)
        else:
            every = devices.devices or (
                jax.devices() if devices.mesh is None else tuple(devices.mesh.devices.flat)
            )
            self._machine, note = inputs.machine_for(every)
            if note:
                _say(self.__name__, note)
        return self._machine


def _abstract_mesh(devices: _Devices) -> jax.sharding.AbstractMesh | None:
    """The mesh without devices, if the user gives one."""
    if devices.mesh is not None:
        return devices.mesh.abstract_mesh
    if "mesh" not in devices.options:
        return None
    mesh = inputs.mesh_of(devices.options["mesh"])
    sizes = tuple(size for _, size in mesh.axes)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(sizes, mesh.names, types)


def _calling(pytrees: apply.PytreeJit, keywords: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with the arguments of the planned function."""
    function, captured, names = pytrees.function, pytrees.captured, sorted(keywords)
    if not names and not captured:
        return function  # type: ignore[no-any-return]

    def call(*arguments: Any, **named: Any) -> Any:
        if len(named) != len(names):
            raise TypeError("other keyword arguments than planned")
        return function(*arguments, *[named[name] for name in names], *captured)

    return call


def _without(
    arguments: tuple[Any, ...], keywords: dict[str, Any], static: Mapping[int | str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments without static ones; those with a position become ``None``."""
    if not static:
        return arguments, keywords
    positional = tuple(None if n in static else own for n, own in enumerate(arguments))
    return positional, {name: own for name, own in keywords.items() if name not in static}


def _is_elsewhere(leaf: Any, sharding: jax.sharding.NamedSharding, *, anywhere: bool) -> bool:
    """Whether an argument is an array with another sharding.

    With ``anywhere``, also if JAX may choose its place: an uncommitted or numpy array, a number.
    Tracers and deleted arrays cannot be moved.
    """
    if isinstance(leaf, jax.core.Tracer):
        return False
    if isinstance(leaf, jax.Array):
        other = (anywhere or leaf.committed) and not leaf.is_deleted()
        return other and leaf.sharding != sharding
    return anywhere and (hasattr(leaf, "__array__") or isinstance(leaf, int | float | complex))


def _without_sharding(leaf: Any) -> Any:
    """The type of an array without its sharding, which the plan replaces; other leaves stay."""
    if not isinstance(leaf, jax.Array):
        return leaf
    type_ = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype, weak_type=type_.weak_type)


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value  # type: ignore[no-any-return]


def _changes(before: Program, after: Program) -> str:
    """The arguments whose types differ between two programs, in words."""
    old, new = (
        dict(zip(program.arguments, zip(_types(program), _weak(program), strict=True), strict=True))
        for program in (before, after)
    )
    changed = []
    for path, (type_, weak) in new.items():
        if path not in old:
            changed.append(f"{path} is {type_}, was missing")
        elif (type_, weak) != old[path]:
            both = (type_, weak), old[path]
            said = [f"{t}{' of a weak type' * (w and type_ == old[path][0])}" for t, w in both]
            changed.append(f"{path} is {said[0]}, was {said[1]}")
    return listed(changed, 2) if changed else "static ones, or their order"


def _types(program: Program) -> list[str]:
    return [str(program.values[value].type) for value in program.argument_values]


def _weak(program: Program) -> list[bool]:
    """For each argument, whether its type is weak, as that of a number of Python is."""
    calling = program.source.calling
    avals = dict(enumerate(calling.in_avals))
    return [leaf in avals and bool(avals[leaf].weak_type) for leaf in calling.arguments]


def _say(name: str, text: str, *, red: bool = False) -> None:
    """Tell the user in one line, as a warning; red on a terminal."""
    line = f"{name}: {text}"
    if red and sys.stderr is not None and sys.stderr.isatty():
        line = f"{_RED}{line}{_PLAIN}"
    warnings.warn(line, PlanWarning, stacklevel=_depth())


def _depth() -> int:
    """The ``stacklevel`` of the first caller outside of TOAST."""
    here = str(pathlib.Path(__file__).parent)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        level, frame = level + 1, frame.f_back
    return level
