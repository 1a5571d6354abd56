"""Shared by all commands: the console, one-line errors, TARGET and its options."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import inspect
import os
import pathlib
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from toast.boundary.printable import printable, shortened
from toast.boundary.regular_files import is_regular
from toast.errors import TargetError, ToastError
from toast.ports import HardwarePlatform
from toast.units import gib_of

if TYPE_CHECKING:
    import rich.console

    from toast.analysis import Analysis, Lowering
    from toast.evaluation.compare import MethodResult
    from toast.hardware import Hardware
    from toast.plan import Origin
    from toast.program import MemoryPolicy, Program

Target = Annotated[
    str,
    typer.Argument(
        help="Model name (see toast models), StableHLO file, fact base (.lp), module:function or "
        "file.py:function; toast export, report, explain and query also take a plan's JSON file."
    ),
]
MeshOption = Annotated[
    str,
    typer.Option(
        "--mesh",
        help="Mesh axes and sizes: data=4,model=4; append @model,data to make data the innermost "
        "axis. Axes slice, dcn and dcn_* go over the network that joins slices.",
    ),
]


#: The line that the hardware of the command is a default, until it is printed.
_default_line: contextvars.ContextVar[str] = contextvars.ContextVar("default_line", default="")


def _say_default(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Tell the user that the hardware is a default.

    At a terminal now, before the work; elsewhere after it (:func:`_errors`), as an error is one
    line.
    """
    source = context.get_parameter_source(str(parameter.name))
    is_default = source is not None and source.name == "DEFAULT"
    if is_default and _is_used(context):
        line = f"hardware {value} by default; use --hardware for another"
        if sys.stderr.isatty():
            print(line, file=sys.stderr)
        else:
            _default_line.set(line)
    return value


def _say_default_last() -> None:
    """Print what :func:`_say_default` has left for the end."""
    if line := _default_line.get():
        with contextlib.suppress(OSError, ValueError):  # as of other lines
            print(line, file=sys.stderr)


def _is_used(context: typer.Context) -> bool:
    """Whether the hardware of a command is used: a plan has its own, and a query may need none."""
    from toast.files import is_plan

    target = context.params.get("target")
    if isinstance(target, str) and is_plan(target):
        return False
    return context.info_name != "query" or context.params.get("mesh") is not None


HardwareOption = Annotated[
    str,
    typer.Option(
        "--hardware",
        help="Device name (see toast hardware list) or hardware file.",
        callback=_say_default,
    ),
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        help="Type of an argument of module:function, such as f32[8,4], or f32[batch,4] with "
        "--batch 8; repeatable.",
    ),
]
DonateOption = Annotated[
    list[int] | None,
    typer.Option(
        "--donate",
        min=0,
        help="Position of an argument that results may overwrite, from 0; repeatable.",
    ),
]
PlatformOption = Annotated[
    str | None,
    typer.Option(
        "--platform",
        help="Platform to lower a model or a function for: cpu, cuda, rocm or tpu. This machine "
        "need not have it. Default: that of the hardware, or of jax.jit here.",
    ),
]
TripCountOption = Annotated[
    list[str] | None,
    typer.Option(
        "--trip-count",
        metavar="PLACE=N",
        help="Iterations of a loop whose number is unknown, by source location or number, such as "
        "model.py:12=100, 0=100, or *=100 for all of them; repeatable.",
    ),
]
RematOption = Annotated[
    str | None,
    typer.Option(
        "--remat",
        help="What the backward pass recomputes: none, full, a policy of MaxText such as minimal "
        "or save_qkv_proj, or names: 'layer: keep=query,key offload=gate' (layer[:12]: for its "
        "first 12 runs). toast plan also takes auto, which chooses it together with the sharding. "
        "Default: what the program says.",
    ),
]
MicrobatchesOption = Annotated[
    int | None,
    typer.Option(
        "--microbatches",
        help="Number of microbatches of each toast.accumulate in the step, which adds up their "
        "gradients. Default: what the program says.",
    ),
]
RulesOption = Annotated[
    list[pathlib.Path] | None,
    typer.Option("--rules", help="Additional rule file, or folder of rule files; repeatable."),
]
JsonOption = Annotated[
    pathlib.Path | None,
    typer.Option("--json", help="Write all results to this JSON file; - is standard output."),
]
ReportOption = Annotated[
    pathlib.Path | None,
    typer.Option("--report", help="Write an HTML report to this file; it opens offline."),
]
TraceOption = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--trace",
        help="Write the step's timeline to this file, for ui.perfetto.dev or chrome://tracing.",
    ),
]
SourcesOption = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--sources",
        exists=True,
        file_okay=False,
        help="In the report, quote source lines from this folder (for a program from a file).",
    ),
]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Number of layers.")]
SequenceOption = Annotated[int | None, typer.Option("--sequence", help="Sequence length.")]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Batch size.")]
EdgesOption = Annotated[int | None, typer.Option("--edges", help="Number of graph edges.")]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="Experts per layer.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another option of a model (see toast models), such as step=decode; repeatable.",
    ),
]
CacheOption = Annotated[
    bool,
    typer.Option(
        "--no-cache", help="Do not read or write the cache in ~/.cache/toast.", show_default=False
    ),
]
OutputOption = Annotated[
    pathlib.Path | None,
    typer.Option("-o", "--output", help="Write StableHLO with Shardy annotations to this file."),
]
LimitOption = Annotated[
    float,
    typer.Option(
        "--limit",
        min=0.0,
        help="Time limit in seconds for each of AutoMap and Alpa, setup included; the step in "
        "progress is finished. Other methods are not limited.",
    ),
]


def memory_gib(text: str | float) -> float:
    """The GiB of ``--memory``; raises :class:`typer.BadParameter`."""
    try:
        return gib_of(str(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


MemoryOption = Annotated[
    float | None,
    typer.Option(
        "--memory", parser=memory_gib, metavar="SIZE",
        help="Memory limit per device in GiB, or with a unit (600MiB).",
    ),
]  # fmt: skip
SafetyOption = Annotated[
    float | None,
    typer.Option(
        "--safety",
        help="Odds with which XLA's memory must be within the limit, such as 0.95. Default: the "
        "predicted peak must be.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Exit with code 1 if the plan does not fit, or less safely than --safety asks.",
        show_default=False,
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Time limit of each compilation in seconds.")
]


class Partitioner(enum.StrEnum):
    """What partitions a program."""

    xla = "xla"
    local = "local"


UnevenOption = Annotated[
    float | None,
    typer.Option(
        "--uneven",
        help="The largest share of elements that padding may add to a dimension that the axes "
        "do not divide; 0 pads nothing.",
        show_default="0.5",
    ),
]
LoweringOption = Annotated[
    Partitioner,
    typer.Option(
        "--lowering",
        help="Partition the program by XLA, from annotations (xla), or into the device-local "
        "program that toast lower writes (local).",
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        help="Random seed; the same seed gives the same plan unless a budget or an interrupt ends "
        "the search.",
    ),
]


class _Group(typer.core.TyperGroup):
    """Commands that report a wrong option or argument in one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        _default_line.set("")
        try:
            result = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except Exception as error:
            # Click's errors; typer's copies of their classes are not public.
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                context = getattr(error, "ctx", None)
                # The text of typer's check of choices has the kind of the error.
                text = error.format_message().rstrip(".").replace(": Value error, ", ": ")
                hint = f"see {context.command_path} --help" if context else "see --help"
                fail(f"{text}{'' if text.endswith('?') else ';'} {hint}")
            sys.exit(2)
        if standalone_mode:
            sys.exit(result)
        return result


def group(help: str, *, completion: bool = False) -> typer.Typer:
    """A group of commands with the text ``help``; with ``completion``, options that install it."""
    return typer.Typer(
        cls=_Group, help=help, no_args_is_help=True, add_completion=completion,
        pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip


def command(
    app: typer.Typer, name: str | None = None, cls: type[typer.core.TyperCommand] | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Make a function a command of ``app``.

    A parameter of type :class:`Source` becomes TARGET and the options that control how it is read.
    A ToastError is printed as one line, with exit code 2.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, cls=cls)(_errors(_with_source(function)))
        return function

    return register


#: Parameters of commands that name an output file; ``-`` is the standard output.
_OUTPUTS = ("json_file", "csv", "facts", "html", "output", "plot", "trace")


def _errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a ToastError as one line and exit with code 2."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **keywords: Any) -> None:
        from toast.files import standard_output

        try:
            with standard_output(keywords.get(name) for name in _OUTPUTS):
                _check_outputs(keywords)
                command(*arguments, **keywords)
        except ToastError as error:
            fail(error.in_shell)
        except KeyboardInterrupt:
            fail("interrupted")
            raise typer.Exit(130) from None
        except typer.Exit:
            _say_default_last()
            raise
        except (typer.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if os.environ.get("TOAST_DEBUG"):
                raise
            fail(_unexpected(error))
            raise typer.Exit(2 if isinstance(error, OSError | MemoryError) else 70) from None
        else:
            _say_default_last()
            return
        raise typer.Exit(2)

    return wrapped


def _unexpected(error: Exception) -> str:
    """One line for an exception that is not a ToastError."""
    if isinstance(error, OSError):
        where = error.filename if isinstance(error.filename, str) else "the standard output"
        return f"{shortened(where)}: {error.strerror or error}; check the path"
    if isinstance(error, MemoryError):
        return "out of memory; use a smaller program, or a machine with more memory"
    lines = str(error).strip().splitlines() or [""]
    return (
        f"internal error: {type(error).__name__}: {shortened(lines[0])}; please report it, with "
        "the traceback that TOAST_DEBUG=1 prints"
    )


def _check_outputs(keywords: Mapping[str, Any]) -> None:
    """Raise a ToastError for an output that is also TARGET, and for sources without a report."""
    if keywords.get("sources") and "html" in keywords and not keywords["html"]:
        raise ToastError("--sources quotes source lines in a report; add --report FILE")
    target = keywords.get("target")
    if not isinstance(target, str) or not is_regular(target):
        return
    for path in (keywords.get(name) for name in _OUTPUTS):
        if isinstance(path, pathlib.Path) and is_regular(path) and os.path.samefile(path, target):
            raise ToastError(f"{path}: is also TARGET; write to another file")


def _with_source(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the parameters of :meth:`Source.of` in place of a :class:`Source`."""
    own = inspect.signature(function, eval_str=True).parameters
    replaced = [name for name, p in own.items() if p.annotation is Source]
    if not replaced:
        return function
    read = inspect.signature(Source.of, eval_str=True).parameters

    @functools.wraps(function)
    def wrapped(**keywords: Any) -> None:
        from toast.frontend import program_cache

        source = Source.of(**{name: keywords.pop(name) for name in read})
        if not program_cache.accelerators():
            # Before JAX is imported: without a TPU, an installed libtpu prints long warnings.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        function(**{replaced[0]: source}, **keywords)

    # TARGET takes the place of the source; the options that control how it is read come last.
    listed = [read["target"] if n in replaced else p for n, p in own.items()]
    listed += read.values()
    parameters = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in listed}
    wrapped.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    return wrapped


@dataclasses.dataclass(frozen=True)
class Source:
    """TARGET, and the options that control how it is read."""

    target: str
    #: The options of a model, by name.
    sizes: dict[str, int | str | None]
    shapes: tuple[str, ...]
    rules: tuple[pathlib.Path, ...]
    #: Whether a cached program or analysis may be used.
    cache: bool
    #: Positions of donated arguments, beside those that a model names.
    donate: tuple[int, ...] = ()
    #: The platform to lower for; by default that of ``jax.jit``, or of the hardware (:meth:`on`).
    platform: str | None = None
    #: Iterations of loops, by source location or number.
    trip_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: The memory policy, as a preset or text, and the number of microbatches.
    remat: str | MemoryPolicy | None = None
    microbatches: int | None = None

    @staticmethod
    def of(
        target: Target,
        layers: LayersOption = None,
        sequence: SequenceOption = None,
        batch: BatchOption = None,
        edges: EdgesOption = None,
        experts: ExpertsOption = None,
        set_: SetOption = None,
        arg: ArgOption = None,
        donate: DonateOption = None,
        platform: PlatformOption = None,
        trip_count: TripCountOption = None,
        remat: RematOption = None,
        microbatches: MicrobatchesOption = None,
        rules: RulesOption = None,
        no_cache: CacheOption = False,
    ) -> Source:
        """The source that the command-line options describe.

        Raises :class:`toast.errors.TargetError` for a ``--set`` without a name or a value.
        """
        sizes: dict[str, int | str | None] = {
            "layers": layers, "sequence": sequence, "batch": batch, "edges": edges,
            "experts": experts,
        }  # fmt: skip
        for text in set_ or ():
            name, _, value = text.partition("=")
            if not name or not value:
                raise TargetError(f"--set {text}: write NAME=VALUE, such as step=decode")
            number = re.fullmatch(r"-?\d{1,18}", value)
            sizes[name] = int(value) if number else value
        counts: dict[str, int] = {}
        for text in trip_count or ():
            place, _, iterations = text.rpartition("=")
            if not place or not re.fullmatch(r"\d{1,18}", iterations):
                raise TargetError(f"--trip-count {text}: write PLACE=N, such as model.py:12=100")
            counts[place] = int(iterations)
        return Source(
            target, sizes, tuple(arg or ()), tuple(rules or ()), not no_cache,
            tuple(donate or ()), platform, counts, remat, microbatches,
        )  # fmt: skip

    @property
    def is_traced(self) -> bool:
        """Whether TARGET is a model or a function, and not a file."""
        from toast import targets

        return self.target in targets.MODEL_NAMES or (
            ":" in self.target and not is_regular(self.target)
        )

    def on(self, hardware: Hardware) -> Source:
        """The source for plans on a kind of device, whose platform is the default."""
        if self.platform is not None or not hardware.platform:
            return self
        return dataclasses.replace(self, platform=HardwarePlatform.of(hardware))

    def program(self, *, small: bool = False, module: bool = True) -> Program:
        """Load the program, a model in its ``small`` form if asked.

        Callers that do not need the MLIR ``module`` may get a cached program.  Raises
        :class:`toast.errors.TargetError` if the program cannot be loaded or lowered.
        """
        from toast import targets
        from toast.program import with_trip_counts

        program = targets.load(
            self.target, options=self.sizes, shapes=self.shapes, small=small,
            module=module or not self.cache, donate=self.donate,
            platform=self.platform, remat=self.remat, microbatches=self.microbatches,
        )  # fmt: skip
        return with_trip_counts(program, self.trip_counts)

    def functions(self, name: str | None = None) -> tuple[tuple[Program, ...], tuple[str, ...]]:
        """The program, or those of the functions of a StableHLO file; and lines on those left out.

        ``name`` selects the entry function of a StableHLO file.  Raises
        :class:`toast.errors.TargetError` for other targets.
        """
        from toast import targets

        if targets.is_stablehlo(self.target):
            from toast.frontend import stablehlo

            if name is None:
                return stablehlo.functions_of(self.target)
            return (stablehlo.from_file(self.target, function=name),), ()
        if name is not None:
            raise TargetError(
                f"--function {name}: {self.target} is not a StableHLO file; remove --function"
            )
        return (self.program(),), ()

    def analysis(
        self,
        progress: Callable[[Any], None],
        *,
        small: bool = False,
        module: bool = True,
        partitioner: Lowering = "xla",
    ) -> Analysis:
        """Analyze the program; ``seconds`` of the result include lowering."""
        from toast.analysis import analyzed
        from toast.frontend.shifts import with_shifts

        progress("lowering")
        begin = time.perf_counter()
        program = self.program(small=small, module=module)
        if partitioner == "local":
            program = with_shifts(program)
        lowering = time.perf_counter() - begin
        analysis = analyzed(
            program, rules=self.rules, progress=progress, cache=self.cache, lowering=partitioner
        )
        analysis.seconds["lowering"] = lowering
        return analysis

    def origin(self, hardware: str) -> Origin:
        """The origin that a plan file records: TARGET, its options and ``hardware``."""
        from toast.plan import Origin

        sizes = {name: size for name, size in self.sizes.items() if size is not None}
        rules = tuple(map(str, self.rules))
        return Origin(
            self.target,
            sizes,
            self.shapes,
            rules,
            hardware,
            self.donate,
            "" if isinstance(self.platform, HardwarePlatform) else self.platform or "",
            self.trip_counts,
            (self.remat if isinstance(self.remat, str) else self.remat.label) if self.remat else "",
            self.microbatches or 0,
        )

    def marked(self, rows: Sequence[MethodResult], hardware: str) -> list[MethodResult]:
        """Copies of ``rows`` whose plans record their origin."""
        origin = self.origin(hardware)
        return [
            dataclasses.replace(row, plan=row.plan and dataclasses.replace(row.plan, origin=origin))
            for row in rows
        ]

    @property
    def strategies(self) -> Any:
        """The expert strategies of a model of the zoo; None for other targets."""
        from toast.models import ZOO

        return ZOO[self.target].strategies if self.target in ZOO else None


def command_line() -> str:
    """The command that runs, as for a shell; empty if another program runs it."""
    path = pathlib.PurePath(sys.argv[0])
    ours = "toast" in (path.name, path.parent.name if path.name == "__main__.py" else "")
    return shlex.join(["toast", *sys.argv[1:]]) if ours else ""


def console() -> rich.console.Console:
    """The console that results are printed on, as wide as the terminal or ``COLUMNS``."""
    import rich.console

    # Pipes get wide lines instead of wrapped cells, unless the user sets their width.
    columns = os.environ.get("COLUMNS", "")
    wished = int(columns) if re.fullmatch(r"\d{1,6}", columns, re.ASCII) else 0
    width = wished or (None if sys.stdout.isatty() else 160)
    # The user's texts may contain brackets and colons; they are not markup.
    return rich.console.Console(width=width, soft_wrap=False, markup=False, emoji=False)


def fail(message: str) -> None:
    """Print one line on the error stream."""
    _say(" ".join(message.split()))


def _say(message: str) -> None:
    """Print a line on the error stream, with escaped control characters."""
    with contextlib.suppress(OSError, ValueError):  # there is no other stream for the message
        print(f"toast: {printable(message)}", file=sys.stderr)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[Any], None]]:
    """A status line on the terminal's error stream while stages run, with the time so far."""
    import rich.console

    from toast.cli.elapsed import ElapsedLine

    line = ElapsedLine()
    with rich.console.Console(stderr=True).status(line):
        yield line.show


@contextlib.contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """End the process in one line, with exit code 2, where a block takes longer than ``seconds``.

    For what XLA runs, which cannot be interrupted.  Raises :class:`toast.errors.ToastError` for a
    limit that is none.
    """
    if not seconds > 0:
        raise ToastError(f"--timeout {seconds:g}: must be a positive number of seconds")

    def end() -> None:
        with contextlib.suppress(OSError, ValueError):
            if sys.stderr.isatty():
                sys.stderr.write("\r\x1b[2K\x1b[?25h")  # the status line, and its hidden cursor
            fail(f"{what} takes more than {seconds:g} s; give a smaller program, or --timeout")
            sys.stderr.flush()
        os._exit(2)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def warn(lines: Iterable[str]) -> None:
    """Print notes on the error stream, one per line."""
    for line in lines:
        _say(f"note: {line}")


def use_cpu_devices(count: int) -> None:
    """Make XLA provide ``count`` CPU devices; call it before JAX starts its backends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
    flags.append(f"--xla_force_host_platform_device_count={count}")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    """Print a Python warning as a note."""
    warn([str(message)])
