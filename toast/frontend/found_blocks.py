"""Blocks of a differentiated function that nobody marked: bodies of scans, and repeated layers.

They are looked for in the jaxpr of the function just before JAX differentiates it, and computed
under the policy of the plan, as if ``toast.checkpoint`` stood around them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import numpy as np
import numpy.typing as npt

from toast.frontend.checkpoints import PlannedPolicy, policed
from toast.frontend.memory_tracing import MemoryTrace
from toast.frontend.mlir.gradients import argument_names, changed_before_gradients
from toast.frontend.own_checkpoints import checkpoints_in, leave
from toast.frontend.residual_names import (
    PRODUCTS,
    REMATS,
    closed_jaxpr,
    effect_text,
    frames,
    inner_jaxpr,
    size_bytes,
    source_text,
    with_inner_jaxpr,
)
from toast.frontend.split_scans import like, spliced, split_scan
from toast.program import RunRange


@contextlib.contextmanager
def finding_blocks(trace: MemoryTrace) -> Iterator[None]:
    """Functions that are differentiated in this block get the policy of ``trace``.

    Their gradients are counted as well.
    """

    def change(function: Callable[..., Any], primals: tuple[Any, ...]) -> Callable[..., Any]:
        trace.gradients += 1
        return function if trace.policy is None else _with_blocks(trace, function)

    with changed_before_gradients(change):
        yield


def _with_blocks(trace: MemoryTrace, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose blocks are computed under the policy of ``trace``."""

    def changed(*primals: Any) -> Any:
        known = len(trace.blocks)
        try:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*primals)
        except TypeError:  # an auxiliary result that is no array
            return function(*primals)
        marked = len(trace.blocks) > known
        names = argument_names(function, primals)
        jaxpr = _BlockSearch(trace).in_jaxpr(closed.jaxpr, names, repeated=not marked)
        same = closed.jaxpr is closed
        whole = jaxpr if same else closed.replace(jaxpr=jaxpr)
        results = jax.extend.core.jaxpr_as_fun(whole)(*jax.tree.leaves(primals))
        return jax.tree.structure(shapes).unflatten(results)

    return changed


class _BlockSearch:
    """Looks for blocks in jaxprs, and puts the policy of a trace around them."""

    def __init__(self, trace: MemoryTrace) -> None:
        self._trace = trace
        #: How many runs of each block came before, where runs decide differently.
        self._before: collections.Counter[str] = collections.Counter()
        #: The marked blocks that were counted as runs.
        self._seen: set[PlannedPolicy] = set()
        #: The arguments of functions that variables are, or are parts of.
        self._names: dict[Any, str] = {}

    def in_jaxpr(
        self,
        jaxpr: Any,
        names: Sequence[str] = (),
        *,
        blocks: bool = True,
        repeated: bool = False,
        runs: int = 1,
        looped: bool = False,
        around: str = "",
    ) -> Any:
        """A jaxpr with the policy around its scans and repeated layers, as far as wished.

        Marked blocks that keep everything become plain equations.  ``names`` are those of its
        arguments, ``runs`` is how often the jaxpr runs, and ``looped`` whether it is in the body of
        a loop.  ``around`` is the scan that it is the body of, as text, if a ``jax.checkpoint`` of
        the program keeps the policy from other values there.
        """
        self._name(jaxpr, names)
        layers = self._layers(jaxpr) if blocks and repeated else {}
        used = collections.Counter(id(v) for e in jaxpr.eqns for v in e.invars)
        used.update(id(v) for v in jaxpr.outvars)
        equations: list[Any] = []
        skipped = 0
        for number, equation in enumerate(jaxpr.eqns):
            if number in layers:
                skipped, labels = layers[number]
                equations += self._layer(jaxpr, jaxpr.eqns[number:skipped], labels, used)
            if number < skipped:
                continue
            name = equation.primitive.name
            inner = inner_jaxpr(equation)
            if name in REMATS:
                equations += self._marked(equation, inner, runs, looped=looped, around=around)
            elif name == "scan":
                equations += self._scan(equation, inner, blocks, runs, looped=looped)
            elif inner is not None:
                new = self.in_jaxpr(
                    inner, _own_names(inner), blocks=blocks, repeated=repeated, runs=runs,
                    looped=looped, around=around,
                )  # fmt: skip
                equations.append(with_inner_jaxpr(equation, new))
            else:
                equations.append(equation)
        return jaxpr.replace(eqns=equations)

    def _name(self, jaxpr: Any, names: Sequence[str]) -> None:
        """Notes which variables of a jaxpr are its arguments, or parts of them."""
        if len(names) == len(jaxpr.invars):
            self._names.update((v, n) for v, n in zip(jaxpr.invars, names, strict=True) if n)
        for equation in jaxpr.eqns:
            if equation.primitive.name in _PARTS and (name := self._named(equation.invars[0])):
                self._names[equation.outvars[0]] = name

    def _named(self, variable: Any) -> str:
        """The argument that a variable is, or is a part of; empty if it is none."""
        literal = isinstance(variable, jax.extend.core.Literal)
        return "" if literal else self._names.get(variable, "")

    def _layers(self, jaxpr: Any) -> dict[int, tuple[int, list[str]]]:
        """The repeated layers of a jaxpr: by where one begins, where it ends, and its inputs.

        What seems to be a layer, but is none, is noted in the trace.
        """
        equations = jaxpr.eqns
        runs = _runs(equations)
        layers: dict[int, tuple[int, list[str]]] = {}
        for run in runs:
            names = [
                [self._named(v) for v in _inputs(equations[at : at + run.period])]
                for at in run.starts
            ]
            alike = len({len(each) for each in names}) == 1
            labels = [_common(each) for each in zip(*names, strict=True)] if alike else []
            labels = [label or f"input{number}" for number, label in enumerate(labels)]
            layers.update({at: (at + run.period, labels) for at in run.starts})
        for run in _runs(equations, effects=True) if any(e.effects for e in equations) else ():
            for at in run.starts:
                part = equations[at : at + run.period]
                if any(e.effects for e in part):
                    text = f"{_layer_name(part)} has side effects ({effect_text(part)})"
                    self._trace.remark(text)
        for run, place in _left_over(equations, runs):
            name = _layer_name(equations[run.start : run.start + run.period])
            self._trace.remark(
                f"{source_text(equations[place])} has the equations of {name}, but is in none of "
                f"its {run.count} runs; use toast.checkpoint around layers to include it"
            )
        return layers

    def _marked(
        self, equation: Any, inner: Any, runs: int, *, looped: bool, around: str
    ) -> list[Any]:
        """The equations for one of ``jax.checkpoint``; ``around`` is as for :meth:`in_jaxpr`.

        The forward and the backward pass of a scan are loops of their own, between which XLA
        eliminates no common subexpressions: a barrier would only keep it from fusing.
        """
        policy = equation.params.get("policy")
        if not isinstance(policy, PlannedPolicy):
            effect = f"so that the plan decides nothing about the rest of {around}"
            leave(self._trace, equation, effect if around else "")
            return [equation]
        found = policy.policed
        if looped:
            found = dataclasses.replace(found, prevent_cse=False)
            equation = equation.replace(params={**equation.params, "prevent_cse": False})
        parts = self._parts(found.block.name, runs)
        if not parts:
            self._trace.repeat(policy.block, runs - (policy not in self._seen))
            self._seen.add(policy)
            if policy.keeps_all:
                return spliced(inner, equation.invars, equation.outvars) or [equation]
            return [equation]
        run = found.within(inner).of_runs(parts[0][0], runs).run(marked=False)
        new = jax.make_jaxpr(run)(*map(like, inner.invars))
        return spliced(getattr(new, "jaxpr", new), equation.invars, equation.outvars) or [equation]

    def _parts(self, block: str, runs: int) -> list[tuple[RunRange, int]]:
        """The ranges of the next runs of a block, with their numbers; none if all decide alike."""
        assert self._trace.policy is not None
        cuts = self._trace.policy.cuts(block)
        if not cuts:
            return []
        first = self._before[block]
        self._before[block] += runs
        shares = RunRange(block, first, first + runs).cut(cuts)
        ranges = RunRange(block).cut(cuts)
        return [
            (next(r for r in ranges if r.includes(share)), int(share.end) - share.first)
            for share in shares
        ]

    def _scan(
        self, equation: Any, body: Any, blocks: bool, runs: int, *, looped: bool
    ) -> list[Any]:
        length, unroll = equation.params["length"], equation.params["unroll"]
        if not blocks or any(checkpoints_in(body)):  # the layers in it are marked
            lengths = self._lengths(body, length, runs)
            apart = not any(map(_is_planned, checkpoints_in(body))) and any(
                not _is_decided(e) and e.primitive.name not in _PARTS for e in body.eqns
            )
            around = f"the scan at {source_text(equation)}" if apart else ""
            return split_scan(
                equation, lengths,
                [
                    self.in_jaxpr(
                        body, blocks=False, runs=runs * part,
                        looped=looped or _is_loop(part, unroll), around=around,
                    )
                    for part in lengths
                ],
            )  # fmt: skip
        if length < 2:
            return [equation]
        names = [*map(self._named, equation.invars)]
        labels = [
            own or name or f"input{number}"
            for number, (own, name) in enumerate(zip(_own_names(body), names, strict=True))
        ]
        found = policed(
            self._trace, equation.params["jaxpr"], _name(body), labels,
            prevent_cse=not looped, origin="scan", runs=runs * length,
        )  # fmt: skip
        if found is None:
            return [equation]
        parts = self._parts(found.block.name, length) if runs == 1 else []
        every = [found.of_runs(part, count) for part, count in parts] or [found]
        lengths = [count for _, count in parts] or [length]
        inputs = [*map(like, body.invars)]
        bodies = []
        for part, count in zip(every, lengths, strict=True):
            apart = part.prevent_cse and not _is_loop(count, unroll)
            run = dataclasses.replace(part, prevent_cse=apart).run(marked=False)
            bodies.append(jax.make_jaxpr(run)(*inputs))
        return split_scan(equation, lengths, bodies)

    def _lengths(self, body: Any, length: int, runs: int) -> list[int]:
        """The lengths of the parts of a scan of marked blocks between which decisions change."""
        assert self._trace.policy is not None
        ends = {0, length}
        for name, calls in _marked_runs(body).items() if runs == 1 else ():
            before = self._before[name]
            ends |= {round((cut - before) / calls) for cut in self._trace.policy.cuts(name)}
        inside = sorted(end for end in ends if 0 <= end <= length)
        return [b - a for a, b in itertools.pairwise(inside)]

    def _layer(
        self,
        jaxpr: Any,
        equations: list[Any],
        labels: Sequence[str],
        used: collections.Counter[int],
    ) -> list[Any]:
        """The equations of a layer, whose inputs have labels, under the policy."""
        inside = collections.Counter(id(v) for e in equations for v in e.invars)
        inputs = _inputs(equations)
        outputs = [
            v for e in equations for v in e.outvars if used[id(v)] > inside[id(v)]
        ]  # fmt: skip
        part = jaxpr.replace(
            constvars=[], invars=inputs, outvars=outputs, eqns=equations, effects=set(),
            debug_info=jaxpr.debug_info._replace(
                arg_names=("",) * len(inputs), result_paths=("",) * len(outputs)
            ),
        )  # fmt: skip
        found = policed(
            self._trace, closed_jaxpr(part), _layer_name(equations), labels, prevent_cse=True,
            origin="repeated",
        )  # fmt: skip
        if found is None:
            return equations
        for part, count in self._parts(found.block.name, 1):
            found = found.of_runs(part, count)
        new = jax.make_jaxpr(found.run(marked=False))(*map(like, inputs))
        return spliced(getattr(new, "jaxpr", new), inputs, outputs) or equations


def _is_loop(length: int, unroll: int) -> bool:
    """Whether all of a scan is in a loop: not if it runs once, or leaves iterations over."""
    return unroll > 0 and length // unroll > 1 and length % unroll == 0


# -- repeated layers -------------------------------------------------------------------------------

#: Fewer equations are no layer.
_SMALLEST_LAYER = 4

#: Operations whose result is an argument, or a part of it.
_PARTS = frozenset({
    "convert_element_type", "copy", "dynamic_slice", "reduce_precision", "reshape", "slice",
    "squeeze", "transpose",
})  # fmt: skip

#: So many products of a layer may be alike, and so many distances between such ones are tried.
_MOST_ALIKE, _MOST_PERIODS = 16, 200


@dataclasses.dataclass(frozen=True)
class _Run:
    """Consecutive equal parts of a list: as many of ``period`` elements as fit in ``length``.

    What is left over at the end is equal to the beginning of a part.
    """

    start: int
    period: int
    length: int

    @property
    def count(self) -> int:
        return self.length // self.period

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def starts(self) -> range:
        return range(self.start, self.end, self.period)


def _tokens(
    equations: Sequence[Any], *, effects: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Numbers of equations, equal for equal ones, and which equations are heavy.

    Equations that cannot be part of a layer are equal to nothing; with ``effects``, those with side
    effects are treated as if they could.
    """
    numbers: dict[Any, int] = {}
    tokens = np.array([numbers.setdefault(_token(e), len(numbers)) for e in equations], np.int64)
    heavy = np.array([_is_heavy(e) for e in equations], bool)
    blocked = np.array(
        [_is_decided(e) or (bool(e.effects) and not effects) for e in equations], bool
    )
    tokens[blocked] = -1 - np.arange(len(tokens))[blocked]
    return tokens, heavy


def _runs(equations: Sequence[Any], *, effects: bool = False) -> list[_Run]:
    """The repeated layers among equations, in order."""
    tokens, heavy = _tokens(equations, effects=effects)
    runs: list[_Run] = []
    waiting = [(0, len(equations))]
    while waiting:
        first, last = waiting.pop()
        run = _longest_run(tokens[first:last], heavy[first:last])
        if run is None:
            continue
        run = _best_cut(equations, dataclasses.replace(run, start=run.start + first))
        runs.append(run)
        waiting += [(first, run.start), (run.end, last)]
    return sorted(runs, key=lambda run: run.start)


def _left_over(equations: Sequence[Any], runs: Sequence[_Run]) -> Iterator[tuple[_Run, int]]:
    """Runs with the first product next to them that seems to be that of one more layer.

    The equations before the run or after it include those of a layer; or of half of one, if the
    layer of the run is two equal ones.
    """
    if not runs:
        return
    tokens, heavy = _tokens(equations, effects=True)
    ends = [0, *(run.end for run in runs)]
    starts = [*(run.start for run in runs), len(equations)]
    gaps = [range(first, last) for first, last in zip(ends, starts, strict=True)]
    known: set[int] = set()
    for run, before, after in zip(runs, gaps, gaps[1:], strict=False):
        half = run.period // 2
        first, second = (tokens[at : at + half] for at in (run.start, run.start + half))
        size = half if run.period == 2 * half and (first == second).all() else run.period
        needed = collections.Counter(tokens[run.start : run.start + size].tolist())
        for gap in (before, after):
            present = collections.Counter(tokens[gap.start : gap.stop].tolist())
            if needed <= present and gap.start not in known:
                known.add(gap.start)
                yield run, next(n for n in gap if heavy[n] and tokens[n] in needed)


def _inputs(equations: Sequence[Any]) -> list[Any]:
    """The variables that equations use and do not define, in order."""
    mine = {id(v) for e in equations for v in e.outvars}
    free: dict[int, Any] = {}
    for equation in equations:
        for variable in equation.invars:
            if not isinstance(variable, jax.extend.core.Literal) and id(variable) not in mine:
                free.setdefault(id(variable), variable)
    return [*free.values()]


def _longest_run(tokens: npt.NDArray[np.int64], heavy: npt.NDArray[np.bool_]) -> _Run | None:
    """The longest run of equal parts with a product in each; of two alike, with shorter parts."""
    places: dict[int, list[int]] = {}
    for place in np.flatnonzero(heavy).tolist():
        places.setdefault(int(tokens[place]), []).append(place)
    best: _Run | None = None
    for period in sorted(_periods(places.values())):
        equal = np.concatenate([[False], tokens[:-period] == tokens[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (end - start) // period + 1
            if count < 2 or not heavy[start : start + period].any():
                continue
            run = _Run(start, period, end - start + period)
            if best is None or run.period * run.count > 1.1 * best.period * best.count:
                best = run
    return best


def _periods(places: Iterable[Sequence[int]]) -> set[int]:
    """Numbers of equations that a layer may have: distances of equal products.

    ``places`` are those of equal ones.  A layer may have several that are alike, so that distances
    of the second next and of later ones count as well: of these, the most common.
    """
    periods: set[int] = set()
    farther: collections.Counter[int] = collections.Counter()
    for same in places:
        periods |= {after - before for before, after in itertools.pairwise(same)}
        for number in range(2, _MOST_ALIKE + 1):
            pairs = zip(same, same[number:], strict=False)
            farther.update(after - before for before, after in pairs)
    periods |= {period for period, _ in farther.most_common(_MOST_PERIODS)}
    return {period for period in periods if period >= _SMALLEST_LAYER}


def _best_cut(equations: Sequence[Any], run: _Run) -> _Run:
    """The run, shifted so that the fewest bytes pass from one part to the next.

    What was left over at its end may be part of its last layer then.
    """
    last_use: dict[int, int] = {}
    for place, equation in enumerate(equations):
        for variable in equation.invars:
            last_use[id(variable)] = place

    def crossing(cut: int) -> int:
        return sum(
            size_bytes(variable.aval)
            for equation in equations[max(0, cut - run.period) : cut]
            for variable in equation.outvars
            if last_use.get(id(variable), -1) >= cut
        )

    # The second cut: values from before the first part cross every one.
    shift = min(range(run.period), key=lambda shift: crossing(run.start + run.period + shift))
    shifted = _Run(run.start + shift, run.period, run.length - shift)
    return run if shifted.count < 2 else shifted


def _token(equation: Any) -> Any:
    """What two equal equations have in common: the primitive, its parameters and types."""
    inner = inner_jaxpr(equation)
    parameters: Any = None if inner is None else tuple(map(_token, inner.eqns))
    if inner is None and equation.primitive.name != "slice":  # of stacked parameters
        texts = {key: value for key, value in equation.params.items() if _is_plain(value)}
        parameters = str(sorted(texts.items(), key=lambda item: item[0]))
    types = tuple(str(v.aval) for v in (*equation.invars, *equation.outvars))
    return equation.primitive.name, parameters, types


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | tuple | frozenset | type(None))


def _is_heavy(equation: Any) -> bool:
    """Whether an equation is a product or has one inside, or is a kernel; loops do not count.

    A loop without products beside it is no layer, but has layers.
    """
    name = equation.primitive.name
    if name in PRODUCTS or name in ("custom_vjp_call", "pallas_call"):
        return True
    inner = None if name == "scan" else inner_jaxpr(equation)
    return inner is not None and any(map(_is_heavy, inner.eqns))


def _is_decided(equation: Any) -> bool:
    """Whether an equation is a ``jax.checkpoint``, or has one inside."""
    inner = inner_jaxpr(equation)
    return equation.primitive.name in REMATS or (inner is not None and any(checkpoints_in(inner)))


def _is_planned(found: tuple[Any, int]) -> bool:
    """Whether an equation of ``jax.checkpoint``, with its runs, is that of a marked block."""
    return isinstance(found[0].params.get("policy"), PlannedPolicy)


def _marked_runs(jaxpr: Any) -> dict[str, int]:
    """How often a jaxpr runs each marked block."""
    found: collections.Counter[str] = collections.Counter()
    for equation, runs in checkpoints_in(jaxpr):
        policy = equation.params.get("policy")
        if isinstance(policy, PlannedPolicy):
            found[policy.block] += runs
    return dict(found)


# -- names -----------------------------------------------------------------------------------------


def _name(jaxpr: Any) -> str:
    """The name of the function of a jaxpr."""
    text = str(getattr(jaxpr.debug_info, "func_src_info", "")).split(" at ")[0]
    name = re.sub(r"[^\w.]", "", text.rpartition(".")[2]).strip("_")
    return name if name and not text.startswith("<") and name != "lambda" else "scan"


def _own_names(jaxpr: Any) -> list[str]:
    """The names that the function of a jaxpr has for its arguments; empty where it has none."""
    names = [str(name or "") for name in getattr(jaxpr.debug_info, "arg_names", None) or ()]
    missing = len(jaxpr.invars) - len(names)
    return [""] * missing + names if missing >= 0 else names[-len(jaxpr.invars) :]


def _common(names: Sequence[str]) -> str:
    """What the names of an input of each layer have in common, ``*`` for numbers that differ.

    >>> _common(["params[0]['wq']", "params[1]['wq']"])
    "params[*]['wq']"
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    if not all(names) or len({len(each) for each in parts}) > 1:
        return ""
    found = [[*dict.fromkeys(each)] for each in zip(*parts, strict=True)]
    if any(len(each) > 1 and n % 2 == 0 for n, each in enumerate(found)):
        return ""
    return "".join(each[0] if len(each) == 1 else "*" for each in found)


def _layer_name(equations: Sequence[Any]) -> str:
    """The innermost function of the user that all equations are in."""
    common: list[tuple[str, str]] | None = None
    for equation in equations:
        path = [(f.file_name, f.function_name) for f in reversed(frames(equation))]
        if path:
            pairs = zip(common or (), path, strict=False)
            common = path if common is None else [
                a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            ]  # fmt: skip
    name = common[-1][1].rpartition(".")[2] if common else ""
    return re.sub(r"\W", "", name).strip("_") if name and not name.startswith("<") else "layer"
