"""What the dimensions of arguments are, by the path and shape of an array.

Exports and reports both take their names from here.  The words are MaxText's, which are the most
detailed: ``embed_attn`` is the model dimension of a weight of attention, ``embed`` that of a weight
of an MLP.  :data:`COMMON` and :data:`PLAIN` have other trainers' words and those of reports.

Layouts are those of JAX: a weight has its inputs first.  Attributes named ``weight``, as in Equinox
and PyTorch, have their outputs first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from toast.paths import keys

#: The last keys of paths that name no parameter, but its place in a module.
_PLACES = frozenset({"kernel", "kernels", "weight", "weights", "w"})

#: The keys that hold a stack of layers, whose parameters have a dimension for the layers.
_STACKS = frozenset({"layers", "blocks", "encoder", "decoder", "stack"})

Roles = tuple[str | None, ...]

#: Each word for a dimension, with those of other trainers and of reports, if they have one.
_WORDS: Mapping[str, tuple[str | None, str | None]] = {
    "vocab": ("vocab", "vocabulary"),
    "embed_vocab": ("embed", "model"),
    "embed_attn": ("embed", "model"),
    "embed": ("embed", "model"),
    "embed_moe": ("embed", "model"),
    "embed_router": ("embed", "model"),
    "norm": ("embed", None),
    "q_heads": ("heads", "heads"),
    "kv_heads": ("heads", "key heads"),
    "heads": ("heads", "heads"),
    "query_group": ("query_group", None),
    "kv": ("head_dim", "head size"),
    "kv_head_dim": ("head_dim", "head size"),
    "mlp": ("mlp", "hidden"),
    "mlp_moe": ("mlp", "hidden"),
    "exp": ("experts", "experts"),
    "layers": ("layers", None),
    "batch": ("batch", "batch"),
    "sequence": ("sequence", "sequence"),
    # Words of ours, for what trainers do not name.
    "router_experts": (None, "experts"),
    "classes": (None, "vocabulary"),
    "features": (None, "features"),
    "height": (None, "height"),
    "width": (None, "width"),
    "channels": (None, "channels"),
}

#: The name of a dimension in every trainer, by its name in MaxText.
COMMON: Mapping[str, str] = {word: names[0] for word, names in _WORDS.items() if names[0]}

#: The name of a dimension in reports; ``model`` is the width of the residual stream.
PLAIN: Mapping[str, str] = {word: names[1] for word, names in _WORDS.items() if names[1]}

#: The names of parameters, and those of their dimensions for each rank.
_PARAMETERS: Sequence[tuple[str, Mapping[int, Roles]]] = (
    (r"router|gating", {2: ("embed_router", "router_experts")}),
    (r"unembed\w*|lm_?head|output|logits\w*", {2: ("embed_vocab", "vocab")}),
    (r"head", {2: ("embed_vocab", "classes")}),
    (r"w?embed\w*|wte|vocab\w*|tok\w*", {2: ("vocab", "embed_vocab")}),
    (
        r"w?q|query|q(uery)?_?proj",
        {
            2: ("embed_attn", "q_heads"),
            3: ("embed_attn", "q_heads", "kv"),
            4: ("embed_attn", "q_heads", "query_group", "kv"),
        },
    ),
    (
        r"w?k|w?v|key|value|(k|v|key|value)_?proj",
        {2: ("embed_attn", "kv_heads"), 3: ("embed_attn", "kv_heads", "kv_head_dim")},
    ),
    (
        r"w?o|out|o(ut)?_?proj",
        {
            2: ("heads", "embed_attn"),
            3: ("heads", "kv", "embed_attn"),
            4: ("heads", "query_group", "kv", "embed_attn"),
        },
    ),
    (
        r"gate|up|(gate|up)_?proj|wi(_\w+)?|w1|w3|fc1|c_fc|linear1|mlp_in",
        {2: ("embed", "mlp")},
    ),
    (r"down|down_?proj|w2|fc2|linear2|mlp_out", {2: ("mlp", "embed")}),
    (r"expert_(gate|up)", {3: ("exp", "embed_moe", "mlp_moe")}),
    (r"expert_down", {3: ("exp", "mlp_moe", "embed_moe")}),
)

_UP = r"gate|up|(gate|up)_?proj|wi(_\w+)?|w1|w3"
_DOWN = r"down|down_?proj|w2|wo|out"

#: What parameters are inside of a block of a kind, if that has their rank: the first that does.
_IN_BLOCK: Mapping[str, Sequence[tuple[str, str]]] = {
    "moe": (("gate", "router"), (_UP, "expert_up"), (_DOWN, "expert_down"), (_DOWN, "down")),
    "expert": ((_UP, "expert_up"), (_DOWN, "expert_down"), (_DOWN, "down")),
    "mlp": ((_DOWN, "down"),),
    "ffn": ((_DOWN, "down"),),
}

#: Arrays of numbers, such as images, by rank; those of tokens have a sequence after the batch.
_EXAMPLES: Mapping[int, Roles] = {
    2: ("batch", "features"),
    3: ("batch", "sequence", "features"),
    4: ("batch", "height", "width", "channels"),
}


def parameter_roles(path: str, shape: Sequence[int]) -> Roles:
    """The word for each dimension of a parameter; ``None`` where unknown.

    >>> parameter_roles("params['layers'][0]['mlp']['wo']", (16, 8))
    ('mlp', 'embed')
    """
    rank = len(shape)
    parts, words = _parts(path)
    name = next((word for word in reversed(words) if word not in _PLACES), "")
    if "bias" in (name, *words[-1:]) or (len(name) == 1 and len(words) == 1):
        return (None,) * rank
    stacks = [number for number, part in enumerate(parts) if part in _STACKS]
    in_stack = bool(stacks)
    numbers = [part.isdigit() for part in parts[stacks[0] :]] if in_stack else []
    # Without numbers, all layers are one stack; two in a row are those of a stack in a period.
    is_stack = in_stack and (not any(numbers) or any(map(all, itertools.pairwise(numbers))))
    is_kernel = words[-1:] == ["kernel"]
    candidates = list(_ranks(name, words[:-1]))
    # Blocks of several layers have both: a number of the block, and a dimension for its layers.
    for stacked in (is_stack, in_stack):
        for ranks in candidates:
            roles = _stacked(ranks, rank, stacked, second=is_kernel)
            if roles is not None:
                # Tables of embeddings are looked up, and have no outputs.
                is_turned = path.endswith(".weight") and roles[0] != "vocab"
                return roles[::-1] if is_turned else roles
    if re.search(r"norm|(^|_)ln(_|$|\d)", name) or name == "scale":
        norm: Mapping[int, Roles] = {1: ("norm",)}
        is_stack |= in_stack and rank > 1
        return _stacked(norm, rank, is_stack, second=name == "scale") or (None,) * rank
    return (None,) * rank


def example_roles(shape: Sequence[int], dtype: str) -> Roles:
    """The word for each dimension of an array of examples; whole numbers are tokens.

    >>> example_roles((8, 128), "i32"), example_roles((8, 128), "f32")
    (('batch', 'sequence'), ('batch', 'features'))
    """
    rank = len(shape)
    if dtype.startswith(("i", "ui")):
        return ("batch", "sequence", *(None,) * rank)[:rank]
    return _EXAMPLES.get(rank, ("batch", *(None,) * rank)[:rank])


def _parts(path: str) -> tuple[list[str], list[str]]:
    """The keys of a path, and those that are no numbers."""
    # The array of a variable of NNX is its attribute ``value``.
    parts = [key.lower() for key in keys(path.removesuffix(".value"))]
    return parts, [part for part in parts if not part.isdigit()]


def last_word(path: str) -> str:
    """The last key of a path that is no number, in lower case; empty if there is none."""
    return "".join(_parts(path)[1][-1:])


def _ranks(name: str, above: Sequence[str]) -> Iterator[Mapping[int, Roles]]:
    """The dimensions of a parameter by rank: first as part of the block, then by its own name."""
    for kind, names in _IN_BLOCK.items():
        if any(kind in word for word in above):
            for pattern, own in names:
                if re.fullmatch(pattern, name):
                    yield from _ranks(own, ())
            break
    yield from (ranks for pattern, ranks in _PARAMETERS if re.fullmatch(pattern, name))


def _stacked(
    ranks: Mapping[int, Roles], rank: int, is_stack: bool, *, second: bool
) -> Roles | None:
    """The roles for a rank, with ``layers`` first (in MaxText second) for a stack of layers."""
    if is_stack and rank - 1 in ranks:
        first, *rest = ranks[rank - 1]
        return (first, "layers", *rest) if second else ("layers", first, *rest)
    return ranks.get(rank)


__all__ = ["COMMON", "PLAIN", "Roles", "example_roles", "last_word", "parameter_roles"]
