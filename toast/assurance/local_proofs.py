"""Proves local forms by execution: device-local programs of random ops under random shardings.

Random ops of a kind, each with arguments of its own, make one program.  Its device-local program
runs on CPU devices.  Its results must be those of the ops on one device, and its collectives those
that the cost model predicts.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from toast import api
from toast.analysis import Analysis
from toast.apply import Runnable
from toast.apply.verify import check_output, random_operands, tolerance_of
from toast.assurance import instances
from toast.assurance.instances import Instance
from toast.assurance.op_runs import OpRun, run_all
from toast.assurance.sharded_op import identity
from toast.cost import CostModel
from toast.errors import PlanError, ToastError
from toast.hardware import Mesh, load
from toast.plan.shard import lowered_state
from toast.program import Program
from toast.space import Space, States
from toast.uneven import padded_program

#: The meshes of the proofs; 3 devices divide other sizes than 2, 4 and 8.
MESHES = ("a=2", "b=3,a=2", "a=4,b=2", "a=2,c=2,b=2")

#: The ops of a program: compiling takes most of the time.
_BATCH = 17

#: The share of op classes that are sharded if they can be.
_SHARDED = 0.9


@dataclasses.dataclass(frozen=True)
class LocalRun:
    """The outcome for one op under one sharding."""

    instance: Instance
    mesh: str
    #: The axes of its factors: ``batch: a, c``.
    sharding: str
    #: ``equal``, a text that begins with ``wrong``, or the reason why it was not run.
    outcome: str
    #: Whether it runs whole along factors that the sharding has.
    gathered: bool = False

    @property
    def wrong(self) -> bool:
        """Whether the results differ from those of one device, or the program is not valid."""
        return self.outcome.startswith("wrong")


@dataclasses.dataclass(frozen=True)
class LocalProofs:
    """The outcomes of the local forms of an op kind."""

    kind: str
    instances: int
    runs: tuple[LocalRun, ...]
    #: Collectives that were emitted and not predicted, and the other way round, as text.
    differing: tuple[str, ...]

    @property
    def wrong(self) -> tuple[LocalRun, ...]:
        """The runs with wrong results."""
        return tuple(run for run in self.runs if run.wrong)

    def count(self, *, sharded: bool = False, gathered: bool = False, equal: bool = False) -> int:
        """The number of runs that were sharded, ran whole along a factor, or had equal results."""
        return sum(
            (not sharded or bool(run.sharding))
            and (not gathered or run.gathered)
            and (not equal or run.outcome == "equal")
            for run in self.runs
        )


def prove_local_kind(
    kind: str, count: int, *, meshes: Sequence[str] = MESHES, rounds: int = 3, seed: int = 0
) -> LocalProofs:
    """Proves the local form of an op kind on random ops (:mod:`toast.assurance.instances`).

    :param kind: the op kind, or ``custom_call TARGET``.
    :param count: the number of different ops; there may be fewer.
    :param meshes: the meshes, as for :func:`prove_local`, and ``rounds`` too.
    :param seed: the seed of the ops, the shardings and the operands.
    """
    drawn = instances.draw(kind, count, seed)
    return prove_local(drawn, kind, meshes=meshes, rounds=rounds, seed=seed)


def prove_local(
    drawn: Sequence[Instance], name: str, *, meshes: Sequence[str] = MESHES, rounds: int = 3,
    seed: int = 0,
) -> LocalProofs:  # fmt: skip
    """Proves the local forms of ops under random shardings.

    Each op runs in ``rounds`` random shardings on different meshes; in every third of all rounds,
    its dimensions are padded where the axes do not divide them.

    :param drawn: the ops.
    :param name: what they are, for texts.
    :param meshes: the meshes; JAX must have as many devices.
    :param seed: the seed of the shardings and the operands.
    """
    random = np.random.default_rng(seed)
    arguments = [_operands(instance, seed) for instance in drawn]
    whole = run_all([
        OpRun((one.text, one.operands, one.results), [operands, operands])
        for one, operands in zip(drawn, arguments, strict=True)
    ])  # fmt: skip
    runs: list[LocalRun] = []
    cases: list[_Case] = []
    for instance, operands, results in zip(drawn, arguments, whole, strict=True):
        if isinstance(results, str):
            runs.append(LocalRun(instance, "", "", results))
        elif not all(map(_same, *results)):
            runs.append(LocalRun(instance, "", "", "has other results in every run"))
        else:
            cases.append(_Case(instance, operands, results[0]))
    differing: list[str] = []
    for number, start in enumerate(range(0, len(cases), _BATCH)):
        batch = _Batch(name, cases[start : start + _BATCH])
        for place in range(rounds * number, rounds * (number + 1)):
            mesh = Mesh.parse(meshes[place % len(meshes)])
            batch.run(mesh, random, padded=place % 3 == 2)
        runs += batch.runs
        differing += batch.differing
    return LocalProofs(name, len(drawn), tuple(runs), tuple(differing))


@dataclasses.dataclass(frozen=True)
class _Case:
    """An op with its operands, and its results on one device."""

    instance: Instance
    operands: list[Any]
    expected: list[Any]


class _Batch:
    """Ops that are lowered and run as one program."""

    def __init__(self, kind: str, cases: Sequence[_Case]) -> None:
        self.kind, self.cases = kind, cases
        self.analysis = api.analyze(
            instances.program_of([case.instance for case in cases], "ops"), lowering="local"
        )
        self.runs: list[LocalRun] = []
        self.differing: list[str] = []

    def run(self, mesh: Mesh, random: np.random.Generator, *, padded: bool = False) -> None:
        """Runs the ops once, in a random state of a mesh."""
        analysis = self.analysis
        name = f"{mesh}, padded" if padded else str(mesh)
        if padded:
            try:
                larger = padded_program(analysis, mesh, 1.0)
            except PlanError as error:
                self.runs += [LocalRun(c.instance, name, "", str(error)) for c in self.cases]
                return
            if larger is None:
                return
            analysis = api.analyze(larger.program, lowering="local")
        model = CostModel(Space(analysis, mesh), load("tpu-v5e"))
        state = random_state(model.space, random)
        places = _ops_of_results(analysis.program, [len(c.expected) for c in self.cases])
        described = [_described(analysis, model.space, state, op) for op in places]
        try:
            local, predicted = lowered_state(model, state), model.local_collectives(state)
            if (emitted := local.counts()) != predicted:
                more, less = emitted - predicted, predicted - emitted
                self.differing.append(
                    f"{self.kind} on {name}: emitted {dict(more)}, predicted {dict(less)}"
                )
            actual = Runnable(
                analysis.program, local.shardings, module_of=lambda *_: local.module
            ).run_flat([argument for case in self.cases for argument in case.operands])
            actual = [np.asarray(result) for result in actual]  # XLA's errors come late
        except Exception as error:  # XLA's own, or an invalid module
            self._split(mesh, random, name, described, error, padded)
            return
        whole = {gathered.op for gathered in local.gathered}
        results = iter(actual)
        for case, op, sharding in zip(self.cases, places, described, strict=True):
            outcome = _outcome(case, [next(results) for _ in case.expected])
            self.runs.append(LocalRun(case.instance, name, sharding, outcome, op in whole))

    def _split(
        self, mesh: Mesh, random: np.random.Generator, name: str, described: Sequence[str],
        error: Exception, padded: bool,
    ) -> None:  # fmt: skip
        """Runs halves of the ops after an error, to find the op that causes it."""
        if len(self.cases) == 1:
            text = " ".join(str(error).split())[:300]
            instance = self.cases[0].instance
            if not isinstance(error, ToastError) and not self._runs_unsharded(mesh):
                self.runs.append(LocalRun(instance, "", "", f"XLA cannot partition it: {text}"))
                return
            kind = "" if isinstance(error, ToastError) else f"{type(error).__name__}: "
            self.runs.append(LocalRun(instance, name, described[0], f"wrong: {kind}{text}"))
            return
        half = len(self.cases) // 2
        for part in (self.cases[:half], self.cases[half:]):
            batch = _Batch(self.kind, part)
            batch.run(mesh, random, padded=padded)
            self.runs += batch.runs
            self.differing += batch.differing

    def _runs_unsharded(self, mesh: Mesh) -> bool:
        """Whether XLA runs the ops on a mesh at all, whole on every device."""
        model = CostModel(Space(self.analysis, mesh), load("tpu-v5e"))
        local = lowered_state(model, model.space.unsharded)
        arguments = [argument for case in self.cases for argument in case.operands]
        try:
            results = Runnable(
                self.analysis.program, local.shardings, module_of=lambda *_: local.module
            ).run_flat(arguments)
            jax.block_until_ready(results)
        except Exception:  # XLA's own
            return False
        return True


def random_state(space: Space, random: np.random.Generator) -> States:
    """A random legal state, ``[classes, axes]``: each op class chooses for itself.

    Most op classes are sharded if they can be.
    """
    rows = []
    for legal in map(space.choices_of, range(len(space.classes.representative))):
        least = int(len(legal) > 1 and random.random() < _SHARDED)  # the first one is unsharded
        rows.append(legal[random.integers(least, len(legal))])
    return np.stack(rows)


def _operands(instance: Instance, seed: int) -> list[Any]:
    """Random operands.  XLA leaves out reductions over one element with their initial values."""
    operands = random_operands(instance.operands, seed)
    combiner = re.search(r'"stablehlo\.(\w+)"\(%a', instance.region)
    if instance.name == "stablehlo.reduce_window" and combiner:
        count = len(instance.results)
        for place in range(count, 2 * count):
            start = operands[place]
            operands[place] = np.full_like(start, identity(combiner[1], start.dtype))
    return operands


def _same(first: Any, second: Any) -> bool:
    return bool(np.asarray(first).tobytes() == np.asarray(second).tobytes())


def _ops_of_results(program: Program, counts: Sequence[int]) -> list[int]:
    """The op of each instance: the one that defines its first result, or feeds what cuts it."""
    makers = [program.values[value].op for value in program.result_values]
    firsts = [0, *itertools.accumulate(counts)][: len(counts)]
    return [makers[first] for first in firsts]


def _described(analysis: Analysis, space: Space, state: States, op: int) -> str:
    """The axes of the factors of an op."""
    rule = analysis.rules[analysis.program.ops[op].signature]
    held = space.of_ops(state)[op].tolist()
    axes = collections.defaultdict(list)
    for axis, factor in zip(space.mesh.names, held, strict=True):
        if factor >= 0:
            axes[rule.factors[factor].label].append(axis)
    return "; ".join(f"{label}: {', '.join(names)}" for label, names in axes.items())


def _outcome(case: _Case, results: Sequence[Any]) -> str:
    """Compares the results of an op with those of one device."""
    types = (*case.instance.operands, *case.instance.results)
    limit = tolerance_of(type_.dtype for type_ in types)
    for index, (actual, expected) in enumerate(zip(results, case.expected, strict=True)):
        check = check_output(str(index), actual, np.asarray(expected), limit)
        if not check.equal:
            return f"wrong: result {index} differs by {check.relative_error:.2g} of the largest"
    return "equal"


__all__ = [
    "MESHES", "LocalProofs", "LocalRun", "prove_local", "prove_local_kind",
    "random_state",
]  # fmt: skip
