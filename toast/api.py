"""The Python API: analyzes programs, makes plans and applies earlier plans."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from toast import inputs, ports
from toast.analysis import Analysis, analyzed, lowering_of
from toast.cost import CostModel, Overlap
from toast.errors import HardwareError, MeshError, PinError, PlanError, SearchError, TargetError
from toast.frontend.shifts import with_shifts
from toast.garbage import older_objects_stay
from toast.hardware import Hardware, Mesh, check_size
from toast.inputs import AnyHardware, AnyMesh
from toast.plan import (
    MOST_ADDED,
    Applied,
    Padding,
    Plan,
    Saved,
    apply_saved,
    cache_copy_notes,
    check_axes,
    check_program,
    is_survey,
    joint_plan,
    make_plan,
    may_gain,
    memory_notes,
    misfit_note,
    misfit_proof,
    needed,
    network_notes,
    padded,
    padding_gain,
    padding_note,
    program_notes,
    provenance,
    random_bit_notes,
    read,
    saved_start,
    small_collective_notes,
    start_actions,
    with_policies,
    without_policies,
    written_ops,
)
from toast.program import (
    MemoryPolicy,
    PaddedDimension,
    Program,
    with_trip_counts,
)
from toast.search import (
    DEFAULT_STAGES,
    Job,
    MeshResult,
    Polishing,
    Round,
    SearchResult,
    Settings,
    Stage,
    TreeSearch,
    begin_with_fixed,
    check_executor,
    check_stages,
    find,
    noted_interrupts,
    search_meshes,
    with_best_policies,
)
from toast.space import Constraints, Resolving, Space, region_notes
from toast.threads import blas_in_one_thread
from toast.uneven import PaddedProgram, padded_program, padded_sizes
from toast.units import listed, size_text, time_text

#: The search that decides whether programs with padded dimensions are planned begins with the plan
#: and tries whole colors only.
_PADDING_STAGES: tuple[Stage, ...] = (TreeSearch(effort=128), Polishing())

#: Called with the name of each stage when it begins, and with each round of the search.
Progress = Callable[[str | Round], None]


def program_of(
    target: Any,
    *arguments: Any,
    donate: int | Sequence[int] | None = (),
    platform: Any = None,
    trip_counts: Any = None,
    remat: Any = None,
    microbatches: Any = None,
    **keywords: Any,
) -> Program:
    """The program of a JAX function, a model, or a file.

    :param target: a function, a ``jax.stages.Traced`` or ``Lowered``, a ``jax.export.Exported``, a
        :class:`toast.models.Model`, a :class:`Program`, the path of a StableHLO file (text or
        bytecode) or of a fact base (``.lp``), or anything that a registered frontend reads
        (:mod:`toast.ports`).
    :param arguments: example arguments of a function: pytrees of arrays or ``ShapeDtypeStruct``.
    :param donate: positions of arguments of a function whose buffers results may reuse, as in
        ``jax.jit(donate_argnums=...)``.
    :param platform: the platform to lower a function or a model for: ``"cpu"``, ``"cuda"``,
        ``"rocm"`` or ``"tpu"``.  This machine need not have it.  By default, it is that of
        ``jax.jit``.  For an ``Exported`` for several platforms, one of these.  A value that is not
        text is an argument of the function.
    :param trip_counts: the numbers of iterations of loops of which the program does not state
        them, by source location (``{"model.py:12": 100}``) or by number, or one for all
        (:func:`toast.program.with_trip_counts`).  A value that is neither a mapping nor a whole
        number is an argument of the function.
    :param remat: which residuals the program keeps, recomputes or offloads: a preset such as
        ``"full"``, a :class:`toast.MemoryPolicy` or its text.  By default, what the program says.
        A value that is neither text nor a policy, nor a function, is an argument of the function.
    :param microbatches: the number of microbatches of each ``toast.accumulate``.  A value that is
        neither a whole number nor text is an argument of the function.
    :param keywords: keyword arguments of a function.
    :raises toast.errors.TargetError: if the target cannot be read, or an option does not apply to
        it.
    """
    if not isinstance(platform, str | None):  # an argument of the function
        platform, keywords = None, {**keywords, "platform": platform}
    if not isinstance(trip_counts, Mapping | numbers.Integral | None):
        trip_counts, keywords = None, {**keywords, "trip_counts": trip_counts}
    _check_memory_options(target, remat, microbatches)
    if not isinstance(remat, str | MemoryPolicy | None):
        remat, keywords = None, {**keywords, "remat": remat}
    if not isinstance(microbatches, int | None):
        microbatches, keywords = None, {**keywords, "microbatches": microbatches}
    with traced_with(target, remat, microbatches):
        program = _program_of(target, arguments, keywords, donate, platform)
    return with_trip_counts(program, trip_counts)


@contextlib.contextmanager
def traced_with(
    target: Any, remat: str | MemoryPolicy | None, microbatches: int | None
) -> Iterator[None]:
    """Traces ``target`` in this block with a memory policy and a number of microbatches.

    Raises :class:`toast.errors.TargetError` if it is not traced, or the values are invalid.
    """
    if remat is None and microbatches is None:
        yield
        return
    chosen = {"remat": remat, "microbatches": microbatches}
    if not _traces(target):
        name = next(name for name, value in chosen.items() if value is not None)
        raise TargetError(_untraced(name, chosen[name], target))
    from toast.frontend import memory_tracing
    from toast.frontend.microbatches import check_microbatches

    check_microbatches(microbatches)
    policy = MemoryPolicy.parse(remat) if isinstance(remat, str) else remat
    with memory_tracing.requested(policy, microbatches):
        yield


def _check_memory_options(target: Any, remat: Any, microbatches: Any) -> None:
    """Raises :class:`toast.errors.TargetError` for what neither a plan nor a function can take."""
    if callable(remat) and not isinstance(remat, MemoryPolicy):
        raise TargetError(
            f"remat={getattr(remat, '__name__', remat)!r}: a policy of JAX belongs to a "
            "jax.checkpoint of the program; use a preset such as 'full', names of values, or 'auto'"
        )
    if not isinstance(remat, str | MemoryPolicy | None) and not _takes(target, "remat"):
        raise TargetError(
            f"remat={remat!r}: use a preset such as 'full', names of values, or 'auto'"
        )
    if isinstance(microbatches, str):
        raise TargetError(
            f"microbatches={microbatches!r}: use a number; without one, remat='auto' chooses it"
        )


def _takes(target: Any, keyword: str) -> bool:
    """Whether a function may have an argument of this name."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == keyword or p.kind is p.VAR_KEYWORD for p in parameters)


def _untraced(name: str, value: Any, target: Any) -> str:
    kind = type(target).__name__
    return (
        f"{name}={value!r}: needs a function that can be traced again, not a {kind}; pass the "
        "function itself"
    )


def _traces(target: Any) -> bool:
    """Whether the program of a target is traced, so that it may have another memory policy."""
    if isinstance(target, Program):
        return False
    return bool(getattr(ports.frontend_of(target), "traces", False))


def _program_of(
    target: Any,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    donate: int | Sequence[int] | None,
    platform: str | None,
) -> Program:
    """:func:`program_of`, before the user's trip counts."""
    frontend = None if isinstance(target, Program) else ports.frontend_of(target)
    takes_platform = getattr(frontend, "takes_platform", False)
    if isinstance(platform, ports.HardwarePlatform) and not (platform and takes_platform):
        platform = None  # a file, for example, is lowered already
    if frontend is None:
        _check_unused(target, arguments, keywords, donate=donate, platform=platform)
        return cast(Program, target)
    chosen = {"platform": platform} if platform and takes_platform else {}
    unused = {} if chosen else {"platform": platform}
    if frontend.takes_arguments:
        if platform and not chosen:
            _check_unused(target, (), {}, platform=platform)
        return frontend.program(target, *arguments, donate=donate, **chosen, **keywords)
    _check_unused(target, arguments, keywords, donate=donate, **unused)
    return frontend.program(target, **chosen)


def analyze(
    target: Any,
    *arguments: Any,
    donate: int | Sequence[int] | None = (),
    platform: Any = None,
    trip_counts: Any = None,
    rules: Sequence[str | pathlib.Path] = (),
    progress: Progress | None = None,
    cache: Any = True,
    lowering: Any = "xla",
    remat: Any = None,
    microbatches: Any = None,
    **keywords: Any,
) -> Analysis:
    """Computes the names, colors, conflicts and groups of a program (paper, section 3).

    :param target: the program, with ``arguments``, ``keywords``, ``donate``, ``platform``,
        ``trip_counts``, ``remat`` and ``microbatches`` as for :func:`program_of`.
    :param rules: further rule files, or folders of rule files.
    :param progress: a function that is called with the name of each stage when it begins.
    :param cache: whether to use the cache in ``~/.cache/toast``, whose entries are keyed by the
        contents of the program and the rules.  ``TOAST_CACHE=off`` in the environment disables it.
        A value that is not a boolean is an argument of the function.
    :param lowering: what will partition the program: ``"xla"`` from annotations, or ``"local"``,
        TOAST's own lowering (:meth:`Plan.lowered`).  A value that is not text is an argument of the
        function.
    :raises toast.errors.ToastError: if the program cannot be read, a rule file is invalid, or an
        op has no rule.

    >>> import jax, jax.numpy as jnp, toast
    >>> x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    >>> analysis = toast.analyze(lambda x: x @ x.T, x)   # the conflict of section 3.3
    >>> analysis.counts()["conflicts"]
    2
    """
    begin = time.perf_counter()
    if progress is not None and not callable(progress):
        raise SearchError(f"progress {progress!r}: use a function of one argument")
    if progress:
        progress("lowering")
    if not isinstance(cache, bool):  # an argument of the function, such as the cache of a decoder
        cache, keywords = True, {**keywords, "cache": cache}
    if not isinstance(lowering, str):
        lowering, keywords = "xla", {**keywords, "lowering": lowering}
    lowering = lowering_of(lowering)
    with older_objects_stay():
        program = program_of(
            target, *arguments, donate=donate, platform=platform, trip_counts=trip_counts,
            remat=remat, microbatches=microbatches, **keywords,
        )  # fmt: skip
        if lowering == "local":
            program = with_shifts(program)
    lowered = time.perf_counter() - begin
    with older_objects_stay():
        analysis = analyzed(
            program, rules=rules, progress=progress or (lambda _stage: None), cache=cache,
            lowering=lowering,
        )  # fmt: skip
    analysis.seconds["lowering"] = lowered
    return analysis


def plan(
    target: Any,
    *arguments: Any,
    mesh: AnyMesh | None = None,
    devices: int | None = None,
    hardware: AnyHardware,
    donate: int | Sequence[int] | None = (),
    platform: Any = None,
    trip_counts: Any = None,
    rules: Sequence[str | pathlib.Path] = (),
    memory_bytes: float | None = None,
    safety: float | None = None,
    overlap: Overlap = "partial",
    constraints: Constraints | None = None,
    resolution: Resolving = "compatible",
    uneven: float | None = None,
    start: Plan | str | pathlib.Path | None = None,
    settings: Settings | None = None,
    stages: Sequence[Stage] = DEFAULT_STAGES,
    progress: Progress | None = None,
    executor: Any = None,
    cache: Any = True,
    lowering: Any = "xla",
    remat: Any = None,
    microbatches: Any = None,
    confirm: Any = False,
    **keywords: Any,
) -> Plan:
    """Searches for the best sharding of a program.

    :param target: the program, with ``arguments``, ``keywords``, ``donate`` and ``platform`` as for
        :func:`program_of`, or an :class:`Analysis`.
    :param mesh: a :class:`Mesh`, a ``jax.sharding.Mesh``, or text such as ``"data=4,model=4"``.
    :param devices: instead of ``mesh``, a number of devices.  All meshes of this size are searched
        (:func:`toast.hardware.meshes_of`); the best plan is returned, and its ``meshes`` contain
        the results of all.
    :param hardware: a name such as ``"tpu-v5e"``, the path of a hardware file, or a
        :class:`Hardware`.
    :param rules: further rule files, or folders of rule files.
    :param memory_bytes: the memory limit per device; by default that of the hardware.
    :param safety: the odds, such as 0.95, with which XLA's peak must be within the limit.  By
        default, the predicted peak must, and the odds are those of :attr:`Plan.after`.
    :param overlap: which collectives run beside products (:mod:`toast.cost.model`): ``"none"``,
        ``"partial"``, ``"gathers"``, ``"asynchronous"`` or ``"full"``.
    :param constraints: shardings that the plan must have (:class:`toast.Constraints`).
    :param resolution: ``"independent"`` resolves compatible conflicts one by one (section 3.5):
        there are more actions, and sometimes a better plan.
    :param uneven: the largest share of elements that padding may add to a dimension that the axes
        do not divide (a half by default).  If a search for what padding would gain finds a
        twentieth, programs with padded dimensions are planned as well, and the best plan is
        returned; :attr:`Plan.padding` has what it pads.  Arguments and results keep their shapes.
        With 0, nothing is padded.
    :param start: an earlier plan or baseline, or its JSON file, with which the search begins.  The
        result costs no more.  For the same program and mesh the search begins with its exact
        shardings, for others with those of its actions that have a counterpart; the ``note`` of the
        result lists the rest.
    :param settings: the settings of the search (:class:`toast.Settings`).
    :param stages: the stages of each round of the search, in order
        (:class:`toast.search.Stage`).
    :param progress: a function that is called with the name of each stage when it begins, and with
        each :class:`toast.search.Round` of the search.
    :param executor: a ``concurrent.futures.Executor``, such as that of a cluster, which runs the
        searches of several meshes or restarts.  The plan is the same as without.  If it fails, the
        search goes on in this process, and the ``note`` of the result says so.
    :param cache: as for :func:`analyze`.
    :param lowering: as for :func:`analyze`.  With ``"local"``, the plan may also shard what XLA
        computes wrongly, such as images along space and channels at once, and :meth:`Plan.jit` runs
        the device-local program.
    :param remat: as for :func:`program_of`, or ``"auto"``: policies and shardings are chosen
        together (:mod:`toast.plan.joint_memory`), and the plan with the shortest step that fits is
        returned.
    :param microbatches: as for :func:`program_of`.  Without a number, ``remat="auto"`` chooses one
        if nothing fits without, or if that takes less time than to recompute.
    :param confirm: whether XLA's TPU compiler confirms that the plan fits, which needs ``libtpu``
        but no TPU.  If it needs more memory than there is, the program is planned again within
        less (:func:`toast.evaluation.confirmed.confirmed_plan`).  An array or a structure of arrays
        is an argument of the function.
    :raises toast.errors.HardwareError: if ``remat`` offloads to the host, and the hardware has no
        link to one; or if it has no compiler that could ``confirm`` the plan.
    :raises toast.errors.MeshError: if an axis of the mesh divides no dimension, or the system is
        smaller than the mesh.
    :raises toast.errors.PinError: if a constraint cannot hold.
    :raises toast.errors.PlanError: if ``start`` belongs to another program, or none of its actions
        has a counterpart.
    :raises toast.errors.SearchError: if ``memory_bytes`` is set and the search finds no plan that
        fits.

    >>> import jax, jax.numpy as jnp, toast
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> mlp = lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2
    >>> plan = toast.plan(mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512),
    ...                   mesh="data=4", hardware="tpu-v5e")
    >>> plan.arguments["x"]
    (('data',), ())
    """
    machine = inputs.machine_of(hardware)
    meshes = inputs.candidate_meshes(mesh, devices, machine)
    limit = inputs.limit_of(memory_bytes, machine)
    safety = inputs.safety_of(safety)
    share = inputs.uneven_share(uneven)
    settings = Settings() if settings is None else settings
    if not isinstance(settings, Settings):
        raise SearchError(
            f"settings {settings!r}: use toast.Settings, such as toast.Settings(seed=1)"
        )
    if progress is not None and not callable(progress):
        raise SearchError(f"progress {progress!r}: use a function of one argument")
    executor = check_executor(executor)
    stages = check_stages(stages, 2 if executor else settings.processes)
    saved = None if start is None else read(start)
    _check_memory_options(target, remat, microbatches)
    if confirm is None or isinstance(confirm, int | float | str):
        if not isinstance(confirm, bool):
            raise PlanError(f"confirm={confirm!r}: use True or False")
    else:
        keywords, confirm = {**keywords, "confirm": confirm}, False
    again = functools.partial(
        plan, target, *arguments, mesh=mesh, devices=devices, hardware=machine, donate=donate,
        platform=platform, trip_counts=trip_counts, rules=rules, memory_bytes=memory_bytes,
        safety=safety, overlap=overlap, constraints=constraints, resolution=resolution,
        uneven=uneven, start=start, settings=settings, stages=stages, progress=progress,
        executor=executor, cache=cache, lowering=lowering, remat=remat, microbatches=microbatches,
        **keywords,
    )  # fmt: skip
    if confirm:
        return cast(Plan, ports.confirmation()(
            lambda within: again(memory_bytes=within), machine, memory_bytes, progress
        ))  # fmt: skip
    if remat == "auto" and not isinstance(target, Analysis):
        if not _traces(target):
            raise TargetError(_untraced("remat", "auto", target))
        with traced_with(target, "none", microbatches):
            pass  # raises errors
        own_start, own_count = start, microbatches

        def planned(
            policy: str | MemoryPolicy, /, start: Plan | None = None,
            microbatches: int | None = None,
        ) -> Plan:  # fmt: skip
            return again(
                remat=policy, start=start or own_start, microbatches=microbatches or own_count,
                executor=None,
            )  # fmt: skip

        with blas_in_one_thread():
            return joint_plan(planned, progress, may_cut_batch=microbatches is None)
    if isinstance(target, Analysis):
        _check_unused(
            target, arguments, keywords, donate=donate, rules=rules, platform=platform,
            trip_counts=trip_counts, lowering=None if lowering == "xla" else lowering,
            remat=remat, microbatches=microbatches,
        )  # fmt: skip
        analysis = target
    else:
        analysis = analyze(
            target, *arguments, donate=donate, platform=platform_of(platform, machine),
            trip_counts=trip_counts, rules=rules, progress=progress, cache=cache,
            lowering=lowering, remat=remat, microbatches=microbatches, **keywords,
        )  # fmt: skip
    check_host_link(analysis.program, machine)
    seconds = dict(analysis.seconds)
    #: The survey that chose the policy of this program, and what the policy makes of the survey.
    surveyed = start if isinstance(start, Plan) and is_survey(start.analysis.program) else None
    written = None
    if is_survey(analysis.program):
        stages = with_best_policies(stages)

    if saved:
        check_program(saved, analysis.program)
        if devices is None:
            check_axes(saved, meshes[0])
        if surveyed is not None and not is_survey(analysis.program):
            written = written_ops(surveyed, analysis.program)
    remarks: dict[Mesh, tuple[str, ...]] = {}

    def prepare(mesh: Mesh, like: CostModel | None = None) -> Job:
        space = Space(analysis, mesh, constraints=constraints, resolution=resolution)
        _check_axes(analysis, mesh, share if devices is None else 0)
        at = None
        if saved is not None:
            at = saved_start(
                saved, space, resolution, recomputed=surveyed is not None, written=written
            )
        model = CostModel(
            at.space if at else space, machine, overlap=overlap, like=like, safety=safety
        )
        begin_with_fixed(model)
        model = with_policies(model, limit)
        if at is None:
            return Job(model, limit, settings, stages)
        begun = start_actions(at)
        if begun.lost and devices is None:
            raise PlanError(f"{begun.notes[0]}; start from another plan")
        if not surveyed:
            remarks[mesh] = begun.notes
        return Job(model, limit, settings, stages, begun.starts)

    options: dict[str, Any] = {
        "overlap": overlap, "resolution": resolution, "settings": settings, "stages": stages,
        "memory_bytes": limit, "safety": safety, "constraints": constraints,
        "progress": progress, "executor": executor,
    }  # fmt: skip
    tried: tuple[MeshResult, ...] = ()
    # Until the plan is complete:
    with noted_interrupts(), older_objects_stay(), blas_in_one_thread():
        begin = time.perf_counter()
        if devices is None:
            if progress:
                progress("decision space")
            try:
                model, _, _, _, starts, _ = prepare(meshes[0])
            except PinError:  # padding may let an annotation or the pin of a named value hold
                forced = _padded_plan(
                    None, analysis, meshes[0], machine, share, (), begin, start=None, **options
                ) if share else None  # fmt: skip
                if forced is None:
                    raise
                _check_memory(forced, memory_bytes, forced.after.peak_bytes, meshes, devices)
                return forced
            seconds["decision space"] = time.perf_counter() - begin
            begin = time.perf_counter()
            if progress:
                progress("search")
            result = find(
                model, memory_bytes=limit, settings=settings, stages=stages, start=starts,
                progress=progress, executor=executor,
            )  # fmt: skip
        else:
            model, result, tried = search_meshes(meshes, prepare, settings, progress, executor)
        seconds["search"] = result.seconds
        ended = [
            *filter(None, [", ".join(_notes(settings, result))]),
            *region_notes(analysis.program, model.space.full_mesh),
            *_foreign_axes(analysis, model.space.full_mesh),
            *network_notes(machine, model.space.full_mesh),
        ]
        best = make_plan(
            without_policies(model), result, memory_bytes=limit, seed=settings.seed,
            seconds=seconds,
            note="\n".join([
                *ended, *remarks.get(model.space.full_mesh, ()),
                *program_notes(analysis),
            ]), meshes=tried,
            resolution=resolution,
        )  # fmt: skip
        more = [
            *(reshard.text for reshard in best.step_reshards),
            *small_collective_notes(best.transfers, best.after.step_seconds),
            *random_bit_notes(best),
            *cache_copy_notes(best),
        ]
        # Without padding, the note has its result, which no search of a padded program improves.
        gain = _padding_gain(
            best, share or MOST_ADDED, settings, overlap,
            searching=begin, stages=_PADDING_STAGES if share else stages,
        )  # fmt: skip
        lines = [*memory_notes(best), best.note, *more]
        best = dataclasses.replace(best, note="\n".join(filter(None, lines)))
    if not best.fits and not is_survey(analysis.program):
        lines = [best.note, misfit_note(best), misfit_proof(best)]
        best = dataclasses.replace(best, note="\n".join(filter(None, lines)))
    kept = saved.padding if saved and not analysis.program.padding else ()
    if share and (gain or kept) and result.stopped != "interrupt":
        best = _padded_plan(
            best, analysis, best.mesh, machine, share, kept, begin,
            start=start if kept else None, **options,
        ) or best  # fmt: skip
    if not best.padding:
        _check_axes(best.analysis, best.mesh, share, found=best)
    if gain and gain.small and best.padding == analysis.program.padding:
        best = dataclasses.replace(best, note="\n".join(filter(None, [best.note, gain.text])))
    if not is_survey(analysis.program):
        _check_memory(best, memory_bytes, result.smallest_peak, meshes, devices)
    return best


def check_host_link(program: Program, machine: Hardware) -> None:
    """Raises :class:`toast.errors.HardwareError` if a policy offloads and there is no host link."""
    policy = program.memory and program.memory.policy
    if policy and policy.offloads and not machine.has_host_link:
        moved = (f"{b.block}: offload={','.join(b.offload)}" for b in policy.blocks if b.offload)
        raise HardwareError(
            f"remat {policy.preset or '; '.join(moved)}: the file of "
            f"{machine.name} has no [host] with the speed of the link to the memory of the host; "
            "keep or recompute these values, or add [host] to the file"
        )


def apply_plan(
    plan: Plan | Saved | Mapping[str, Any] | str | pathlib.Path,
    target: Any,
    *arguments: Any,
    mesh: AnyMesh | None = None,
    hardware: AnyHardware | None = None,
    memory_bytes: float | None = None,
    safety: float | None = None,
    donate: int | Sequence[int] | None = (),
    platform: Any = None,
    trip_counts: Any = None,
    rules: Sequence[str | pathlib.Path] = (),
    progress: Progress | None = None,
    remat: Any = None,
    microbatches: Any = None,
    **keywords: Any,
) -> Applied:
    """Applies an earlier plan to a program that may have changed.

    Arguments and results keep the shardings of their paths (new layers get those of known layers),
    and other values those of the ops that define them.  New ops are sharded by the actions of the
    plan.

    :param plan: a plan, its data or its JSON file.
    :param target: the program, with ``arguments``, ``keywords``, ``donate``, ``platform`` and
        ``rules`` as for :func:`analyze`, or an :class:`Analysis`.
    :param mesh: as for :func:`plan`; by default that of the plan.
    :param hardware: as for :func:`plan`; by default that of the plan.
    :param memory_bytes: the memory limit per device; by default that of the plan, or of another
        ``hardware``.
    :param safety: as for :func:`plan`; by default that of the plan.
    :param progress: a function that is called with the name of each stage when it begins.
    :param remat: as for :func:`program_of`; by default the policy of the plan.
    :param microbatches: as for :func:`program_of`; by default those of the plan.
    :returns: the new plan with new prices, and what did not match.  For the program of the plan, it
        is the same plan.
    :raises toast.errors.PlanError: if the file is not a plan, a newer TOAST wrote it, or the
        program has none of its arguments.

    >>> import jax, jax.numpy as jnp, toast
    >>> f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    >>> mlp = lambda x, w1, w2: jax.nn.relu(x @ w1) @ w2
    >>> shapes = f32(4096, 512), f32(512, 2048), f32(2048, 512)
    >>> plan = toast.plan(mlp, *shapes, mesh="data=4", hardware="tpu-v5e")
    >>> doubled = lambda x, w1, w2: 2 * mlp(x, w1, w2)
    >>> applied = toast.apply_plan(plan.to_dict(), doubled, *shapes)
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
    safety = inputs.safety_of(saved.safety if safety is None else safety)
    if isinstance(target, Analysis):
        _check_unused(
            target, arguments, keywords, donate=donate, rules=rules, platform=platform,
            trip_counts=trip_counts, remat=remat, microbatches=microbatches,
        )  # fmt: skip
        analysis = target
    else:
        if saved.memory is not None and _traces(target):
            remat = saved.memory.policy if remat is None else remat
            microbatches = saved.memory.microbatches if microbatches is None else microbatches
        analysis = analyze(
            target, *arguments, donate=donate, platform=platform_of(platform, machine),
            trip_counts=trip_counts, rules=rules, progress=progress, remat=remat,
            microbatches=microbatches, **keywords,
        )  # fmt: skip
    check_host_link(analysis.program, machine)
    return apply_saved(
        saved,
        analysis,
        mesh=parsed,
        hardware=machine,
        memory_bytes=limit,
        safety=safety,
        progress=progress,
        cache=keywords.get("cache") is not False,
    )


def machine_of_plan(plan: str | pathlib.Path) -> Hardware:
    """The hardware of a plan's file; raises :class:`toast.errors.ToastError`."""
    return provenance.machine_of(read(plan))


def platform_of(platform: Any, machine: Hardware) -> Any:
    """The user's platform, or that of the hardware."""
    return ports.HardwarePlatform.of(machine) if platform is None else platform


def _check_unused(
    target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], **options: Any
) -> None:
    """Refuses arguments and options that only apply to functions, or before the analysis."""
    unused = [f"{len(arguments)} more arguments"] if arguments else []
    unused += [name for name in keywords if name != "cache"]
    unused += [name for name, value in options.items() if value not in ((), [], None)]
    if unused:
        knobs = {field.name for field in dataclasses.fields(Settings)} & {*unused}
        remedy = f"use settings=toast.Settings({min(knobs)}=...)" if knobs else "remove it"
        kind = type(target).__name__
        raise TargetError(
            f"{', '.join(unused)}: has no effect for a target of type {kind}; {remedy}"
        )


def _notes(settings: Settings, result: SearchResult) -> list[str]:
    """Remarks on a search: the number of restarts, and why it ended early."""
    several = [f"best of {settings.restarts} searches"] if settings.restarts > 1 else []
    if result.stopped and several:
        several = [f"best of at most {settings.restarts} searches"]
    ended = {"budget": ["stopped at its budget"], "interrupt": ["interrupted"]}
    return [*several, *ended.get(result.stopped, []), *result.notes]


def _check_memory(
    best: Plan,
    memory_bytes: float | None,
    smallest_peak: float,
    meshes: Sequence[Mesh],
    devices: int | None,
) -> None:
    """Refuses a plan that needs more memory than the user allows."""
    if memory_bytes is None or best.fits:
        return
    where = f"mesh {meshes[0]}" if devices is None else f"any mesh of {devices} devices"
    surely = "" if best.safety is None else f" with odds of {100 * best.safety:g} %"
    # A policy other than "none" recomputes something already.
    recomputes = best.policy is not None and best.policy.preset != "none"
    auto, shell = ("", "") if recomputes else ("remat='auto', ", "--remat auto, ")
    error = SearchError(
        f"memory limit of {size_text(best.memory_bytes)} per device: no plan on {where} "
        f"fits{surely}; "
        f"the smallest peak found is {size_text(smallest_peak)}; raise the limit, or find "
        f"what fits: {auto}toast.fit(find='batch') or toast.fit(find='devices')",
        shell=f"raise the limit, or find what fits: {shell}--fit batch or --fit devices",
    )
    error.plan, error.smallest_peak = best, smallest_peak
    raise error


def _can_be_padded(program: Program) -> bool:
    """Whether a program has a module, and no code for single devices."""
    regions = any(signature.kind.startswith("manual_") for signature in program.signatures)
    return program.source is not None and hasattr(program.source, "operations") and not regions


#: The most padded dimensions of which subsets are planned.
_MOST_SUBSETS = 3


def _padded_plan(
    whole: Plan | None,
    original: Analysis,
    mesh: Mesh,
    machine: Hardware,
    share: float,
    kept: tuple[PaddedDimension, ...],
    searching: float,
    *,
    start: Any,
    settings: Settings,
    memory_bytes: float,
    constraints: Constraints | None,
    **parameters: Any,
) -> Plan | None:
    """The best plan of the program with padded dimensions; ``None`` if ``whole`` is as good.

    ``whole`` is the plan of the program without padding, or ``None`` if there is none.  Padding may
    pay for some dimensions only.  All are padded first, or those of the plan that the search starts
    from (``kept``); then those alone that the best plan needs; then, one after the other, is left
    out what makes the plan better.  ``searching`` is when the search of ``whole`` began, on the
    clock of ``time.perf_counter``; the other parameters are those of :func:`plan`.
    """
    if not _can_be_padded(original.program) or original.program.padding:
        return None
    machine = dataclasses.replace(machine, memory_limit_bytes=memory_bytes)
    known: dict[frozenset[PaddedDimension], tuple[Plan, PaddedProgram] | None] = {}

    def planned(only: Sequence[PaddedDimension] | None) -> tuple[Plan, PaddedProgram] | None:
        if only is not None and (not only or frozenset(only) in known):
            return known.get(frozenset(only))
        left = settings.budget
        if left is not None:
            left -= time.perf_counter() - searching
            if left <= 0 and only != kept:
                return None
        larger = padded_program(original, mesh, share, only=only)
        if larger is None:
            return None
        key, found = frozenset(larger.program.padding), None
        if key in known:
            return known[key]
        analysis = analyzed(
            larger.program, rules=original.rule_files, lowering=original.lowering,
            progress=parameters["progress"] or (lambda _: None),
        )  # fmt: skip
        limited = settings if left is None else dataclasses.replace(settings, budget=max(0.0, left))
        try:
            found = plan(
                analysis, mesh=mesh, hardware=machine, uneven=0, settings=limited,
                start=start if only == kept else None, constraints=constraints, **parameters,
            ), larger  # fmt: skip
        except (PinError, MeshError):  # constraints may name what padding replaces
            found = None
        known[key] = found
        return found

    def rank(candidate: Plan) -> tuple[bool, float]:
        price = candidate.after
        return not candidate.fits, price.step_seconds if candidate.fits else price.peak_bytes

    best = planned(kept or None)
    while best is not None:
        dimensions = best[1].program.padding
        used = needed(*best, original)
        subsets = [used]
        if len(used) <= _MOST_SUBSETS:
            subsets += [tuple(d for d in used if d != left_out) for left_out in used]
        others = [
            other for subset in subsets if subset != dimensions and (other := planned(subset))
        ]
        better = min(others, key=lambda other: rank(other[0]), default=None)
        if better is None or rank(better[0]) > rank(best[0]):
            break
        if rank(better[0]) == rank(best[0]) and len(better[1].dimensions) >= len(dimensions):
            break
        best = better
    if best is None or (whole is not None and rank(whole) <= rank(best[0])):
        return None
    chosen, larger = best
    note = "\n".join(filter(None, [padding_note(chosen, larger, original, whole), chosen.note]))
    return dataclasses.replace(chosen, note=note, meshes=whole.meshes if whole else ())


def _padding_gain(
    best: Plan, share: float, settings: Settings, overlap: Overlap, *,
    searching: float, stages: Sequence[Stage],
) -> Padding | None:  # fmt: skip
    """What padding would gain, by one round of ``stages`` from the plan, in the time that is left.

    ``share`` is the largest share of elements that padding may add to a dimension.  ``searching``
    is when the search began, on the clock of ``time.perf_counter``.
    """

    def left() -> float | None:
        end = None if settings.budget is None else searching + settings.budget
        return None if end is None else max(0.0, end - time.perf_counter())

    larger = None if left() == 0 else padded(best.analysis, best.mesh, share)
    if larger is None:
        return None
    space = Space(
        larger, best.model.space.full_mesh, constraints=best.constraints,
        resolution=best.resolution,
    )  # fmt: skip
    model = CostModel(
        space, best.hardware, overlap=overlap, like=best.model, safety=best.safety
    )  # fmt: skip
    begin_with_fixed(model)
    if not may_gain(model, best.cost):
        return None
    once = dataclasses.replace(settings, rounds=1, restarts=1, processes=1, budget=left())
    # Sizes may distinguish op classes; refinements, which name op classes, are then left out.
    same = bool((space.classes.of_op == best.model.space.classes.of_op).all())
    result = find(
        model, memory_bytes=best.memory_bytes, settings=once, stages=stages,
        start=[tuple(action for action in best.actions if same or not action.part)],
    )  # fmt: skip
    prices = model.price(result.state[None])
    return padding_gain(
        model, result.state,
        seconds=(best.after.step_seconds, float(prices.seconds[0])),
        peaks=(best.after.peak_bytes, float(prices.peak_bytes[0])),
        costs=(best.cost, float(model.cost(prices, best.memory_bytes)[0])),
    )  # fmt: skip


def _foreign_axes(analysis: Analysis, mesh: Mesh) -> list[str]:
    """A note if the program's own shardings name axes that the mesh does not have."""
    own = analysis.program.constraints.values()
    named = dict.fromkeys(axis for spec in own for axes in spec for axis in axes or ())
    foreign = [axis for axis in named if axis not in mesh.names]
    if not foreign:
        return []
    return [
        f"the program's own shardings name axes that mesh {mesh} does not have "
        f"({listed(foreign)}): the plan replaces all of them; to keep them, name the mesh's axes "
        "as the program does, and use keep=True or --keep-constraints"
    ]


def check_mesh(analysis: Analysis, mesh: Mesh, machine: Hardware) -> None:
    """Checks that a mesh fits the hardware and the program.

    Raises :class:`toast.errors.MeshError` if it is larger than the system, or one of its axes
    divides no dimension.
    """
    check_size(machine, mesh)
    _check_axes(analysis, mesh)


def small_scale(analysis: Analysis, mesh: Mesh, machine: Hardware) -> Hardware:
    """``machine``, scaled down for a small program, so that its plan shards as much as a large one.

    A large program hardly depends on latency, also that of kernels, on measured collectives and on
    the padding of arrays; these are removed.  The memory limit becomes one and a half times an even
    share of the program's peak.
    """
    unpadded = dataclasses.replace(machine, lanes=1)
    peak = CostModel(Space(analysis, mesh), unpadded).initial_peak
    return dataclasses.replace(
        unpadded,
        measured=(),
        product_latency_s=0.0,
        kernel_latency_s=0.0,
        memory_limit_bytes=max(1.0, 1.5 * peak / mesh.devices),
        interconnect=dataclasses.replace(
            machine.interconnect, latency_s=0.0, network_latency_s=0.0
        ),
        networks=tuple(dataclasses.replace(n, latency_s=0.0) for n in machine.networks),
    )


def _check_axes(
    analysis: Analysis, mesh: Mesh, share: float = 0.0, *, found: Plan | None = None
) -> None:
    """Checks that every axis of more than one device divides some dimension, perhaps padded.

    ``share`` is the largest share of elements that padding may add.  With the plan that a search
    has ``found``, which pads nothing, dimensions count as they are.
    """
    names = analysis.names
    sizes = names.divisor[names.shardable]
    larger = padded_sizes(analysis, mesh, share)[names.shardable] if share else sizes
    divisors = sizes if found else np.concatenate([sizes, larger])
    for axis, size in mesh.axes:
        if size == 1 or (divisors % size == 0).any():
            continue
        padding, force = "", ""
        if found and _can_be_padded(analysis.program) and (larger % size == 0).any():
            force = ", or pad the arrays in the program"
            padding = (
                "; padding is possible, but does not pay: a step takes "
                f"{time_text(found.after.step_seconds)} without this axis, and the search found no "
                "better padded plan"
            )
        largest = int(divisors.max(initial=1))
        remedy = f"choose an axis whose size divides a dimension{force}"
        if largest == 1:
            remedy = "nothing of it can be sharded; run it with jax.jit"
        raise MeshError(
            f"mesh axis {axis}={size} divides no dimension of {analysis.program.name} "
            f"(the largest has {largest} element{'s' * (largest > 1)}){padding}; {remedy}"
        )
