"""The Python API: :func:`analyze` and :func:`plan`, from a JAX function to a plan that runs."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toast import inputs, ports
from toast.analysis import Analysis, analyzed
from toast.cost import CostModel, Overlap
from toast.errors import MeshError, PlanError, SearchError, TargetError
from toast.hardware import Hardware, Mesh, check_size
from toast.inputs import AnyHardware, AnyMesh
from toast.plan import (
    Applied,
    Plan,
    Saved,
    apply_saved,
    begun,
    check_axes,
    check_program,
    make_plan,
    provenance,
    read,
    started,
)
from toast.program import Program
from toast.search import (
    DEFAULT_STAGES,
    Job,
    MeshResult,
    Round,
    SearchResult,
    Settings,
    Stage,
    begin_fixed,
    check_stages,
    find,
    noted_interrupts,
    search_meshes,
)
from toast.space import Constraints, Resolving, Space

#: Told of each stage as it begins, and of each round of the search.
Progress = Callable[[str | Round], None]


def program_of(
    target: Any, *arguments: Any, donate: int | Sequence[int] | None = (), **keywords: Any
) -> Program:
    """The program of a JAX function at example arguments, a model, or a file.

    ``target`` is a function (with its example ``arguments``: arrays or ``ShapeDtypeStruct``), a
    :class:`toast.models.Model`, a :class:`Program`, or the path of a StableHLO file (``.mlir``,
    text or bytecode) or fact base (``.lp``), or whatever else a registered frontend reads
    (:mod:`toast.ports`).  Raises :class:`toast.errors.TargetError`.
    """
    if isinstance(target, Program):
        _check_unused(target, arguments, keywords, donate=donate)
        return target
    frontend = ports.frontend_of(target)
    if frontend.takes_arguments:
        return frontend.program(target, *arguments, donate=donate, **keywords)
    _check_unused(target, arguments, keywords, donate=donate)
    return frontend.program(target)


def analyze(
    target: Any,
    *arguments: Any,
    donate: int | Sequence[int] | None = (),
    rules: Sequence[str | pathlib.Path] = (),
    progress: Progress | None = None,
    cache: Any = True,
    **keywords: Any,
) -> Analysis:
    """Names, colors, conflicts and groups of a program (paper, section 3).

    ``target``, ``arguments``, ``keywords`` and ``donate`` are as for :func:`program_of`;
    ``rules`` lists further rule files or folders.  Analyses are kept in ``~/.cache/toast``, by the
    program's content and that of the rules, unless ``cache`` is false or the environment has
    ``TOAST_CACHE=off``.  (Neither true nor false, ``cache`` is an argument of the function.)

    >>> import jax, jax.numpy as jnp, toast
    >>> x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    >>> analysis = toast.analyze(lambda x: x @ x.T, x)   # the conflict of section 3.3
    >>> analysis.counts()["conflicts"]
    2
    """
    begin = time.perf_counter()
    if progress is not None and not callable(progress):
        raise SearchError(f"progress {progress!r}: give a function of one argument")
    if progress:
        progress("lowering")
    if not isinstance(cache, bool):  # that of a decoder
        cache, keywords = True, {**keywords, "cache": cache}
    program = program_of(target, *arguments, donate=donate, **keywords)
    lowered = time.perf_counter() - begin
    found = analyzed(program, rules=rules, progress=progress or (lambda _stage: None), cache=cache)
    found.seconds["lowering"] = lowered
    return found


def plan(
    target: Any,
    *arguments: Any,
    mesh: AnyMesh | None = None,
    devices: int | None = None,
    hardware: AnyHardware,
    donate: int | Sequence[int] | None = (),
    rules: Sequence[str | pathlib.Path] = (),
    memory_bytes: float | None = None,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    resolution: Resolving = "compatible",
    start: Plan | str | pathlib.Path | None = None,
    settings: Settings | None = None,
    stages: Sequence[Stage] = DEFAULT_STAGES,
    progress: Progress | None = None,
    cache: Any = True,
    **keywords: Any,
) -> Plan:
    """The best sharding of a program that the search finds.

    ``target`` may also be an :class:`Analysis` made earlier.  ``mesh`` is a :class:`Mesh`, a
    ``jax.sharding.Mesh``, or text such as ``"data=4,model=4"``; ``hardware`` a name such as
    ``"tpu-v5e"``, a path, or a :class:`Hardware`.  ``memory_bytes`` is the limit per device
    (default: the hardware's); ``overlap`` says which collectives run beside products
    (:mod:`toast.cost.model`): ``"none"``, ``"partial"`` or ``"full"``.
    ``resolution="independent"`` resolves compatible conflicts one by one (3.5): more actions, and
    sometimes a better plan.
    ``constraints`` fix shardings (:class:`toast.Constraints`); ``start`` is an earlier plan, or its
    JSON file, of TOAST or of a baseline, that the search begins with: with its very shardings on
    the program and mesh that it was made for, with the actions that have a counterpart on others.
    The plan costs no more than that; its ``note`` says what of the start is not used.
    ``stages`` are what the search does in every round, in order: functions of a ledger and a budget
    (:class:`toast.search.Stage`).  ``cache`` is as for :func:`analyze`.

    With ``devices`` in place of ``mesh`` every mesh of so many devices is tried
    (:func:`toast.hardware.meshes_of`), and the best plan is returned, on its mesh; its ``meshes``
    say how the others did.

    Raises :class:`toast.errors.MeshError` when no dimension can use the mesh,
    :class:`toast.errors.PinError` when a constraint cannot hold,
    :class:`toast.errors.PlanError` when ``start`` is of another program, or nothing of it has a
    counterpart, and
    :class:`toast.errors.SearchError` when ``memory_bytes`` was given and nothing found fits it.

    >>> import jax, jax.numpy as jnp, toast
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> mlp = lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2
    >>> made = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512),
    ...                   mesh="data=4", hardware="tpu-v5e")
    >>> made.arguments["x"]
    (('data',), ())
    """
    machine = inputs.machine_of(hardware)
    meshes = inputs.candidate_meshes(mesh, devices, machine)
    limit = inputs.limit_of(memory_bytes, machine)
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise SearchError(
            f"settings {settings!r}: use toast.Settings, such as toast.Settings(seed=1)"
        )
    if progress is not None and not callable(progress):
        raise SearchError(f"progress {progress!r}: use a function of one argument")
    stages = check_stages(stages, settings.processes)
    saved = None if start is None else read(start)
    if isinstance(target, Analysis):
        _check_unused(target, arguments, keywords, donate=donate, rules=rules)
        analysis = target
    else:
        analysis = analyze(
            target, *arguments, donate=donate, rules=rules, progress=progress, cache=cache,
            **keywords,
        )  # fmt: skip
    seconds = dict(analysis.seconds)

    if saved:
        check_program(saved, analysis.program)
        if devices is None:
            check_axes(saved, meshes[0])
    remarks: dict[Mesh, tuple[str, ...]] = {}

    def prepare(mesh: Mesh, like: CostModel | None = None) -> Job:
        space = Space(analysis, mesh, constraints=constraints, resolution=resolution)
        _check_axes(analysis, mesh)
        at = None if saved is None else started(saved, space, resolution)
        model = CostModel(at.space if at else space, machine, overlap=overlap, like=like)
        begin_fixed(model)
        if at is None:
            return Job(model, limit, settings, stages)
        actions, remarks[mesh], lost = begun(at)
        if lost and devices is None:
            raise PlanError(f"{remarks[mesh][0]}; do not start from it")
        return Job(model, limit, settings, stages, (actions,))

    tried: tuple[MeshResult, ...] = ()
    with noted_interrupts():  # until the plan is there
        if devices is None:
            begin = time.perf_counter()
            if progress:
                progress("decision space")
            model, _, _, _, starts, _ = prepare(meshes[0])
            seconds["decision space"] = time.perf_counter() - begin
            if progress:
                progress("search")
            found = find(
                model, memory_bytes=limit, settings=settings, stages=stages, start=starts,
                progress=progress,
            )  # fmt: skip
        else:
            model, found, tried = search_meshes(meshes, prepare, settings, progress)
        seconds["search"] = found.seconds
        ended = filter(None, [", ".join(_notes(settings, found))])
        made = make_plan(
            model, found, memory_bytes=limit, seed=settings.seed, seconds=seconds,
            note="\n".join([*ended, *remarks.get(model.space.mesh, ())]), meshes=tried,
            resolution=resolution,
        )  # fmt: skip
        returned = [reshard.text for reshard in made.step_reshards]
        if returned:
            made = dataclasses.replace(made, note="\n".join(filter(None, [made.note, *returned])))
    if memory_bytes is not None and not made.fits:
        where = f"mesh {meshes[0]}" if devices is None else f"any mesh of {devices} devices"
        raise SearchError(
            f"memory limit of {limit / 2**30:.4g} GiB per device: no plan on {where} fits; "
            f"the smallest peak found is {found.smallest_peak / 2**30:.4g} GiB; raise the limit or "
            "use a larger mesh"
        )
    return made


def apply_plan(
    plan: Plan | Saved | Mapping[str, Any] | str | pathlib.Path,
    target: Any,
    *arguments: Any,
    mesh: AnyMesh | None = None,
    hardware: AnyHardware | None = None,
    memory_bytes: float | None = None,
    donate: int | Sequence[int] | None = (),
    rules: Sequence[str | pathlib.Path] = (),
    progress: Progress | None = None,
    **keywords: Any,
) -> Applied:
    """Apply an earlier plan, or its JSON file, to a program that may have changed since.

    ``target``, ``arguments``, ``keywords``, ``donate`` and ``rules`` are as for :func:`analyze`;
    ``target`` may also be an :class:`Analysis`.  ``mesh`` and ``hardware`` are those of the plan
    unless they are given; so is the limit ``memory_bytes``, unless the hardware is another.

    What matches is sharded as it was: arguments and results by their paths (layers that are new as
    those that are known), other values by the ops that make them, and what is new by the actions
    of the plan.  :class:`toast.Applied` says what did not match; its ``plan`` is priced anew.  On
    the program that the plan was made for it is the same plan.

    Raises :class:`toast.errors.PlanError` for a file that is no plan, one written by a newer TOAST,
    and where nothing matches.

    >>> import jax, jax.numpy as jnp, toast
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> mlp = lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2
    >>> shapes = f32(4096, 512), f32(512, 2048), f32(2048, 512)
    >>> made = toast.plan(mlp, *shapes, mesh="data=4", hardware="tpu-v5e")
    >>> doubled = lambda x, w1, w2: 2 * mlp(x, w1, w2)
    >>> applied = toast.apply_plan(made.to_dict(), doubled, *shapes)
    >>> applied.same_program, applied.plan.arguments["x"]
    (False, (('data',), ()))
    """
    saved = read(plan)
    if hardware is not None:
        machine = inputs.machine_of(hardware)
    else:
        machine = plan.hardware if isinstance(plan, Plan) else provenance.machine_of(saved)
    parsed = inputs.system_of(saved.mesh if mesh is None else mesh, machine)[0]
    if memory_bytes is None and machine.name == saved.hardware:
        memory_bytes = saved.memory_bytes
    limit = inputs.limit_of(memory_bytes, machine)
    if isinstance(target, Analysis):
        _check_unused(target, arguments, keywords, donate=donate, rules=rules)
        analysis = target
    else:
        analysis = analyze(
            target, *arguments, donate=donate, rules=rules, progress=progress, **keywords
        )
    return apply_saved(
        saved,
        analysis,
        mesh=parsed,
        hardware=machine,
        memory_bytes=limit,
        progress=progress,
        cache=keywords.get("cache") is not False,
    )


def _check_unused(
    target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], **options: Any
) -> None:
    """Refuse what only a function, or what is not analysed yet, has a use for."""
    unused = [f"{len(arguments)} more arguments"] if arguments else []
    unused += [name for name in keywords if name != "cache"]
    unused += [name for name, given in options.items() if given not in ((), [], None)]
    if unused:
        knobs = {field.name for field in dataclasses.fields(Settings)} & {*unused}
        remedy = f"use settings=toast.Settings({min(knobs)}=...)" if knobs else "remove it"
        kind = type(target).__name__
        raise TargetError(
            f"{', '.join(unused)}: has no effect for a target of type {kind}; {remedy}"
        )


def _notes(settings: Settings, found: SearchResult) -> list[str]:
    """What else there is to know of a search."""
    several = [f"best of {settings.restarts} searches"] if settings.restarts > 1 else []
    if found.stopped and several:
        several = [f"best of at most {settings.restarts} searches"]
    ended = {"budget": ["stopped at its budget"], "interrupt": ["interrupted"]}
    return [*several, *ended.get(found.stopped, []), *found.notes]


def check_mesh(analysis: Analysis, mesh: Mesh, machine: Hardware) -> None:
    """Raise :class:`toast.errors.MeshError` where a mesh suits no device or no dimension."""
    check_size(machine, mesh)
    _check_axes(analysis, mesh)


def small_scale(analysis: Analysis, mesh: Mesh, machine: Hardware) -> Hardware:
    """``machine`` as it looks to a program small enough to be run for proof.

    Latency, capacity and the padding of arrays are what a large program does not notice: without
    latency and padding, and with no more memory than one and a half even shares of the program, its
    plan shards as much as that of a large one.
    """
    unpadded = dataclasses.replace(machine, lanes=1)
    peak = CostModel(Space(analysis, mesh), unpadded).initial_peak
    return dataclasses.replace(
        unpadded,
        measured=(),
        memory_limit_bytes=max(1.0, 1.5 * peak / mesh.devices),
        interconnect=dataclasses.replace(
            machine.interconnect, latency_s=0.0, network_latency_s=0.0
        ),
    )


def _check_axes(analysis: Analysis, mesh: Mesh) -> None:
    """Every axis of more than one device must divide some dimension."""
    names = analysis.names
    divisors = names.divisor[names.shardable]
    for axis, size in mesh.axes:
        if size > 1 and not (divisors % size == 0).any():
            largest = int(divisors.max(initial=1))
            raise MeshError(
                f"mesh axis {axis}={size} divides no dimension of {analysis.program.name} "
                f"(the largest has {largest} elements); choose a divisor of one"
            )
