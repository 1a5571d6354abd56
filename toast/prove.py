"""Rules proven by execution: an op run on shards must equal the op run on the whole.

For every distinct op of a program and every factor that its rule lets a mesh axis lie on, the
operands are split along the factor, the op is run on each part, and the results are concatenated,
or put together by the factor's combiner.  No sharding and no partitioner takes part: what is tested
is the claim that the rule makes.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from toast import instances
from toast.analysis.rules import SignatureRule, known_rules, solve_rules, user_files
from toast.apply.execute import flat_jit
from toast.apply.verify import random_operands, tolerance_of
from toast.errors import PlanError, TargetError
from toast.frontend import Program, Signature, TensorType, mlir, stablehlo
from toast.frontend.mlir import Source
from toast.logic import kind_line
from toast.resources import directory

#: Shards an op is split into, where the factor's size allows.
_SHARDS = (2, 3)

#: Elements of an operand or result beyond which an op is not run.
_LARGEST = 2**20

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def _identity(combiner: str, dtype: Any) -> Any:
    """What leaves a value as it is under a combiner."""
    floating = dtype.kind in "fcV"
    lowest, highest = (-np.inf, np.inf) if floating else _range(dtype)
    return {
        "add": 0, "multiply": 1, "maximum": lowest, "minimum": highest, "or": 0,
        "and": 1 if dtype.kind == "b" else -1 if dtype.kind == "i" else highest,
    }[combiner]  # fmt: skip


def _range(dtype: Any) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)


#: Ops that pick along a dimension, and the attribute that lists the dimensions their indices mean.
_INDICES = {
    "gather": "start_index_map", "scatter": "scattered_dims_to_operand_dims",
    "torch_index_select": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Proof:
    """The outcome for one factor of one op."""

    kind: str
    op: int
    factor: str
    #: ``proven``, ``wrong``, or why it was not run.
    outcome: str

    @property
    def wrong(self) -> bool:
        """Whether running the op contradicts its rule."""
        return self.outcome.startswith("wrong")


@dataclasses.dataclass(frozen=True)
class Tally:
    """Outcomes of one op kind."""

    kind: str
    instances: int
    proven: int
    wrong: int
    skipped: int


#: What a custom call computes, by its target: a function of its operands, arrays all.
References = Mapping[str, Callable[..., Any]]


def prove(
    program: Program,
    rules: Sequence[Any] = (),
    *,
    references: References | None = None,
    seed: int = 0,
) -> tuple[Proof, ...]:
    """Prove the rules of all distinct ops of ``program``, which should be small.

    ``references`` says what custom calls compute that XLA has no code for here.

    Raises :class:`toast.errors.PlanError` for fact bases, which have nothing to run.
    """
    source = program.source
    if not isinstance(source, Source):
        raise PlanError(f"{program.name} is a fact base: there are no ops to run")
    solved = solve_rules(program, rules)
    seen: set[int] = set()
    found: list[_Instance] = []
    for number, op in enumerate(program.ops):
        if op.signature in seen or source.operations[number] is None:
            continue
        seen.add(op.signature)
        signature, rule = program.signatures[op.signature], solved[op.signature]
        if rule.missing or signature.kind in ("carry", "yield", "join", "optimization_barrier"):
            continue
        text = mlir.generic_text(source.operations[number])
        target = str(signature.attribute("call_target_name") or "")
        reference = (references or {}).get(target) or _reference(signature)
        found.append(_Instance(number, signature, rule, text, seed, reference))
    return _outcomes(found)


def _outcomes(ops: Sequence[_Instance]) -> tuple[Proof, ...]:
    """Every factor that an axis may lie on, with its outcome."""
    claims = [(i, f, n) for i in ops for f, n in i.claims()]
    refused = [i.unclaimed(f) for i, f, _ in claims]
    open_ = [claim for claim, reason in zip(claims, refused, strict=True) if not reason]
    claimed = list({id(i): i for i, _, _ in open_}.values())
    whole = _run_all([_Job(i.whole(), [i.arguments], i.reference) for i in claimed])
    expected = {id(i): results for i, results in zip(claimed, whole, strict=True)}
    parts = _run_all([_Job(i.part(f, n), i.split(f, n), i.reference) for i, f, n in open_])
    found = iter(zip(open_, parts, strict=True))
    proofs = []
    for (instance, factor, shards), reason in zip(claims, refused, strict=True):
        if not reason:
            _, pieces = next(found)
            want = expected[id(instance)]
            broken = next((r for r in (want, pieces) if isinstance(r, str)), "")
            reason = broken or instance.compare(factor, shards, pieces, want[0])  # type: ignore[arg-type]
        label = instance.rule.factors[factor].label
        proofs.append(Proof(instance.signature.kind, instance.number, label, reason))
    return tuple(proofs)


def _halves(x: Any) -> tuple[Any, Any]:
    return jax.numpy.uint32(x >> 32), jax.numpy.uint32(x & 0xFFFFFFFF)


def _best(x: Any, *_rest: Any, count: int) -> Any:
    return jax.lax.top_k(x, count)


#: What the custom calls compute that rules know and this machine may have no code for.  Annotations
#: compute nothing.
_KNOWN: References = {
    **{target: lambda x: x for target in instances.ANNOTATIONS},
    "mhlo.erf": jax.lax.erf,
    "X64Combine": lambda low, high: jax.numpy.uint64(low) | jax.numpy.uint64(high) << 32,
    "X64SplitHigh": lambda x: _halves(x)[0],
    "X64SplitLow": lambda x: _halves(x)[1],
    "Cholesky": lambda x: np.linalg.cholesky(x @ x.mT + np.eye(x.shape[-1])),
    "Eigh": lambda x: np.linalg.eigh(x @ x.mT)[::-1],
    "LuDecomposition": jax.lax.linalg.lu,
    "ProductOfElementaryHouseholderReflectors": jax.lax.linalg.householder_product,
    "Qr": lambda x: (x, np.diagonal(np.linalg.qr(x, mode="r"), axis1=-2, axis2=-1)),
}


def _reference(signature: Signature) -> Callable[..., Any] | None:
    target = str(signature.attribute("call_target_name") or "")
    if target in ("TopK", "mhlo.topk", "ApproxTopK", "PartialReduce"):
        return functools.partial(_best, count=signature.results[0].shape[-1])
    return _KNOWN.get(target)


def prove_kind(kind: str, count: int, rules: Sequence[Any] = (), *, seed: int = 0) -> Proven:
    """Prove the rule of an op kind on ``count`` drawn ops (:mod:`toast.instances`)."""
    drawn = instances.draw(kind, count, seed)
    program = instances.program_of(drawn, kind)
    words = {word for rule in solve_rules(program, rules) for word in _words(rule)}
    proofs = prove(program, rules, seed=seed)
    (row,) = tally(proofs) or (Tally(kind, 0, 0, 0, 0),)
    row = dataclasses.replace(row, instances=len(set(drawn)))
    order = ("pass-through", "reduction", "permutation", "need-replication")
    return Proven(row, tuple(w for w in order if w in words), program, proofs)


def drawable(files: Sequence[pathlib.Path]) -> tuple[list[str], list[str]]:
    """The kinds of rule files that ops can be drawn of, and why the others cannot be proven so.

    Of the shipped rules, if there are no ``files``.
    """
    if not files:
        return list(instances.KINDS), []
    kinds, notes = [], []
    for file in user_files(files):
        for kind, custom in sorted(known_rules(file)):
            name = f"custom_call {kind}" if custom else kind
            if name in instances.KINDS:
                kinds.append(name)
            else:
                notes.append(
                    f"{file}:{kind_line(file, kind)}: no ops of {kind} can be drawn; "
                    "prove it on a program: toast rules prove TARGET --rules"
                )
    return kinds, notes


def _words(rule: SignatureRule) -> Iterator[str]:
    for factor in rule.factors:
        plain = not (factor.combiner or factor.permutation or factor.need_replication)
        named = {
            "pass-through": plain, "reduction": factor.combiner, "permutation": factor.permutation,
            "need-replication": factor.need_replication,
        }  # fmt: skip
        yield from (word for word, holds in named.items() if holds)


@dataclasses.dataclass(frozen=True)
class Proven:
    """What proving an op kind has found."""

    tally: Tally
    #: The kinds of factors that its rule makes.
    factors: tuple[str, ...]
    program: Program
    proofs: tuple[Proof, ...]


def record() -> dict[str, dict[str, str]]:
    """Of each shipped kind, what the last ``make prove`` has found: ``rules/proven.csv``."""
    path = directory("rules") / "proven.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as lines:
        return {row["kind"]: row for row in csv.DictReader(lines)}


def tally(proofs: Sequence[Proof]) -> tuple[Tally, ...]:
    """Outcomes by op kind, sorted."""
    by_kind = collections.defaultdict(list)
    for proof in proofs:
        by_kind[proof.kind].append(proof)
    return tuple(
        Tally(
            kind,
            len({p.op for p in found}),
            sum(p.outcome == "proven" for p in found),
            sum(p.wrong for p in found),
            sum(p.outcome != "proven" and not p.wrong for p in found),
        )
        for kind, found in sorted(by_kind.items())
    )


@dataclasses.dataclass(frozen=True)
class _Job:
    """One op, and the argument lists that it is to be run on."""

    op: tuple[str, tuple[TensorType, ...], tuple[TensorType, ...]]
    runs: list[list[Any]]
    #: What the op computes, if not to be found by running it.
    reference: Callable[..., Any] | None = None


#: Results of each run of a job, or why it did not run.
_Ran = list[list[Any]] | str

#: Ops compiled together: compiling is what takes the time.
_BATCH = 48


def _run_all(jobs: Sequence[_Job]) -> list[_Ran]:
    plain = [job for job in jobs if job.reference is None]
    found: list[_Ran] = []
    with jax.enable_x64(True):  # ops may have 64-bit types of their own
        for start in range(0, len(plain), _BATCH):
            found += _run(plain[start : start + _BATCH])
        rest = iter(found)
        return [next(rest) if job.reference is None else _refer(job) for job in jobs]


def _refer(job: _Job) -> _Ran:
    """Run a job by its reference."""
    assert job.reference is not None
    try:
        made = [job.reference(*arguments) for arguments in job.runs]
    except Exception as error:  # the user's own
        return f"its reference fails: {type(error).__name__}: {str(error).splitlines()[0]}"
    return [[np.asarray(r) for r in jax.tree.leaves(results)] for results in made]


def _run(jobs: Sequence[_Job]) -> list[_Ran]:
    """Run jobs as one program; where that fails, in halves, to find out which one it is."""
    try:
        module = mlir.module_of_ops([job.op for job in jobs])
        program = stablehlo.from_module(module, name="ops")
        call = flat_jit(program, program.source.module, None, None)
        found: list[list[list[Any]]] = [[] for _ in jobs]
        for run in range(max(len(job.runs) for job in jobs)):
            arguments = [a for job in jobs for a in job.runs[run % len(job.runs)]]
            results = iter([np.asarray(r) for r in call(*arguments)])
            for job, made in zip(jobs, found, strict=True):
                made.append([next(results) for _ in job.op[2]])
        return [made[: len(job.runs)] for job, made in zip(jobs, found, strict=True)]
    except (TargetError, PlanError) as error:
        reason = f"cannot be built in parts: {error}"
    except Exception as error:  # XLA's own: no kernel for this op here
        reason = f"does not run here: {str(error).splitlines()[0]}"
    if len(jobs) == 1:
        return [reason]
    target = re.search(r"No registered implementation for .*custom call to (\S+)", reason)
    without = [bool(target) and f'"{target[1]}"' in job.op[0] for job in jobs]  # type: ignore[index]
    if any(without):
        others = [job for job, lacks in zip(jobs, without, strict=True) if not lacks]
        rest = iter(_run(others) if others else [])
        return [reason if lacks else next(rest) for lacks in without]
    half = len(jobs) // 2
    return _run(jobs[:half]) + _run(jobs[half:])


@dataclasses.dataclass(eq=False)
class _Instance:
    """One op: to be run whole once, and in shards once per factor."""

    number: int
    signature: Signature
    rule: SignatureRule
    text: str
    seed: int
    reference: Callable[..., Any] | None = None

    def claims(self) -> Iterator[tuple[int, int]]:
        """Every factor that an axis may lie on, and the shards to split it into."""
        for index, factor in enumerate(self.rule.factors):
            shards = next((n for n in _SHARDS if factor.divisor % n == 0), 0)
            if factor.shardable and not factor.permutation and shards:
                yield index, shards

    def unclaimed(self, factor: int) -> str:
        """Why the claim for a factor cannot be tested by running the op on plain shards."""
        types = (*self.signature.operands, *self.signature.results)
        if any(np.prod(t.shape, dtype=np.float64) > _LARGEST for t in types):
            return "too large to run"
        if not self.signature.operands:
            return "makes its result from nothing"
        if self.signature.attribute("replica_groups") not in (None, (0,)):
            return "needs several replicas"
        combiner = self.rule.factors[factor].combiner
        if combiner and combiner not in _COMBINE:
            return f"no combiner {combiner}"
        if self._picks(factor) and self.signature.kind not in _INDICES:
            return "devices mask the indices that are not theirs"
        if self.signature.kind == "dynamic_update_slice":
            update = self.rule.operands[1]
            if not any(stack[0] == factor for stack in update):
                return "devices mask the part of the update that is not theirs"
        return ""

    @functools.cached_property
    def arguments(self) -> list[Any]:
        """Random operands of the whole op."""
        arguments = random_operands(self.signature.operands, self.seed)
        combiners = {factor.combiner for factor in self.rule.factors} & set(_COMBINE)
        if combiners and self.signature.kind in ("reduce", "scatter"):
            # What every shard starts from must count once: initial values, a scatter's target.
            count = len(self.signature.results)
            starts = range(count, 2 * count) if self.signature.kind == "reduce" else range(count)
            for place in starts:
                start = arguments[place]
                arguments[place] = np.full_like(start, _identity(min(combiners), start.dtype))
        return arguments

    def whole(self) -> tuple[str, tuple[TensorType, ...], tuple[TensorType, ...]]:
        """The op as it is, to run."""
        return self.text, self.signature.operands, self.signature.results

    def part(
        self, factor: int, shards: int
    ) -> tuple[str, tuple[TensorType, ...], tuple[TensorType, ...]]:
        """The op of the size of a shard."""

        def local(type_: TensorType, dims: tuple[tuple[int, ...], ...]) -> TensorType:
            shape = [
                size // shards if stack[0] == factor else size
                for size, stack in zip(type_.shape, dims, strict=True)
            ]
            return TensorType(tuple(shape), type_.dtype)

        operands = tuple(map(local, self.signature.operands, self.rule.operands))
        results = tuple(map(local, self.signature.results, self.rule.results))
        return self._resized(factor, shards), operands, results

    def split(self, factor: int, shards: int) -> list[list[Any]]:
        """The operands of each shard."""
        columns = []
        for argument, dims in zip(self.arguments, self.rule.operands, strict=True):
            split = [argument] * shards
            for d, stack in enumerate(dims):
                if stack[0] == factor:
                    split = np.split(argument, shards, axis=d)
            columns.append(split)
        parts = list(map(list, zip(*columns, strict=True)))
        if self._picks(factor):
            for shard, part in enumerate(parts):
                place = self._index_place
                part[place] = self._shifted(factor, shards, shard)
        return parts

    def compare(self, factor: int, shards: int, pieces: list[list[Any]], want: list[Any]) -> str:
        """Whether the pieces together are what the whole op made."""
        types = (*self.signature.operands, *self.signature.results)
        limit = tolerance_of(type_.dtype for type_ in types)
        for index, (dims, whole) in enumerate(zip(self.rule.results, want, strict=True)):
            made = [piece[index] for piece in pieces]
            if self._picks(factor) and self.rule.factors[factor].combiner:
                made = [
                    np.where(self._mine(factor, shards, shard, dims), piece, 0)
                    for shard, piece in enumerate(made)
                ]
            if not _close(self._together(made, dims, factor), whole, limit):
                return f"wrong: result {index} in {shards} shards differs from the whole"
        return "proven"

    def _together(self, pieces: list[Any], dims: tuple[tuple[int, ...], ...], factor: int) -> Any:
        for d, stack in enumerate(dims):
            if stack[0] == factor:
                return np.concatenate(pieces, axis=d)
        combiner = self.rule.factors[factor].combiner
        return functools.reduce(_COMBINE[combiner], pieces) if combiner else pieces[0]

    # -- indices: each device reads or writes only what it holds ------------------------------

    def _picks(self, factor: int) -> bool:
        return self.rule.factors[factor].label.startswith("picked")

    @property
    def _index_place(self) -> int:
        return len(self.signature.results) if self.signature.kind == "scatter" else 1

    def _picked_dim(self, factor: int) -> int:
        return next(d for d, stack in enumerate(self.rule.operands[0]) if stack[0] == factor)

    def _component(self, factor: int) -> tuple[Any, ...] | None:
        """Where in the index array the places along the picked dimension stand."""
        name = _INDICES[self.signature.kind]
        if not name:
            return (Ellipsis,)
        moved = self.signature.attribute(name)
        vector = self.signature.attribute("index_vector_dim")
        assert isinstance(vector, int)
        order = list(moved) if isinstance(moved, tuple) else []
        if self._picked_dim(factor) not in order:
            return None
        if vector == len(self.signature.operands[self._index_place].shape):
            return (Ellipsis,)
        return (slice(None),) * vector + (order.index(self._picked_dim(factor)),)

    def _shifted(self, factor: int, shards: int, shard: int) -> Any:
        """The indices as a shard counts them."""
        indices = np.array(self.arguments[self._index_place])
        where = self._component(factor)
        size = self.signature.operands[0].shape[self._picked_dim(factor)]
        if where is not None:
            if self.signature.kind != "scatter":  # which reads the nearest; a scatter drops it
                indices[where] = np.clip(indices[where], 0, size - 1)
            indices[where] -= shard * (size // shards)
        return indices

    def _mine(self, factor: int, shards: int, shard: int, dims: tuple[tuple[int, ...], ...]) -> Any:
        """Which elements of a result a shard has read from what it holds."""
        where = self._component(factor)
        if where is None:  # every index is 0
            return shard == 0
        places = self._shifted(factor, shards, shard)[where]
        size = self.signature.operands[0].shape[self._picked_dim(factor)]
        mine = (places >= 0) & (places < size // shards)
        factors = [stack[0] for stack in self.rule.operands[self._index_place]]
        if where != (Ellipsis,):
            del factors[where.index(next(w for w in where if isinstance(w, int)))]
        order = [factors.index(stack[0]) for stack in dims if stack[0] in factors]
        mine = mine.transpose(order)
        extents = iter(mine.shape)
        return mine.reshape([next(extents) if stack[0] in factors else 1 for stack in dims])

    def _resized(self, factor: int, shards: int) -> str:
        """The op's text with those attributes that count elements along the factor divided."""
        text = self.text
        shape = self.signature.operands[0].shape
        split = [d for d, stack in enumerate(self.rule.operands[0]) if stack[0] == factor]
        for name in ("limit_indices", "slice_sizes"):
            found = re.search(rf"{name} = array<i64: ([\d, ]+)>", text)
            if found:
                numbers = [int(n) for n in found[1].split(",")]
                for d in split:
                    if numbers[d] == shape[d]:
                        numbers[d] //= shards
                text = text.replace(
                    found[0], f"{name} = array<i64: {', '.join(map(str, numbers))}>"
                )
        if self.signature.kind == "broadcast":
            made = [
                size // shards if stack[0] == factor else size
                for size, stack in zip(
                    self.signature.results[0].shape, self.rule.results[0], strict=True
                )
            ]
            new = ", ".join(map(str, made[: len(made) - len(shape)]))
            text = re.sub(r"broadcast_sizes = array<i64: [\d, ]+>",
                          f"broadcast_sizes = array<i64: {new}>", text)  # fmt: skip
        if self.rule.factors[factor].label == "group":
            text = re.sub(
                r"(feature_group_count|batch_group_count) = (\d+)",
                lambda m: f"{m[1]} = {int(m[2]) // shards if int(m[2]) > 1 else 1}",
                text,
            )
        return text


def _close(got: Any, want: Any, limit: float) -> bool:
    if got.shape != want.shape:
        return False
    if want.dtype.kind in "biu":
        return bool((got == want).all())
    a, e = got.astype(np.complex128), want.astype(np.complex128)
    finite = np.isfinite(e)
    if (
        not np.array_equal(a[~finite], e[~finite], equal_nan=True)
        or not np.isfinite(a[finite]).all()
    ):
        return False
    scale = float(np.abs(e[finite]).max(initial=0.0)) or 1.0
    return float(np.abs(a[finite] - e[finite]).max(initial=0.0)) <= 10 * max(limit, 1e-6) * scale
