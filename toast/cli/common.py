"""What all commands share: the console, errors in one line, TARGET and its options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from toast.errors import ToastError

if TYPE_CHECKING:
    import rich.console

    from toast.analysis import Analysis
    from toast.compare import Compared
    from toast.frontend import Program
    from toast.plan import Origin

Target = Annotated[
    str,
    typer.Argument(
        help="A model's name (toast models), a StableHLO file, a fact base (.lp), or "
        "module:function; for toast report and explain also a plan's JSON file."
    ),
]
MeshOption = Annotated[
    str,
    typer.Option(
        "--mesh", help="Axes and sizes: data=4,model=4; @model,data behind it lays data innermost."
    ),
]
HardwareOption = Annotated[
    str, typer.Option("--hardware", help="A name (tpu-v5e) or the path of a hardware file.")
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option("--arg", help="Example argument of a module:function, as f32[8,4]; repeatable."),
]
RulesOption = Annotated[
    list[pathlib.Path] | None,
    typer.Option("--rules", help="A further rule file, or folder of them; repeatable."),
]
JsonOption = Annotated[
    pathlib.Path | None,
    typer.Option("--json", help="Write everything to this JSON file; - prints it."),
]
ReportOption = Annotated[
    pathlib.Path | None,
    typer.Option("--report", help="Write a report to this HTML file; it opens offline."),
]
LayersOption = Annotated[int | None, typer.Option("--layers", help="Layers of a model.")]
SequenceOption = Annotated[int | None, typer.Option("--sequence", help="Sequence length.")]
BatchOption = Annotated[int | None, typer.Option("--batch", help="Batch size.")]
EdgesOption = Annotated[int | None, typer.Option("--edges", help="Edges of a graph.")]
ExpertsOption = Annotated[int | None, typer.Option("--experts", help="Experts per layer.")]
CacheOption = Annotated[
    bool,
    typer.Option(
        "--no-cache", help="Analyse anew, and keep nothing in ~/.cache/toast.", show_default=False
    ),
]
OutputOption = Annotated[
    pathlib.Path | None,
    typer.Option("-o", "--output", help="Write the StableHLO with Shardy annotations here."),
]
LimitOption = Annotated[
    float,
    typer.Option(
        "--limit",
        min=0.0,
        help="Seconds that AutoMap and Alpa may take each, set-up included; what is under way then "
        "is finished. The others end by themselves.",
    ),
]
MemoryOption = Annotated[float | None, typer.Option("--memory", help="Limit per device in GiB.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Seconds a compile may take.")]
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed", min=0, help="Same seed, same plan, if no budget or interrupt ends the search."
    ),
]


class _Group(typer.core.TyperGroup):
    """Commands whose callers get one line where an option or argument is wrong."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            result = super().main(
                args, prog_name, complete_var, False, windows_expand_args, **extra
            )
        except Exception as error:
            # Click's own, which typer has a copy of that is not public.
            if not standalone_mode or not hasattr(error, "format_message"):
                raise
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                context = getattr(error, "ctx", None)
                text = error.format_message().rstrip(".")
                hint = f"see {context.command_path} --help" if context else "see --help"
                fail(f"{text}{'' if text.endswith('?') else ';'} {hint}")
            sys.exit(2)
        if standalone_mode:
            sys.exit(result)
        return result


def group(help: str) -> typer.Typer:
    """Commands under one name."""
    return typer.Typer(
        cls=_Group, help=help, no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip


def command(
    app: typer.Typer, name: str | None = None, cls: type[typer.core.TyperCommand] | None = None
) -> Callable[[Callable[..., None]], Any]:
    """Make a function a command of ``app``.

    A parameter of type :class:`Source` becomes TARGET and the options that say how to read it.
    A ToastError is printed as one line, with exit code 2.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, cls=cls)(_errors(_with_source(function)))
        return function

    return register


#: Parameters of commands that name a file to write; ``-`` is the standard output.
_OUTPUTS = ("json_file", "csv", "facts", "html", "output", "plot")


def _errors(command: Callable[..., None]) -> Callable[..., None]:
    """Print a ToastError as one line and exit with code 2."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **keywords: Any) -> None:
        from toast.files import standard_output

        try:
            with standard_output(keywords.get(name) for name in _OUTPUTS):
                command(*arguments, **keywords)
        except ToastError as error:
            fail(error.in_shell)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            fail("interrupted")
            raise typer.Exit(130) from None

    return wrapped


def _with_source(function: Callable[..., None]) -> Callable[..., None]:
    """The function with the parameters of :meth:`Source.of` in place of a :class:`Source`."""
    own = inspect.signature(function, eval_str=True).parameters
    replaced = [name for name, p in own.items() if p.annotation is Source]
    if not replaced:
        return function
    read = inspect.signature(Source.of, eval_str=True).parameters

    @functools.wraps(function)
    def wrapped(**keywords: Any) -> None:
        from toast.frontend import store

        source = Source.of(**{name: keywords.pop(name) for name in read})
        if not store.accelerators():
            # Before JAX is imported: an installed libtpu complains at length where there is no TPU.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        function(**{replaced[0]: source}, **keywords)

    # TARGET stands where the source does, the options that say how to read it stand last.
    listed = [read["target"] if n in replaced else p for n, p in own.items()]
    listed += read.values()
    parameters = {p.name: p.replace(kind=p.KEYWORD_ONLY) for p in listed}
    wrapped.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
    return wrapped


@dataclasses.dataclass(frozen=True)
class Source:
    """TARGET, and how to read it."""

    target: str
    #: The options that change a model's size, by name.
    sizes: dict[str, int | None]
    shapes: tuple[str, ...]
    rules: tuple[pathlib.Path, ...]
    #: Whether an analysis may be one that was kept.
    cache: bool

    @staticmethod
    def of(
        target: Target,
        layers: LayersOption = None,
        sequence: SequenceOption = None,
        batch: BatchOption = None,
        edges: EdgesOption = None,
        experts: ExpertsOption = None,
        arg: ArgOption = None,
        rules: RulesOption = None,
        no_cache: CacheOption = False,
    ) -> Source:
        """What the options say."""
        sizes = {
            "layers": layers, "sequence": sequence, "batch": batch, "edges": edges,
            "experts": experts,
        }  # fmt: skip
        return Source(target, sizes, tuple(arg or ()), tuple(rules or ()), not no_cache)

    def program(self, *, small: bool = False, module: bool = True) -> Program:
        """The program; a model in its ``small`` form where that is asked for.

        Who does not need its MLIR ``module`` may get one that was kept.
        """
        from toast import targets

        return targets.load(
            self.target, options=self.sizes, shapes=self.shapes, small=small,
            module=module or not self.cache,
        )  # fmt: skip

    def analysis(
        self, progress: Callable[[Any], None], *, small: bool = False, module: bool = True
    ) -> Analysis:
        """The program's analysis, its seconds of lowering included."""
        from toast.analysis import analyzed

        progress("lowering")
        begin = time.perf_counter()
        program = self.program(small=small, module=module)
        lowering = time.perf_counter() - begin
        analysis = analyzed(program, rules=self.rules, progress=progress, cache=self.cache)
        analysis.seconds["lowering"] = lowering
        return analysis

    def origin(self, hardware: str) -> Origin:
        """What a plan's file says that it was made from."""
        from toast.plan import Origin

        sizes = {name: size for name, size in self.sizes.items() if size is not None}
        return Origin(self.target, sizes, self.shapes, tuple(map(str, self.rules)), hardware)

    def marked(self, rows: Sequence[Compared], hardware: str) -> list[Compared]:
        """Methods' rows, with the origin in their plans."""
        origin = self.origin(hardware)
        return [
            dataclasses.replace(row, plan=row.plan and dataclasses.replace(row.plan, origin=origin))
            for row in rows
        ]

    @property
    def strategies(self) -> Any:
        """What experts write for a model; None for what is no model of the zoo."""
        from toast.models import ZOO

        return ZOO[self.target].strategies if self.target in ZOO else None


def console() -> rich.console.Console:
    """Where results are printed."""
    import rich.console

    # Pipes get wide lines instead of wrapped cells.
    width = None if sys.stdout.isatty() else 160
    # Texts are the user's: brackets and colons in them are no markup.
    return rich.console.Console(width=width, soft_wrap=False, markup=False, emoji=False)


def fail(message: str) -> None:
    """Print one line on the error stream."""
    print(f"toast: {' '.join(message.split())}", file=sys.stderr)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[Any], None]]:
    """A status line on the terminal's error stream while stages run."""
    import rich.console
    from rich.text import Text

    with rich.console.Console(stderr=True).status("starting") as status:

        def show(event: Any) -> None:
            if isinstance(event, str):
                status.update(Text(event))  # with names in it that are no markup
            else:
                status.update(
                    f"search: round {event.number + 1}, {event.states} states, "
                    f"best cost {event.cost:.4g}"
                )

        yield show


def warn(lines: Iterable[str]) -> None:
    """Print notes, a line each, on the error stream."""
    for line in lines:
        print(f"toast: note: {line}", file=sys.stderr)


def use_cpu_devices(count: int) -> None:
    """Ask XLA for ``count`` CPU devices; must come before jax starts its backends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
    flags.append(f"--xla_force_host_platform_device_count={count}")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def show_warning(message: Warning | str, *_where: Any, **_more: Any) -> None:
    """Python's warnings as notes."""
    warn([str(message)])
