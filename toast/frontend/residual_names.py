"""Names for the residuals of a block: the values that its backward pass needs from the forward one.

JAX's policies of recomputation see values by name (``jax.ad_checkpoint.checkpoint_name``).  So each
value of a block that may be a residual gets a name, in its jaxpr: first all values do, and a trace
of the gradient shows which of these JAX would keep; then only those do, under readable names.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from toast.program import Block, Residual
from toast.program.memory_policy import LAYER_INPUT, ResidualKind

#: Primitives that run one jaxpr, and the parameter that has it.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr", "checkpoint": "jaxpr", "remat": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip
#: Those of ``jax.checkpoint``.
REMATS = frozenset({"checkpoint", "remat", "remat2"})
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "scaled_matmul_wrapper"})
_KERNELS = frozenset({"custom_vjp_call", "pallas_call", "tpu_custom_call", "cudnn_fmha"})
#: Ops through which a residual is that of their operand.
_TRANSPARENT = frozenset({
    "reduce_precision", "optimization_barrier", "copy", "convert_element_type", "reshape",
    "transpose", "squeeze", "expand_dims", "device_put",
})  # fmt: skip
#: Ops whose results have the elements of their operands, perhaps several times.
_LAYOUT = frozenset({
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "rev",
    "convert_element_type",
})  # fmt: skip
_PREFIX = "toast:"

_ADDRESS = re.compile(r"0x[0-9a-f]+|id=\d+")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*(?::[^=]+)?=(?!=)")
_JAX = str(pathlib.Path(jax.__file__).parent)
_HERE = str(pathlib.Path(__file__).parent)


#: Where an equation is: its number in the jaxpr, in each jaxpr around it, and of its result.
_Place = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ResidualNames:
    """The residuals of a jaxpr, and where their names are put in."""

    #: The names of values that have none in the program, by place.
    values: Mapping[_Place, str]
    #: The names of those that have one.
    own: Mapping[_Place, str]
    #: The residuals that are arguments, by number.
    arguments: Mapping[int, Residual]
    residuals: tuple[Residual, ...]


@dataclasses.dataclass(frozen=True)
class ArgumentPlaces:
    """Where residuals of a block are that have the elements of its arguments, by name."""

    #: The numbers of those that are arguments.
    numbers: Mapping[str, int]
    #: The places of equations for rounded or reshaped arguments.
    views: Mapping[str, _Place]

    def after(self, more: int) -> ArgumentPlaces:
        """The places in a jaxpr with the same equations, and more arguments before."""
        numbers = {name: number + more for name, number in self.numbers.items()}
        return dataclasses.replace(self, numbers=numbers)


def named_block(
    closed: Any,
    name: str,
    inputs: Sequence[str],
    *,
    runs: int = 1,
    origin: str,
    known: dict[str, ResidualNames] | None = None,
) -> tuple[Callable[..., Any], Block, ArgumentPlaces]:
    """The residuals of a block.

    :param closed: the ``ClosedJaxpr`` of the block.
    :param name: the name of the block.
    :param inputs: the names of its arguments.
    :param runs: how often it runs in a step.
    :param origin: as in :class:`Block`.
    :param known: the names of jaxprs, by text; new ones are added.
    :returns: a function that puts the names that it is called with into the jaxpr (or into one with
        the same equations and more arguments before), or labels for them, which replace those of
        the program, too; the block; and where those of its residuals are that have the elements of
        arguments, by name.
    """
    names = {} if known is None else known
    key = f"{[*inputs]} {_statements(closed.jaxpr)} {_ADDRESS.sub('', str(closed.jaxpr))}"
    if key not in names:
        names[key] = _residual_names(closed, inputs)
    mine = names[key]

    def with_names(
        chosen: Collection[str], label: Callable[[str], str] | None = None, *, other: Any = closed
    ) -> Any:
        more = len(other.jaxpr.invars) - len(closed.jaxpr.invars)
        arguments = {number: r.name for number, r in mine.arguments.items() if r.name in chosen}
        values = {place: name for place, name in mine.values.items() if name in chosen}
        if label is not None:
            arguments = {number: label(name) for number, name in arguments.items()}
            values = {place: label(name) for place, name in (values | {**mine.own}).items()}
        arguments = {number + more: name for number, name in arguments.items()}
        return _renamed(other, lambda place, _: values.get(place), arguments)

    numbers = {residual.name: number for number, residual in mine.arguments.items()}
    inputs_of = {residual.name for residual in mine.residuals if residual.kind == "input"}
    views = {
        name: place for place, name in {**mine.own, **mine.values}.items()
        if name in inputs_of and name not in numbers and len(place) == 2
        and len(closed.jaxpr.eqns[place[0]].outvars) == 1
    }  # fmt: skip
    return with_names, Block(name, mine.residuals, runs, origin), ArgumentPlaces(numbers, views)


def _residual_names(closed: Any, inputs: Sequence[str]) -> ResidualNames:
    """The names of the residuals of a jaxpr; ``inputs`` are those of its arguments."""
    places, needed = _needed(closed)
    found: dict[str, _NamedValues] = {}
    taken: set[str] = set(own_names(closed.jaxpr))
    readable: dict[_Place, str] = {}
    of_program: dict[_Place, str] = {}
    mine = [
        (place, variable, equation, own) for place, variable, equation in places
        if (own := _own_name(equation)) or _key(place) in needed
    ]  # fmt: skip
    last = {_statement(equation): place for place, _, equation, own in mine if not own}
    arguments: dict[int, Residual] = {}
    passed = None if LAYER_INPUT in taken else _passed_on(closed.jaxpr)
    for number, variable in enumerate(closed.jaxpr.invars):
        if number in needed and _may_have_name(variable.aval):
            label = inputs[number] if number < len(inputs) else f"input{number}"
            arguments[number] = Residual(
                _unique(label, taken), "input", (_type_text(variable.aval),),
                size_bytes(variable.aval), alias=LAYER_INPUT if number == passed else "",
            )  # fmt: skip
    for place, variable, equation, own in mine:
        is_last = last.get(_statement(equation)) == place
        chosen = own or _unique(_readable(equation, is_last), taken)
        (of_program if own else readable)[place] = chosen
        at = found.setdefault(chosen, _NamedValues(source_text(equation), bool(own)))
        at.variables.append(variable)
        at.places.append(place)
    kinds = _Kinds(closed.jaxpr)
    residuals = [
        Residual(
            text, kinds.of(at.places[0]), tuple(_type_text(v.aval) for v in at.variables),
            sum(size_bytes(v.aval) for v in at.variables), at.source, at.own,
        )
        for text, at in found.items()
    ]  # fmt: skip
    # Arguments that the program names itself are listed under that name, too.
    return ResidualNames(readable, of_program, arguments, (*arguments.values(), *residuals))


def _passed_on(jaxpr: Any) -> int | None:
    """The number of the argument that a layer passes to the next one: it has the type of a result.

    Of several, it is the largest, and the first of these.
    """
    results = {_type_text(v.aval) for v in jaxpr.outvars if _may_have_name(v.aval)}
    alike = [
        n for n, v in enumerate(jaxpr.invars)
        if _may_have_name(v.aval) and v.aval.shape and _type_text(v.aval) in results
    ]  # fmt: skip
    return max(alike, key=lambda n: (size_bytes(jaxpr.invars[n].aval), -n), default=None)


@dataclasses.dataclass
class _NamedValues:
    """The values with one name."""

    source: str
    own: bool
    variables: list[Any] = dataclasses.field(default_factory=list)
    places: list[_Place] = dataclasses.field(default_factory=list)


def _key(place: _Place) -> str:
    return _PREFIX + ".".join(map(str, place))


def _needed(closed: Any) -> tuple[list[tuple[_Place, Any, Any]], set[str | int]]:
    """Values that may have names, in program order, and the names of those that JAX would keep.

    Among the latter, the number of an argument stands for the argument.
    """
    places: list[tuple[_Place, Any, Any]] = []

    def every(place: _Place, equation: Any) -> str | None:
        variable = equation.outvars[place[-1]]
        places.append((place, variable, equation))
        return None if _is_name(equation) else _key(place)

    whole = _renamed(closed, every)
    run = jax.extend.core.jaxpr_as_fun(whole)
    kept = jax.checkpoint(run, policy=jax.checkpoint_policies.save_any_names_but_these())
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
    moving = [
        number for number, aval in enumerate(avals)
        if jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)
    ]  # fmt: skip

    def forward(*arguments: Any) -> Any:
        def partial(*some: Any) -> Any:
            every = dict(enumerate(arguments)) | dict(zip(moving, some, strict=True))
            return kept(*every.values())

        return jax.linearize(partial, *(arguments[number] for number in moving))[1]

    # Places in the forward functions of custom gradients are found in this trace.
    traced = jax.make_jaxpr(forward)(*avals).jaxpr
    numbers = {id(variable): number for number, variable in enumerate(traced.invars)}
    needed: set[str | int] = set()
    for source in _sources(traced, range(len(traced.outvars))):
        if isinstance(source, str):
            needed.add(source)
        elif id(source) in numbers:
            needed.add(numbers[id(source)])
    unique = {place: (place, variable, equation) for place, variable, equation in places}
    return [unique[place] for place in sorted(unique)], needed


def _sources(jaxpr: Any, results: Sequence[int]) -> Iterator[Any]:
    """What results of a jaxpr come from: names, and variables that are arguments of the jaxpr."""
    producer = {
        id(variable): (equation, number)
        for equation in jaxpr.eqns
        for number, variable in enumerate(equation.outvars)
    }
    waiting = [jaxpr.outvars[number] for number in results]
    seen: set[int] = set()
    while waiting:
        variable = waiting.pop()
        if isinstance(variable, jax.extend.core.Literal) or id(variable) in seen:
            continue
        seen.add(id(variable))
        if id(variable) not in producer:
            yield variable
            continue
        equation, number = producer[id(variable)]
        if _is_name(equation):
            yield str(equation.params["name"])
            continue
        inner = inner_jaxpr(equation)
        if inner is None:
            at = slice(number, number + 1) if len(equation.outvars) > 1 and (
                equation.primitive.name == "optimization_barrier"
            ) else slice(None)  # fmt: skip
            waiting += equation.invars[at]
            continue
        operands = {
            id(v): operand for v, operand in zip(inner.invars, equation.invars, strict=True)
        }
        for source in _sources(inner, [number]):
            if isinstance(source, str):
                yield source
            elif id(source) in operands:
                waiting.append(operands[id(source)])


def inner_jaxpr(equation: Any) -> Any:
    """The jaxpr of a call or a scan; ``None`` for other equations."""
    name = equation.primitive.name
    parameter = "jaxpr" if name == "scan" else _CALLS.get(name)
    closed = equation.params.get(parameter) if parameter else None
    return None if closed is None else getattr(closed, "jaxpr", closed)


def with_inner_jaxpr(equation: Any, jaxpr: Any) -> Any:
    """An equation that runs another jaxpr in place of that of :func:`inner_jaxpr`."""
    name = equation.primitive.name
    parameter = "jaxpr" if name == "scan" else _CALLS[name]
    closed = equation.params[parameter]
    keeps = hasattr(closed, "jaxpr") and closed.jaxpr is not closed
    new = closed.replace(jaxpr=jaxpr) if keeps else jaxpr
    return equation.replace(params={**equation.params, parameter: new})


def _is_name(equation: Any) -> bool:
    return str(equation.primitive.name) == "name"


def _own_name(equation: Any) -> str:
    """The name that an equation of the program gives its result; empty for other equations."""
    return str(equation.params["name"]) if _is_name(equation) else ""


def own_names(jaxpr: Any) -> Iterator[str]:
    """The names that the program itself gives values."""
    for equation in jaxpr.eqns:
        if _is_name(equation):
            yield str(equation.params["name"])
        inner = inner_jaxpr(equation)
        if inner is not None:
            yield from own_names(inner)


# -- putting names in ------------------------------------------------------------------------------

#: The name of a value, given its place and equation; ``None`` for no name.
_Naming = Callable[[_Place, Any], str | None]


def _renamed(closed: Any, naming: _Naming, inputs: Mapping[int, str] | None = None) -> Any:
    """A ``ClosedJaxpr`` with names of values; ``inputs`` are those of arguments, by number."""
    return _closed_with(closed, _with_names(closed.jaxpr, naming, (), inputs or {}))


def closed_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr without constants as a ``ClosedJaxpr``."""
    return jaxpr if hasattr(jaxpr, "consts") else jax.extend.core.ClosedJaxpr(jaxpr, [])


def _closed_with(closed: Any, jaxpr: Any) -> Any:
    """``closed`` with another jaxpr, which has the same constants."""
    same = closed.jaxpr is closed  # JAX 0.12 has one class for both
    return jaxpr if same else closed.replace(jaxpr=jaxpr)


def _with_names(jaxpr: Any, naming: _Naming, at: _Place, inputs: Mapping[int, str]) -> Any:
    renamed: dict[int, Any] = {}
    equations: list[Any] = []

    def read(variable: Any) -> Any:
        return renamed.get(id(variable), variable)

    for number, name in inputs.items():
        variable = jaxpr.invars[number]
        equation = _name_equation(variable.aval, name)
        equations.append(equation.replace(invars=[variable]))
        renamed[id(variable)] = equation.outvars[0]
    users: dict[int, list[Any]] = {}
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            users.setdefault(id(variable), []).append(equation)
    outer = {id(variable) for variable in jaxpr.outvars}
    for number, equation in enumerate(jaxpr.eqns):
        place = (*at, number)
        inside = _renamed_inside(equation, naming, place)
        equations.append(inside.replace(invars=[*map(read, equation.invars)]))
        if _is_name(equation):
            if other := naming((*place, 0), equation):
                params = {**equations[-1].params, "name": other}
                equations[-1] = equations[-1].replace(params=params)
            continue
        for result, variable in enumerate(equation.outvars):
            mine = users.get(id(variable), [])
            named_anyway = mine and all(map(_is_name, mine)) and id(variable) not in outer
            unused = not mine and id(variable) not in outer
            layout = _only_changes_layout(equation, variable)
            if named_anyway or unused or layout or not _may_have_name(variable.aval):
                continue
            chosen = naming((*place, result), equation)
            if chosen is None:
                continue
            named = _name_equation(variable.aval, chosen)
            equations.append(
                named.replace(invars=[variable], source_info=equation.source_info, ctx=equation.ctx)
            )
            renamed[id(variable)] = named.outvars[0]
    return jaxpr.replace(eqns=equations, outvars=[*map(read, jaxpr.outvars)])


def _only_changes_layout(equation: Any, variable: Any) -> bool:
    """Whether the operand of an equation can be kept as well, in no more bytes."""
    name = equation.primitive.name
    if name not in _LAYOUT:
        return False
    return size_bytes(variable.aval) >= size_bytes(equation.invars[0].aval)


def _renamed_inside(equation: Any, naming: _Naming, place: _Place) -> Any:
    """An equation with names of the values of its jaxpr, if it runs one."""
    name = equation.primitive.name
    if name in REMATS:  # it has a policy of its own
        return equation
    if name == "custom_vjp_call":
        thunk = equation.params.get("fwd_jaxpr_thunk")
        if not hasattr(thunk, "call_wrapped"):
            return equation
        forward = _NamedForward(thunk, naming, place)
        return equation.replace(params={**equation.params, "fwd_jaxpr_thunk": forward})
    inner = inner_jaxpr(equation)
    if inner is None:
        return equation
    return with_inner_jaxpr(equation, _with_names(inner, naming, place, {}))


class _NamedForward:
    """The forward function of a custom gradient, with names of its values.

    It stands in place of the ``fwd_jaxpr_thunk`` of an equation ``custom_vjp_call``.
    """

    def __init__(self, thunk: Any, naming: _Naming, place: _Place) -> None:
        self._thunk, self._naming, self._place = thunk, naming, place

    def call_wrapped(self, *nonzero: Any) -> tuple[Any, Any]:
        """The jaxpr and its constants, with names."""
        jaxpr, constants = self._thunk.call_wrapped(*nonzero)
        return _with_names(jaxpr, self._naming, (*self._place, -1), {}), constants

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._thunk, attribute)


def _name_equation(aval: Any, name: str) -> Any:
    """An equation that names a value of type ``aval``, with a new result."""
    template = _template()
    return template.replace(
        outvars=[jax.extend.core.Var(aval)], params={**template.params, "name": name}
    )


@functools.cache
def _template() -> Any:
    return jax.make_jaxpr(lambda x: checkpoint_name(x, "name"))(np.float32(0)).jaxpr.eqns[0]


def _may_have_name(aval: Any) -> bool:
    """Whether a value is an array of numbers."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(aval, "shape") or jax.dtypes.issubdtype(
        dtype, jax.dtypes.extended
    ):  # fmt: skip
        return False
    return type(aval).__name__ == "ShapedArray" and dtype != jax.dtypes.float0


# -- views of arguments ----------------------------------------------------------------------------


def with_views_before(
    closed: Any, original: Any, places: Sequence[_Place]
) -> tuple[Callable[..., list[Any]], Any]:
    """A jaxpr that takes rounded or reshaped arguments as further arguments, before the others.

    :param closed: ``original``, with names of values.
    :param places: of these values in ``original``.
    :returns: a function that computes them from the arguments; and the jaxpr.
    """
    jaxpr = original.jaxpr
    views = [jaxpr.eqns[place[0]].outvars[place[1]] for place in places]
    producer = {id(v): e for e, _, v in _produced(jaxpr)}

    def before(*arguments: Any) -> list[Any]:
        known = {id(v): a for v, a in zip(jaxpr.invars, arguments, strict=True)}

        def value(variable: Any) -> Any:
            if id(variable) not in known:
                equation = producer[id(variable)]
                results = equation.primitive.bind(*map(value, equation.invars), **equation.params)
                if not equation.primitive.multiple_results:
                    results = [results]
                known.update((id(v), r) for v, r in zip(equation.outvars, results, strict=True))
            return known[id(variable)]

        return [value(view) for view in views]

    made = {id(view) for view in views}
    equations = [e for e in closed.jaxpr.eqns if not any(id(v) in made for v in e.outvars)]
    after = closed.jaxpr.replace(
        eqns=equations, invars=[*views, *closed.jaxpr.invars],
        debug_info=closed.jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return before, _closed_with(closed, after)


# -- readable names --------------------------------------------------------------------------------


def _unique(name: str, taken: set[str]) -> str:
    number, candidate = 2, name
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    taken.add(candidate)
    return candidate


def frames(equation: Any) -> list[Any]:
    """The frames of the user's code at an equation, the innermost first."""
    traceback = equation.source_info.traceback
    return [
        frame for frame in (() if traceback is None else traceback.frames)
        if not frame.file_name.startswith((_JAX, _HERE, "<frozen"))
    ]  # fmt: skip


def _frame(equation: Any) -> Any:
    """The innermost frame of the user's code at an equation; ``None`` if unknown."""
    return next(iter(frames(equation)), None)


def _statements(jaxpr: Any) -> list[tuple[str, int, str]]:
    return [_statement(equation) for equation in jaxpr.eqns]


def _statement(equation: Any) -> tuple[str, int, str]:
    """The statement of the user's code that an equation is from."""
    frame = _frame(equation)
    if frame is None:
        return "", 0, ""
    return frame.file_name, frame.line_num, frame.function_name


def _readable(equation: Any, last: bool) -> str:
    """``scores`` for the ``last`` value of ``scores = f(q @ k)``, and else ``scores.dot_general``.

    Values of other statements are ``function.primitive``.
    """
    frame = _frame(equation)
    called = str(equation.params.get("name", "")) if equation.primitive.name in _CALLS else ""
    if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        called = _function_text(equation.params["call_jaxpr"]).rpartition(".")[2]
    what = re.sub(r"\W", "", called).strip("_") or str(equation.primitive.name)
    if frame is None:
        return what
    assigned = _ASSIGNMENT.match(linecache.getline(frame.file_name, frame.line_num))
    name = frame.function_name.rpartition(".")[2]
    if assigned and not name.startswith("<"):  # the name would be that of a lambda
        return assigned[1] if last else f"{assigned[1]}.{what}"
    function = re.sub(r"\W", "", name)
    return f"{function.strip('_') or 'lambda'}.{what}"


def source_text(equation: Any) -> str:
    """The place of an equation in the user's code: ``model.py:12 (layer)``; empty if unknown."""
    frame = _frame(equation)
    if frame is None:
        return ""
    function = frame.function_name.rpartition(".")[2]
    return f"{pathlib.PurePath(frame.file_name).name}:{frame.line_num} ({function})"


def effect_text(equations: Iterable[Any]) -> str:
    """The first of some equations that has side effects, with its place in the user's code."""
    for equation in equations:
        if equation.effects:
            inner = inner_jaxpr(equation)
            if inner is not None:
                return effect_text(inner.eqns)
            source = source_text(equation)
            return f"{equation.primitive.name}{' at ' * bool(source)}{source}"
    return "unknown"


def custom_gradient_text(jaxpr: Any) -> str:
    """The first custom gradient of a jaxpr, with its place in the user's code."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "custom_vjp_call":
            function = _function_text(equation.params["call_jaxpr"])
            return f"the custom gradient of {function or 'a function'} at {source_text(equation)}"
        inner = inner_jaxpr(equation)
        if inner is not None and (text := custom_gradient_text(inner)):
            return text
    return ""


def _function_text(closed: Any) -> str:
    """The name of the function of a jaxpr, with those around it; empty if unknown."""
    information = getattr(closed, "jaxpr", closed).debug_info
    return str(getattr(information, "func_src_info", "")).partition(" at ")[0]


class _Kinds:
    """The kinds of the values of a jaxpr, by place."""

    def __init__(self, jaxpr: Any) -> None:
        self._jaxpr = jaxpr

    def of(self, place: _Place) -> ResidualKind:
        """The kind of the value at a place."""
        jaxpr, numbers = self._jaxpr, list(place)
        while len(numbers) > 2:
            if numbers[1] == -1:
                return "kernel"
            jaxpr, numbers = inner_jaxpr(jaxpr.eqns[numbers[0]]), numbers[1:]
        return _kind(jaxpr, jaxpr.eqns[numbers[0]], numbers[1])


def _kind(jaxpr: Any, equation: Any, number: int) -> ResidualKind:
    """The kind of a result of an equation; that of the value before ops without arithmetic."""
    producer = {id(v): (e, n) for e in jaxpr.eqns for n, v in enumerate(e.outvars)}
    computed = False
    while True:
        name = equation.primitive.name
        if name in _KERNELS:
            return "kernel"
        if name in PRODUCTS:
            dimensions = equation.params.get("dimension_numbers")
            batched = name == "dot_general" and any(dimensions[1])
            return "batched_product" if batched else "product"
        inner = inner_jaxpr(equation)
        if inner is not None and name != "scan" and name not in REMATS:
            variable = inner.outvars[number]
            at = next((p for p in _produced(inner) if p[2] is variable), None)
            if at is not None:
                return _kind(inner, at[0], at[1])
        elif name not in _TRANSPARENT and not _is_name(equation):
            if not _is_shift(equation, producer):
                return "other"
            computed = True
        operand = _main_operand(equation, producer)
        if operand is None:
            return "other"
        if id(operand) not in producer:
            is_input = any(operand is variable for variable in jaxpr.invars)
            return "input" if is_input and not computed else "other"
        equation, number = producer[id(operand)]


def _produced(jaxpr: Any) -> Iterator[tuple[Any, int, Any]]:
    for equation in jaxpr.eqns:
        for number, variable in enumerate(equation.outvars):
            yield equation, number, variable


def _is_shift(equation: Any, producer: Mapping[int, Any]) -> bool:
    """Whether an equation adds a bias or scales: ``x + broadcast(b)``."""
    if equation.primitive.name not in ("add", "mul", "sub", "div"):
        return False
    return _main_operand(equation, producer) is not None


def _main_operand(equation: Any, producer: Mapping[int, Any]) -> Any:
    """The only operand that is no literal, no constant and no broadcast; else ``None``."""
    operands = []
    for variable in equation.invars:
        if isinstance(variable, jax.extend.core.Literal):
            continue
        made = producer.get(id(variable))
        if made is not None and made[0].primitive.name == "broadcast_in_dim":
            continue
        operands.append(variable)
    return operands[0] if len(operands) == 1 else None


def size_bytes(aval: Any) -> int:
    """The bytes of a value; 0 if it is no array."""
    if not _may_have_name(aval):
        return 0
    return int(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize)


_SHORT = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "bool": "pred", "complex": "c"}


def _type_text(aval: Any) -> str:
    """A type as HLO writes it: ``bf16[16,128]``."""
    letters, digits = re.match(r"([a-z]+)(.*)", str(np.dtype(aval.dtype))).groups()  # type: ignore[union-attr]
    return f"{_SHORT.get(letters, letters)}{digits}[{','.join(map(str, aval.shape))}]"
