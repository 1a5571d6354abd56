"""Lower bounds that hold for every memory policy, number of microbatches and sharding.

**Time.**  Every policy computes the products of the forward and of the backward pass, and what is
outside of both.  Each of these ops takes at least the time of its best split, without collectives
(:mod:`toast.cost.bound`); other work inside of the passes, which policies change, counts nothing.

**Recomputation.**  What the backward pass needs of the forward pass is kept, recomputed or
offloaded.  A linear program finds the least that this adds to the time, in shares of values: kept
values take at least the bytes of their best split beside the arguments, less what may be in fast
memory, recomputed ones the time of their products, and transfers to the host run beside everything
else.  It is a relaxation: any value that the backward pass computes again may be kept, whether a
policy can name it or not, and values that no policy recomputes take no memory.

**Memory.**  The arguments are in memory during the whole step, and the results at its end.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import optimize, sparse

from toast.cost import CostModel
from toast.cost import bound as roofline
from toast.cost.terms import StepPart
from toast.plan.plan import Plan
from toast.program import Program, element_bytes
from toast.units import size_text

#: Seconds that the solver may take; if it needs more, products alone are the bound.
_SECONDS = 10.0

#: The share by which the solver's answer may be above the least.
_TOLERANCE = 1e-6

_Floats = npt.NDArray[np.float64]


def policy_bound(surveyed: Plan, *, most_microbatches: int = 1) -> float:
    """Seconds that a step takes at least, with every policy with which the program may be traced.

    :param surveyed: a plan of the survey of the program (:func:`toast.program.survey`), on the mesh
        and the hardware; its shardings do not matter.
    :param most_microbatches: into how many parts each microbatch of ``surveyed`` may be cut.
    :returns: the bound; infinite if no policy fits.
    """
    model, program = surveyed.model, surveyed.analysis.program
    products, every, alone = _least_seconds(model)
    passes = program.passes
    again = _recomputed(program)
    base = 0.0
    for op, here in enumerate(passes):
        if op not in again:
            base += products[op] if here or not alone[op] else every[op]
    base = float(base) * (1.0 - _TOLERANCE)  # plan files have no numbers of numpy
    room = surveyed.memory_bytes - least_memory(surveyed, results=False)
    if room < 0:
        return math.inf
    room = model.machine.most_temporaries(room)
    # The residuals of several gradients are not in memory at once.
    marks = [here for here in passes if here]
    if "forward" in marks[next((n for n, p in enumerate(marks) if p != "forward"), len(marks)) :]:
        return base
    return _with_recomputation(surveyed, again, products, base, room, most_microbatches)


def least_memory(plan: Plan, *, results: bool = True) -> float:
    """Bytes on a device that every sharding needs, under every memory policy.

    The arguments, and the results that overwrite none of them, each sharded over as many devices as
    possible.
    """
    model, program = plan.model, plan.analysis.program
    size = roofline.least_argument_bytes(model.tables, model.machine, model.space.choices)
    size += model.captured_bytes
    if not results:
        return size
    most, of_op = _most_shards(model), model.space.classes.of_op
    first = len(program.ops) - len(program.results)
    arguments = {*program.argument_values}
    found: set[int] = set()
    for number, alias in enumerate(program.aliases):
        (value,) = program.ops[first + number].operands[:1]
        if alias < 0 and value not in found | arguments:
            found.add(value)
            shards = max(most[of_op[program.values[value].op]], most[of_op[first + number]])
            size += _bytes(program, value) / shards
    return size


def misfit_proof(plan: Plan) -> str:
    """Why no plan fits, in words, if that is certain; else empty."""
    least = least_memory(plan)
    if least <= plan.memory_bytes or plan.padding:
        return ""
    return (
        "no sharding without padding and no memory policy fits: arguments and results alone take "
        f"at least {size_text(least)} per device"
    )


def _bytes(program: Program, value: int) -> float:
    type_ = program.values[value].type
    return float(math.prod(type_.shape) * element_bytes(type_.dtype))


def _most_shards(model: CostModel) -> _Floats:
    """``[K]`` the most devices over which the tensors of each op class can be sharded."""
    sizes = model.machine.axis_sizes.tolist()
    return np.array([
        math.prod(size for a, size in enumerate(sizes) if (rows[:, a] >= 0).any())
        for rows in model.space.choices
    ])  # fmt: skip


def _least_seconds(model: CostModel) -> tuple[_Floats, _Floats, npt.NDArray[np.bool_]]:
    """``[ops]`` the least seconds of products, and of everything; and whose classes are alone.

    The last is whether all members of its class are outside of the passes.
    """
    program, classes = model.space.analysis.program, model.space.classes
    repeats = np.array(program.repeats, dtype=np.float64)
    total = np.bincount(classes.of_op, weights=repeats, minlength=len(classes.representative))
    share = repeats / np.maximum(total, 1e-300)[classes.of_op]
    products = [term for term in model.terms if term.part is StepPart.PRODUCTS]
    of_products, of_all = (
        np.array([seconds.min(initial=math.inf) for seconds in each])
        for each in (
            roofline.class_seconds(model.tables, model.machine, products, model.space.choices),
            model.class_seconds(),
        )
    )
    inside = np.array([bool(here) for here in program.passes])
    mixed = np.bincount(classes.of_op, weights=inside, minlength=len(total)) > 0
    return (
        of_products[classes.of_op] * share,
        of_all[classes.of_op] * share,
        ~mixed[classes.of_op],
    )


def _recomputed(program: Program) -> frozenset[int]:
    """The ops whose results do not depend on gradients, in the backward pass of a survey."""
    passes = program.passes
    again: set[int] = set()
    for op, here in enumerate(passes):
        if program.kind(op) == "optimization_barrier":
            continue  # what goes into recomputation, and the gradients, pass barriers
        if here == "recomputed":
            again.add(op)
        elif here == "backward":
            makers = {program.values[value].op for value in program.ops[op].operands}
            known = {maker for maker in makers if maker in again}
            if known and all(
                maker in again or program.kind(maker) in ("constant", "iota") for maker in makers
            ):
                again.add(op)
    return frozenset(again)


def _with_recomputation(
    plan: Plan,
    again: frozenset[int],
    products: _Floats,
    base: float,
    room: float,
    most_microbatches: int,
) -> float:
    """The least seconds if ``room`` bytes are left for what is kept for the backward pass."""
    model, program = plan.model, plan.analysis.program
    most, of_op = _most_shards(model), model.space.classes.of_op
    values = [value for op in sorted(again) for value in program.ops[op].results]
    if not values or base <= 0:
        return base
    number = {value: n for n, value in enumerate(values)}
    makers = [program.values[value].op for value in values]
    runs = np.array([program.repeats[op] for op in makers], dtype=np.float64)
    size = np.array([_bytes(program, value) for value in values]) / most[of_op[makers]]
    kept = size * runs / (plan.microbatches * most_microbatches)
    moved = 2.0 * size * runs / plan.hardware.host_bytes_per_s
    # Several results of an op are computed at once.
    seconds = np.array([products[op] / len(program.ops[op].results) for op in makers])
    # The unknowns: the share of each value that is recomputed, kept, offloaded; and the time.
    count = len(values)
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    lower: list[float] = []

    def row(least: float, terms: dict[int, float]) -> None:
        rows.extend([len(lower)] * len(terms))
        columns.extend(terms)
        entries.extend(terms.values())
        lower.append(least)

    for user, op in enumerate(program.ops):
        for value in {*op.operands} & number.keys():
            mine = number[value]
            present = {mine: 1.0, count + mine: 1.0, 2 * count + mine: 1.0}
            results = [number[result] for result in op.results if user in again]
            for result in results:
                row(0.0, {**present, result: -1.0})
            if user not in again:
                row(1.0, present)
    row(1.0, {3 * count: 1.0, **{n: -s / base for n, s in enumerate(seconds.tolist()) if s}})
    row(0.0, {3 * count: 1.0, **{2 * count + n: -s / base for n, s in enumerate(moved.tolist())}})
    scale = max(room, 1.0)
    row(-room / scale, {count + n: -b / scale for n, b in enumerate(kept.tolist())})
    may_move = float(plan.hardware.has_host_link)
    matrix = sparse.csr_array((entries, (rows, columns)), shape=(len(lower), 3 * count + 1))
    answer = optimize.milp(
        np.append(np.zeros(3 * count), 1.0),
        constraints=optimize.LinearConstraint(matrix, lb=np.array(lower)),
        bounds=optimize.Bounds(0.0, [*[1.0] * 2 * count, *[may_move] * count, np.inf]),
        integrality=np.zeros(3 * count + 1, dtype=np.int64), options={"time_limit": _SECONDS},
    )  # fmt: skip
    if answer.status != 0 or answer.fun is None:
        return base
    return base * max(1.0, float(answer.fun) * (1.0 - _TOLERANCE))


__all__ = ["least_memory", "misfit_proof", "policy_bound"]
