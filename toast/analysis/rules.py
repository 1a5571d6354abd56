"""Solving the op rules: the factors of every distinct op signature.

An op rule sees its own op's facts only, so each signature is grounded once, whatever the number
of ops, and instantiated with array joins (DESIGN: the program of a transformer has thousands of
ops and a few hundred signatures).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from toast.errors import RuleError
from toast.facts import Relations
from toast.frontend import Program, Signature
from toast.logic import Term, check_rules, derivations, kind_line, rule_line, show_term, solve
from toast.resources import directory

_SHOW = (
    "factor/5", "factor_size/3", "reduction/3", "need_replication/2", "permutation/2",
    "halo/3", "without_rule/1",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Factor:
    """One factor of an op signature, in Shardy's words."""

    label: str
    #: Elements along the factor.
    size: int
    #: The largest number of shards is a divisor of this: the factor's size, or for a permutation
    #: the greatest common divisor of the sizes of its dimensions.
    divisor: int
    #: Combiner of the partial results, ``""`` if the op does not reduce over it.
    combiner: str
    need_replication: bool
    permutation: bool
    #: Of a permutation: elements that a shard needs of its neighbours; infinite for all of another.
    halo: float
    #: It is not the major-most factor of some dimension, so that sharding it would leave devices
    #: with strided pieces.
    minor: bool

    @property
    def shardable(self) -> bool:
        """Whether a mesh axis can lie on it at all."""
        return self.size > 1 and not self.need_replication and not self.minor


@dataclasses.dataclass(frozen=True)
class SignatureRule:
    """The solved sharding rule of one signature."""

    factors: tuple[Factor, ...]
    #: For each operand, then each result, and each dimension: its factors, major to minor.
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    #: Whether no rule knew the op's kind.
    missing: bool
    #: The user's rule file that it is from; None where the shipped ones hold.
    file: pathlib.Path | None = None

    def einsum(self) -> str:
        """The rule on one line, as Shardy writes it: ``([i,k],[k,j]) -> ([i,j]) reduction={k}``."""

        def side(tensors: tuple[tuple[tuple[int, ...], ...], ...]) -> str:
            return ",".join(
                "[" + ",".join("".join(self.factors[f].label for f in d) for d in dims) + "]"
                for dims in tensors
            )

        text = f"({side(self.operands)}) -> ({side(self.results)})"
        for word, chosen in (
            ("reduction", [f.label for f in self.factors if f.combiner]),
            ("need_replication", [f.label for f in self.factors if f.need_replication]),
            ("permutation", [f.label for f in self.factors if f.permutation]),
        ):
            text += f" {word}={{{','.join(chosen)}}}" if chosen else ""
        return text


def factor_files() -> list[pathlib.Path]:
    """The shipped files that derive factors: the schema, what rules share, then the op rules."""
    rules = directory("rules")
    ops = sorted((rules / "ops").glob("*.lp"))
    return [directory("facts") / "schema.lp", rules / "factors.lp", *ops]


def user_files(paths: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    """The ``.lp`` files among ``paths`` (files or folders), each checked to be safe data."""
    files: list[pathlib.Path] = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise RuleError(f"{path}: no such rule file or folder; check the path")
        files += sorted(path.glob("*.lp")) if path.is_dir() else [path]
    for file in files:
        check_rules(file)
    return files


def solve_rules(
    program: Program, rules: Sequence[str | pathlib.Path] = ()
) -> tuple[SignatureRule, ...]:
    """The rule of each of ``program.signatures``.

    ``rules`` lists further rule files or folders; a later file's rule for a kind takes the place of
    all earlier ones.  Raises :class:`toast.errors.RuleError` when a rule contradicts itself: a
    factor with dimensions of different size, or a dimension without.
    """
    atoms, files = _solve_by_file(program, user_files(rules))
    places: dict[Term, list[tuple[Term, ...]]] = defaultdict(list)
    for op, factor, tensor, d, position in atoms["factor/5"]:
        places[op].append((factor, tensor, d, position))
    sizes: dict[Term, dict[Term, set[Term]]] = defaultdict(lambda: defaultdict(set))
    for op, factor, size in atoms["factor_size/3"]:
        sizes[op][factor].add(size)
    combiners = {(op, factor): str(combiner) for op, factor, combiner in atoms["reduction/3"]}
    replicated = set(atoms["need_replication/2"])
    halos = {(op, factor): float(str(count)) for op, factor, count in atoms["halo/3"]}
    permuted = {
        (op, factor): halos.get((op, factor), math.inf) for op, factor in atoms["permutation/2"]
    }
    missing = {op for (op,) in atoms["without_rule/1"]}
    solved = []
    for number, signature in enumerate(program.signatures):
        try:
            solved.append(
                _signature_rule(
                    signature, number, places[number], sizes[number], combiners, replicated,
                    permuted, number in missing, files.get(number),
                )
            )  # fmt: skip
        except RuleError as error:
            raise RuleError(f"{_place(signature, files.get(number))}: {error}") from None
    return tuple(solved)


def _key(signature: Signature) -> tuple[str, bool]:
    """What a rule for a signature is found by: its kind, or the target of a custom call (True)."""
    if signature.kind != "custom_call":
        return signature.kind, False
    return str(signature.attribute("call_target_name")), True


def _place(signature: Signature, file: pathlib.Path | None) -> str:
    """``file:line`` of the rule of a signature."""
    key = _key(signature)
    if file is None:
        file = next((f for f in factor_files()[2:] if key in known_rules(f)), factor_files()[1])
    return f"{file}:{kind_line(file, key[0])}"


def _solve_by_file(
    program: Program, files: Sequence[pathlib.Path]
) -> tuple[dict[str, list[tuple[Term, ...]]], dict[int, pathlib.Path]]:
    """The atoms of every signature, each from the file whose rule holds for its kind.

    And the user's file of each signature that one holds for.
    """
    shipped = factor_files()
    owner = {key: file for file in files for key in known_rules(file)}
    numbers: dict[pathlib.Path | None, list[int]] = defaultdict(list)
    for number, signature in enumerate(program.signatures):
        numbers[owner.get(_key(signature))].append(number)
    atoms: dict[str, list[tuple[Term, ...]]] = {shown: [] for shown in _SHOW}
    relations = Relations(program)
    for file, chosen in numbers.items():
        used = shipped if file is None else [*shipped[:2], file]
        facts = relations.signatures_to_lp(chosen)
        for shown, found in solve(used, facts, _SHOW, doubted=file).items():
            atoms[shown] += found
    users = {n: file for file, chosen in numbers.items() if file is not None for n in chosen}
    return atoms, users


def _whole(file: pathlib.Path) -> set[str]:
    found = solve([directory("facts") / "schema.lp", file], "", ("stays_whole/1",))
    return {show_term(kind) for (kind,) in found["stays_whole/1"]}


def known_rules(file: pathlib.Path) -> set[tuple[str, bool]]:
    """The kinds, and the targets of custom calls (True), that a rule file has a rule for."""
    shown = ("rule/1", "elementwise/1", "stays_whole/1", "custom_call_rule/1")
    shipped = file.is_relative_to(directory("rules"))
    files = [directory("facts") / "schema.lp", file]
    *kinds, targets = solve(files, "", shown, doubted=None if shipped else file).values()
    return {(show_term(kind), False) for found in kinds for (kind,) in found} | {
        (show_term(target), True) for (target,) in targets
    }


def _signature_rule(
    signature: Signature,
    number: int,
    places: list[tuple[Term, ...]],
    sizes: dict[Term, set[Term]],
    combiners: dict[tuple[Term, Term], str],
    replicated: set[tuple[Term, ...]],
    permuted: dict[tuple[Term, Term], float],
    missing: bool,
    file: pathlib.Path | None,
) -> SignatureRule:
    slots: dict[tuple[str, int, int], dict[int, Term]] = defaultdict(dict)
    for factor, tensor, d, position in places:
        where = (str(tensor[0]), int(tensor[1]), int(d))  # type: ignore[index, arg-type]
        if position in slots[where]:
            raise RuleError(
                f"rule of {signature.kind}: {tensor[0]}({tensor[1]}) dimension {d} has two "  # type: ignore[index]
                f"factors at position {position}: {show_term(slots[where][position])} and "
                f"{show_term(factor)}; give each dimension one factor, or several positions"
            )
        slots[where][position] = factor  # type: ignore[index]
    order: dict[Term, int] = {}
    sides: dict[str, list[tuple[tuple[int, ...], ...]]] = {"result": [], "operand": []}
    divisors: dict[Term, int] = {}
    blocked: set[Term] = set()
    for side, types in (("result", signature.results), ("operand", signature.operands)):
        for index, type_ in enumerate(types):
            dims: list[tuple[int, ...]] = []
            for d, size in enumerate(type_.shape):
                stack = slots.get((side, index, d), {})
                if not stack:
                    raise RuleError(
                        f"rule of {signature.kind}: {side}({index}) dimension {d} of {type_} has "
                        "no factor; map it, or mark a factor of its own need_replication"
                    )
                listed = [stack[p] for p in sorted(stack)]
                # Only the major-most factor of a dimension can be sharded in place: a minor one
                # would leave every device with strided pieces.
                blocked.update(listed[1:])
                major = listed[0]
                extent = size if len(listed) == 1 else min(map(int, sizes[major]))  # type: ignore[arg-type]
                divisors[major] = math.gcd(divisors.get(major, extent), extent)
                dims.append(tuple(order.setdefault(f, len(order)) for f in listed))
            sides[side].append(tuple(dims))
    factors = []
    for factor in order:
        found = sizes.get(factor, set())
        size = max((int(s) for s in found), default=1)  # type: ignore[arg-type]
        permutation = (number, factor) in permuted
        whole = (number, factor) in replicated
        if not (permutation or whole or factor in blocked) and divisors.get(factor, size) != size:
            raise RuleError(
                f"rule of {signature.kind}: factor {show_term(factor)} maps dimensions of "
                f"different size ({size} and others); split it, or mark it permutation"
            )
        factors.append(
            Factor(
                label=show_term(factor),
                size=size,
                divisor=divisors.get(factor, size),
                combiner=combiners.get((number, factor), ""),
                need_replication=whole,
                permutation=permutation,
                halo=permuted.get((number, factor), 0.0),
                minor=factor in blocked,
            )
        )
    operands, results = tuple(sides["operand"]), tuple(sides["result"])
    return SignatureRule(tuple(factors), operands, results, missing, file)


@dataclasses.dataclass(frozen=True)
class RuleLine:
    """Where a rule stands: a shipped file as ``rules/ops/dot.lp``, a user's as it was given."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def _rule_line(file: pathlib.Path, line: int) -> RuleLine:
    top = directory("rules").parent
    return RuleLine(str(file.relative_to(top) if file.is_relative_to(top) else file), line)


@functools.cache
def stratum_line(stratum: str, predicate: str, using: str = "") -> RuleLine:
    """The first rule for ``predicate`` (``name/arity``) in a stratum, ``using`` in its body."""
    file = directory("rules") / f"{stratum}.lp"
    name, arity = predicate.split("/")
    return _rule_line(file, rule_line(file, (name, int(arity)), using))


@dataclasses.dataclass(frozen=True)
class RuleLines:
    """The rules behind the factors of some signatures."""

    #: By signature, tensor (``operand(0)``), dimension and the label of its factor.
    factor: Mapping[tuple[int, str, int, str], tuple[RuleLine, ...]]
    #: By signature and label of a factor that is needed whole.
    need_replication: Mapping[tuple[int, str], tuple[RuleLine, ...]]
    #: The file of each signature: a user's, or None.
    file: Mapping[int, pathlib.Path | None]

    def of(self, signature: int, tensor: str, d: int, factor: str) -> tuple[RuleLine, ...]:
        """The rules that make dimension ``d`` of a tensor this factor.

        Raises :class:`toast.errors.RuleError` where there are none any more.
        """
        found = self.factor.get((signature, tensor, d, factor))
        if found is None:
            file = self.file[signature] or directory("rules")
            raise RuleError(
                f"{file}: factor {factor} of {tensor} dimension {d} follows from no rule: it has "
                "changed since the analysis; analyze again"
            )
        return found


def rule_lines(
    program: Program, rules: Sequence[SignatureRule], signatures: Iterable[int]
) -> RuleLines:
    """Grounds the rules of ``signatures`` (numbers) once more, to see which derive what.

    Raises :class:`toast.errors.RuleError` where a rule file of the user's is gone, or broken.
    """
    by_file: dict[pathlib.Path | None, list[int]] = defaultdict(list)
    for number in sorted(set(signatures)):
        by_file[rules[number].file].append(number)
    shipped, relations = factor_files(), Relations(program)
    factor: dict[tuple[int, str, int, str], tuple[RuleLine, ...]] = {}
    whole: dict[tuple[int, str], tuple[RuleLine, ...]] = {}
    for file, numbers in by_file.items():
        used = shipped if file is None else [*shipped[:2], file]
        facts = relations.signatures_to_lp(numbers)
        found = derivations(used, facts, ("factor/4", "factor/5", "need_replication/2"))
        # factor/5 also follows from factor/4, whose rule says more.
        for shown in ("factor/5", "factor/4"):
            for (op, label, tensor, d, *_), lines in found[shown].items():
                key = (_number(op), show_term(tensor), _number(d), show_term(label))
                factor[key] = tuple(_rule_line(*line) for line in lines)
        for (op, label), lines in found["need_replication/2"].items():
            whole[_number(op), show_term(label)] = tuple(_rule_line(*line) for line in lines)
    owner = {number: file for file, numbers in by_file.items() for number in numbers}
    return RuleLines(factor, whole, owner)


def _number(term: Term) -> int:
    assert isinstance(term, int)
    return term


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """An op kind (or the target of a custom call) that a file has a rule for."""

    kind: str
    file: pathlib.Path
    custom_call: bool
    #: Whether the rule lets anything be sharded; not so of kinds that stay whole.
    shards: bool

    @property
    def shipped(self) -> bool:
        """Whether the rule is one of TOAST's own."""
        return self.file.is_relative_to(directory("rules"))


def rule_entries(rules: Sequence[str | pathlib.Path] = ()) -> tuple[RuleEntry, ...]:
    """Every kind that the shipped rules and ``rules`` know, sorted, with the file that holds.

    Raises :class:`toast.errors.RuleError` when two files of ``rules`` have a rule for one kind.
    """
    _, _, *shipped = factor_files()
    found = {key: file for file in shipped for key in known_rules(file)}
    users: dict[tuple[str, bool], pathlib.Path] = {}
    for file in user_files(rules):
        for key in sorted(known_rules(file)):
            if key in users:
                raise RuleError(
                    f"{file}:{kind_line(file, key[0])}: a second rule for {key[0]}, which "
                    f"{users[key]} has; keep one of them"
                )
            users[key] = file
    entries = {**found, **users}
    whole = {(kind, file) for file in {*entries.values()} for kind in _whole(file)}
    return tuple(
        RuleEntry(kind, file, custom, (kind, file) not in whole)
        for (kind, custom), file in sorted(entries.items())
    )


@functools.cache
def strata(*names: str) -> list[pathlib.Path]:
    """The schema and the named strata of ``rules/``, for the analysis of names."""
    return [directory("facts") / "schema.lp", *(directory("rules") / f"{n}.lp" for n in names)]
