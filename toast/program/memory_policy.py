"""Memory policies: which residuals of a differentiated program are kept, recomputed or offloaded.

A residual is a value of the forward pass that the backward pass needs.  A block is a part of the
program whose residuals a policy decides about: a layer, the body of a scan.
"""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from toast.errors import TargetError
from toast.program.run_ranges import RunRange
from toast.units import listed

#: What happens to a residual between the passes.
Choice = Literal["keep", "recompute", "offload"]
CHOICES: tuple[Choice, ...] = ("keep", "recompute", "offload")

#: What a policy does with values, as what was done.
DONE: dict[str, str] = {
    "keep": "kept", "recompute": "recomputed", "offload": "offloaded", "gathered": "gathered",
}  # fmt: skip

#: The words of the text of a policy.
_WORDS = (*CHOICES, "gathered")

#: The decision for a block in the text of a policy; a range of runs has a colon of its own.
_ENTRY = re.compile(r"((?:\[\d*:\d*\]|[^:])*):(.*)", re.DOTALL)

#: How a residual is computed: by a product of matrices, by one with batch dimensions (scores of
#: attention), by a kernel or a custom gradient, by other ops; or it is an argument of the block.
ResidualKind = Literal["product", "batched_product", "kernel", "other", "input"]


#: How the names of residuals begin in the program of a survey.
_SURVEYED = "toast:"

#: How such a name ends if a gradient uses the result before it has the name.
_RESULT = " (result)"


def residual_label(block: str, residual: str) -> str:
    """The name of a residual of a block in the program of a survey."""
    return f"{_SURVEYED}{block}/{residual}"


def is_residual_label(name: str) -> bool:
    """Whether a name of a value is that of a residual in the program of a survey."""
    return name.startswith(_SURVEYED)


def label_of_result(label: str) -> str:
    """The label of a residual from whose operation JAX computes a gradient, too.

    This gradient uses the result before it has its name.  The operation runs again even if a policy
    keeps what has the name.
    """
    return f"{label}{_RESULT}"


def label_parts(label: str) -> tuple[str, bool]:
    """A label of a residual, and whether it is one of :func:`label_of_result`."""
    return label.removesuffix(_RESULT), label.endswith(_RESULT)


#: Stands for the values of a block that have no name.
UNNAMED = "@unnamed"


#: The alias of the argument of a block that one layer passes to the next.
LAYER_INPUT = "layer_input"

#: What a remark on a ``jax.checkpoint`` of the program says.
OWN_CHECKPOINT = "has a jax.checkpoint of its own"

#: The origins of blocks that the program marks: without a policy of its own, and with one.
MARKED, MARKED_WITH_POLICY = "toast.checkpoint", "toast.checkpoint(policy=)"


@dataclasses.dataclass(frozen=True)
class Residual:
    """A residual of a block: one value, or several with one name."""

    #: The name, which policies match.
    name: str
    #: The kind of op that computes it, or ``input``; policies match it with ``@``.
    kind: ResidualKind
    #: The types of its values: ``bf16[16,8192,4096]``.
    types: tuple[str, ...]
    #: The bytes of all of them, for one run of the block on one device without sharding.
    size_bytes: int
    #: Where it is computed: ``model.py:12 (attention)``; empty if unknown.
    source: str = ""
    #: Whether the name is one of ``jax.ad_checkpoint.checkpoint_name`` in the program.
    own: bool = False
    #: Another name that policies may use: :data:`LAYER_INPUT`; empty for none.  In a block where a
    #: residual has this very name, the name is that one's alone.
    alias: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a program whose residuals a policy decides about."""

    #: The name, which policies match; with a range of runs if these decide otherwise than others.
    name: str
    #: Its residuals, in program order.
    residuals: tuple[Residual, ...]
    #: How often it runs in a step: the length of its scan, or the number of its calls.
    runs: int = 1
    #: ``toast.checkpoint``, ``toast.checkpoint(policy=)``, ``scan`` or ``repeated``.
    origin: str = MARKED
    #: How often loops of microbatches repeat its runs; ranges count those of one microbatch.
    repeats: int = dataclasses.field(default=1, compare=False)
    #: Where the program's own ``jax.checkpoint`` in it are: ``layer at model.py:12``.  They
    #: recompute whatever the policy is.
    recomputes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        if any(residual.alias in self.names for residual in self.residuals):
            own = (
                dataclasses.replace(r, alias="") if r.alias in self.names else r
                for r in self.residuals
            )
            object.__setattr__(self, "residuals", tuple(own))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its residuals, in program order."""
        return tuple(residual.name for residual in self.residuals)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.names)})"


@dataclasses.dataclass(frozen=True)
class BlockPolicy:
    """The decision for the residuals of the blocks with a name.

    Each of ``keep``, ``offload`` and ``recompute`` has names of residuals, with ``*`` for any text,
    or kinds of residuals (``@product``).  A name decides before a name with ``*``, and that before
    ``*`` alone.  Residuals that nothing names are recomputed.

    JAX may also keep values without names that are computed from those with names, such as the
    cosine in the gradient of a sine.  It does so only if everything is kept, and ``recompute`` does
    not have ``@unnamed``.

    Arguments of the block exist anyway.  Where they are gathered or moved for the forward pass, the
    backward pass does so again, unless ``gathered`` names them: then it uses the same copies, which
    stay in memory.  This is so for all of them if everything is kept.
    """

    #: The name of the block, with ``*`` for any text; with a range of its runs (``layer[:12]``) if
    #: the others decide otherwise.
    block: str
    #: Residuals that stay in memory.
    keep: tuple[str, ...] = ()
    #: Residuals that are in the memory of the host until the backward pass.
    offload: tuple[str, ...] = ()
    #: Residuals that the backward pass computes again.
    recompute: tuple[str, ...] = ()
    #: Arguments of which the backward pass uses the gathered copies of the forward pass.
    gathered: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A pattern may stand for arguments in ``gathered``, and for other residuals elsewhere.
        copies = [name for name in self.gathered if "*" not in name and name[:1] != "@"]
        count = collections.Counter((*self.keep, *self.offload, *self.recompute, *copies))
        for name, times in count.items():
            if times > 1:
                raise TargetError(
                    f"remat {self.block}: {name} occurs twice; keep, offload or recompute it"
                )

    def choice(self, residual: Residual) -> Choice:
        """What happens to a residual."""
        named = [(pattern, choice) for choice in CHOICES for pattern in self._patterns(choice)]
        fitting = [pair for pair in named if _fits(pair[0], residual)]
        if not fitting:
            return "recompute"
        return min(fitting, key=lambda pair: _looseness(pair[0]))[1]

    def _patterns(self, choice: str) -> tuple[str, ...]:
        return cast(tuple[str, ...], getattr(self, choice))

    def stays_gathered(self, residual: Residual) -> bool:
        """Whether the backward pass uses the forward pass's copies of an argument of the block."""
        return residual.kind == "input" and any(_fits(p, residual) for p in self.gathered)

    @property
    def keeps_all(self) -> bool:
        """Whether it recomputes and offloads nothing, as if there were no block."""
        return not self.recompute and not self.offload

    @property
    def patterns(self) -> tuple[str, ...]:
        """All names and patterns in it."""
        return (*self.keep, *self.recompute, *self.offload, *self.gathered)

    def resolved(self, block: Block) -> BlockPolicy:
        """The decision for each residual of a block by its name.

        Arguments of a block exist anyway, so that they are kept or offloaded.
        """
        names: dict[Choice, list[str]] = {choice: [] for choice in CHOICES}
        names["recompute"] += [UNNAMED] * (UNNAMED in self.recompute)
        gathered: list[str] = []
        for residual in block.residuals:
            choice = self.choice(residual)
            if residual.kind == "input" and choice == "recompute":
                choice = "keep"
            if choice == "keep" and self.stays_gathered(residual):
                gathered.append(residual.name)
                continue
            names[choice].append(residual.name)
        return BlockPolicy(
            block.name,
            **{choice: tuple(n) for choice, n in names.items()},
            gathered=tuple(gathered),
        )

    def __str__(self) -> str:
        parts = [f"{c}={','.join(self._patterns(c))}" for c in _WORDS if self._patterns(c)]
        return f"{self.block}: {' '.join(parts) or 'recompute=*'}"


@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """What happens to the residuals of each block of a program.

    >>> policy = MemoryPolicy.parse("layer: keep=query,key offload=gate; *: keep=*")
    >>> policy.of("layer").keep, policy.of("head").keep
    (('query', 'key'), ('*',))
    >>> print(policy)
    layer: keep=query,key offload=gate; *: keep=*

    Runs of a block may decide differently:

    >>> policy = MemoryPolicy.parse("layer[:12]: recompute=*; layer[12:]: keep=*")
    >>> policy.cuts("layer"), policy.of("layer[:12]").recompute
    ((12,), ('*',))
    """

    #: The decisions for blocks, by their names.
    blocks: tuple[BlockPolicy, ...]
    #: The name of the preset that it is; empty for another policy.
    preset: str = dataclasses.field(default="", compare=False)
    #: Whether all residuals have names in the program (:func:`residual_label`), not only those that
    #: are kept or offloaded: a survey shows what each costs.
    surveys: bool = dataclasses.field(default=False, compare=False)

    def of(self, block: str) -> BlockPolicy:
        """The decision for a block: that for its name or, without one, for a pattern that fits.

        A decision for a range of its runs comes before that for all.  A block that nothing names
        keeps everything.
        """
        runs = RunRange.parse(block)
        fitting = [
            (mine.block != runs.block, not mine.is_part, number)
            for number, mine in enumerate(self._ranges)
            if mine.includes(runs) and fnmatch.fnmatchcase(runs.block, _literal(mine.block))
        ]
        return self.blocks[min(fitting)[-1]] if fitting else BlockPolicy(block, keep=("*",))

    def cuts(self, block: str) -> tuple[int, ...]:
        """The numbers of the runs of a block, at which other decisions begin than before."""
        if RunRange.parse(block).is_part:
            return ()
        mine = [r for r in self._ranges if fnmatch.fnmatchcase(block, _literal(r.block))]
        if any(r.block == block for r in mine):
            mine = [r for r in mine if r.block == block]
        ends = {edge for r in mine if r.is_part for edge in (r.first, r.end)}
        return tuple(sorted(int(edge) for edge in ends if 0 < edge < math.inf))

    @functools.cached_property
    def _ranges(self) -> list[RunRange]:
        return [RunRange.parse(entry.block) for entry in self.blocks]

    @property
    def offloads(self) -> bool:
        """Whether it offloads something."""
        return any(entry.offload for entry in self.blocks)

    @staticmethod
    def parse(text: str) -> MemoryPolicy:
        """The policy of a text: the name of a preset, or ``BLOCK: keep=NAMES offload=NAMES; ...``.

        Raises :class:`toast.errors.TargetError` for another text.
        """
        if text.strip() in PRESETS:
            return preset(text.strip())
        if text.strip() == "auto":
            raise TargetError(
                "remat auto: is for toast.plan, which chooses one; use a preset "
                f"({', '.join(PRESETS)}) or a policy"
            )
        entries = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            match = _ENTRY.fullmatch(part)
            if match is None or not match[1].strip():
                raise TargetError(
                    f"remat {text!r}: neither a policy nor a preset; use auto, "
                    f"{', '.join(PRESETS)}, or write 'BLOCK: keep=NAME,NAME offload=NAME'"
                )
            block, rest = match.groups()
            RunRange.parse(block.strip())
            names: dict[str, tuple[str, ...]] = {}
            for word in rest.split():
                choice, equals, values = word.partition("=")
                if choice not in _WORDS or not equals or choice in names:
                    raise TargetError(
                        f"remat {text!r}: {word!r} is not a choice; write keep=NAME,NAME, "
                        "offload=NAME, recompute=NAME or gathered=NAME, each once per block"
                    )
                names[choice] = tuple(filter(None, values.split(",")))
            entries.append(BlockPolicy(block.strip(), **names))
        if not entries:
            raise TargetError(
                f"remat {text!r}: names no block; use auto, {', '.join(PRESETS)}, or write "
                "'BLOCK: keep=NAME,NAME offload=NAME'"
            )
        return MemoryPolicy(tuple(entries))

    def __str__(self) -> str:
        return "; ".join(map(str, self.blocks))

    @property
    def label(self) -> str:
        """The name of the preset, or the text of the policy."""
        return self.preset or str(self)

    def resolved(
        self, blocks: Iterable[Block], own_names: Mapping[str, str] | None = None
    ) -> MemoryPolicy:
        """The decision for each residual of the blocks of a program by its name.

        ``own_names`` are as in :class:`TracedMemory`.  Raises
        :class:`toast.errors.TargetError` if an entry matches no block, or a name none of the
        residuals of its blocks.
        """
        blocks, own_names = list(blocks), own_names or {}
        for entry in self.blocks:
            mine = [b for b in blocks if self.of(b.name) is entry]
            if not mine and entry.block != "*":
                known = listed([block.name for block in blocks])
                missing = f"no block is named {entry.block}"
                if (runs := RunRange.parse(entry.block)).is_part and any(
                    RunRange.parse(block.name).block == runs.block for block in blocks
                ):
                    missing = f"{runs.block} has no such runs"
                raise TargetError(f"remat {entry}: {missing}; use {known}")
            residuals = [residual for block in mine for residual in block.residuals]
            patterns = [pattern for pattern in entry.patterns if pattern != UNNAMED]
            unused = [p for p in patterns if not any(_fits(p, r) for r in residuals)]
            if self.preset or not mine:
                if mine and patterns and len(unused) == len(patterns):
                    raise TargetError(
                        f"remat {self.preset}: no residual of {_known(mine)} has one of the names "
                        f"of this preset; use another one, or 'BLOCK: keep=NAME,NAME'"
                    )
            elif unused:
                raise TargetError(
                    f"remat {entry}: {_unknown(unused[0], own_names)}; those of {_known(mine)}"
                )
        decisions = tuple(self.of(block.name).resolved(block) for block in blocks)
        return MemoryPolicy(decisions, self.preset, self.surveys)

    def changed(
        self,
        blocks: Sequence[Block],
        choice: Choice | Literal["gathered"],
        patterns: Sequence[str],
        own_names: Mapping[str, str] | None = None,
    ) -> tuple[MemoryPolicy, tuple[str, ...]]:
        """The policy by names with another choice for some residuals, and the choices before.

        :param blocks: the blocks of the program.
        :param choice: what happens to the residuals; ``gathered`` for arguments of blocks, of which
            the backward pass then uses the copies of the forward pass.  If they are kept, it
            gathers them again.
        :param patterns: their names, names with ``*``, or kinds (``@product``), as in policies.
        :param own_names: as in :class:`TracedMemory`.
        :raises toast.errors.TargetError: if no residual has one of the names, if an argument of a
            block would be recomputed, if what is no argument would be gathered, or if nothing
            changes.
        """
        asked = f"{choice}={','.join(patterns)}"
        known = [residual for block in blocks for residual in block.residuals]
        for pattern in patterns:
            fitting = [r for r in known if _fits(pattern, r)]
            if choice == "gathered" and not any(r.kind == "input" for r in fitting):
                raise TargetError(
                    f"{asked}: no argument of a block is named {pattern}; those of "
                    f"{_known([_of_inputs(block) for block in blocks])}"
                )
            if not fitting and (pattern, choice) != (UNNAMED, "recompute"):
                raise TargetError(
                    f"{asked}: {_unknown(pattern, own_names or {})}; those of {_known(blocks)}"
                )
            if choice == "recompute" and fitting and all(r.kind == "input" for r in fitting):
                raise TargetError(
                    f"{asked}: {pattern} is an argument of its block, which exists anyway; "
                    "keep or offload it"
                )
        entries: list[BlockPolicy] = []
        before: dict[str, None] = {}
        for block in blocks:
            old = self.of(block.name).resolved(block)
            names: dict[str, list[str]] = {word: [*old._patterns(word)] for word in _WORDS}
            for residual in block.residuals:
                wanted = any(_fits(pattern, residual) for pattern in patterns)
                was = "gathered" if residual.name in old.gathered else old.choice(residual)
                is_input = residual.kind == "input"
                if choice == "gathered" and old.keeps_all:
                    continue  # the backward pass uses the copies anyway
                if (choice == "recompute" and is_input) or (choice == "gathered" and not is_input):
                    continue
                if wanted and was != choice:
                    before[was] = None
                    names[was].remove(residual.name)
                    names[choice].append(residual.name)
            if UNNAMED in patterns and UNNAMED not in names["recompute"]:
                before["keep"] = None
                names["recompute"] = [UNNAMED, *names["recompute"]]
            entries.append(BlockPolicy(block.name, **{w: tuple(n) for w, n in names.items()}))
        if not before:
            raise TargetError(f"{asked}: the plan has {', '.join(patterns)} {DONE[choice]} already")
        return MemoryPolicy(tuple(entries)), tuple(before)

    def to_dict(self) -> dict[str, dict[str, list[str]]]:
        """The policy as plain data: names of residuals, by block and choice."""
        return {
            entry.block: {
                word: list(entry._patterns(word))
                for word in _WORDS
                if word in CHOICES or entry._patterns(word)
            }
            for entry in self.blocks
        }

    @staticmethod
    def from_dict(data: Mapping[str, Mapping[str, Sequence[str]]], name: str = "") -> MemoryPolicy:
        """The policy of :meth:`to_dict`; ``name`` is that of its preset."""
        entries = [
            BlockPolicy(block, **{choice: tuple(names) for choice, names in choices.items()})
            for block, choices in data.items()
        ]
        return MemoryPolicy(tuple(entries), name)


@dataclasses.dataclass(frozen=True)
class TracedMemory:
    """How a program was traced: under which policy, in how many microbatches."""

    #: The policy by names of residuals; ``None`` if the program's own recomputation stays.
    policy: MemoryPolicy | None = None
    #: The number of microbatches; 1 if the batch is not cut.
    microbatches: int = 1
    #: The blocks of the program, in program order.
    blocks: tuple[Block, ...] = ()
    #: Recomputation in the program that the policy leaves alone, as text.
    own: tuple[str, ...] = ()
    #: Whether gradients are accumulated, so that the batch may be cut.
    accumulates: bool = dataclasses.field(default=False, compare=False)
    #: Names of values in a ``jax.checkpoint`` of the program, and where this is.
    own_names: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False)


def _of_inputs(block: Block) -> Block:
    """A block with its arguments alone."""
    inputs = tuple(residual for residual in block.residuals if residual.kind == "input")
    return dataclasses.replace(block, residuals=inputs)


def _unknown(pattern: str, own_names: Mapping[str, str]) -> str:
    """Why a pattern fits no residual; ``own_names`` are as in :class:`TracedMemory`."""
    place = next((p for n, p in own_names.items() if fnmatch.fnmatchcase(n, _literal(pattern))), "")
    if not place:
        return f"no residual is named {pattern}"
    return (
        f"{pattern} is a name in {place}, a jax.checkpoint of the program's own, whose policy is "
        "kept; use toast.checkpoint in its place, or other names"
    )


def _known(blocks: Sequence[Block]) -> str:
    return listed([str(block) for block in blocks])


def _literal(pattern: str) -> str:
    """A pattern for ``fnmatch`` in which only ``*`` is special."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def _fits(pattern: str, residual: Residual) -> bool:
    if pattern.startswith("@"):
        return residual.kind == pattern[1:]
    return pattern == residual.alias or fnmatch.fnmatchcase(residual.name, _literal(pattern))


def _looseness(pattern: str) -> int:
    return 3 if pattern == "*" else 2 if pattern.startswith("@") else "*" in pattern


#: The names that the projections of a layer have in MaxText, and in the models of TOAST.
_QKV = ("query_proj", "key_proj", "value_proj", "qkv_proj", "query", "key", "value")
_OUT = ("out_proj", "attention_output")
_CONTEXT = ("context", "attention")
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1", "gate", "up", "expert_gate", "expert_up")
_MLP_OUT = ("mlpwo", "mlp_output")
_ALL = ("*",)
_PRODUCTS = (*_QKV, *_OUT, *_MLP_IN, *_MLP_OUT, "@product")


def _everywhere(keep: tuple[str, ...] = (), offload: tuple[str, ...] = ()) -> BlockPolicy:
    return BlockPolicy("*", keep=keep, offload=offload)


#: The decisions of presets.  ``none`` recomputes nothing, ``full`` everything, and ``named`` only
#: values that JAX computes for gradients; the others are the policies of MaxText.
PRESETS: Mapping[str, BlockPolicy] = {
    "none": _everywhere(_ALL),
    "named": BlockPolicy("*", keep=_ALL, recompute=(UNNAMED,)),
    "full": _everywhere(),
    "minimal": _everywhere(_PRODUCTS),
    "minimal_with_context": _everywhere((*_PRODUCTS, *_CONTEXT, "@kernel")),
    "minimal_offloaded": _everywhere((), _PRODUCTS),
    "save_qkv_proj": _everywhere(_QKV),
    "save_out_proj": _everywhere(_OUT),
    "save_dot_except_mlp": _everywhere((*_QKV, *_OUT)),
    "save_dot_with_context_except_mlp": _everywhere((*_QKV, *_CONTEXT, *_OUT)),
    "save_dot_except_mlpwi": _everywhere((*_QKV, *_OUT, *_MLP_OUT)),
    "qkv_proj_offloaded": _everywhere((), _QKV),
}


def survey() -> MemoryPolicy:
    """The policy that recomputes everything, with names for all residuals."""
    return MemoryPolicy((PRESETS["full"],), "full", surveys=True)


def preset(name: str) -> MemoryPolicy:
    """The policy of a preset.

    Raises :class:`toast.errors.TargetError` for an unknown name.
    """
    if name not in PRESETS:
        raise TargetError(f"remat {name}: no such preset; use {', '.join(PRESETS)}")
    return MemoryPolicy((PRESETS[name],), name)
