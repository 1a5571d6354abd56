"""What trainers call the dimensions of parameters and data, by the path and shape of an array.

The words are MaxText's, which are the most detailed: ``embed_attn`` is the model dimension of a
weight of attention, ``embed`` that of a weight of an MLP.  Layouts are those of JAX: a weight has
its inputs first.  Attributes named ``weight``, as in Equinox, have their outputs first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from toast.paths import keys

#: The last keys of paths that name no parameter, but its place in a module.
_PLACES = frozenset({"kernel", "weight", "w"})

#: The keys that hold a stack of layers, whose parameters have a dimension for the layers.
_STACKS = frozenset({"layers", "blocks", "encoder", "decoder", "stack"})

_Roles = tuple[str | None, ...]

#: The names of parameters, and those of their dimensions for each rank.
_PARAMETERS: Sequence[tuple[frozenset[str], Mapping[int, _Roles]]] = (
    (
        frozenset({"embedding", "embed_tokens", "wte", "token_embedder", "token_embedding"}),
        {2: ("vocab", "embed_vocab")},
    ),
    (
        frozenset({"output", "lm_head", "logits_dense", "unembedding", "unembed"}),
        {2: ("embed_vocab", "vocab")},
    ),
    (
        frozenset({"wq", "q_proj", "query", "query_proj"}),
        {
            2: ("embed_attn", "q_heads"),
            3: ("embed_attn", "q_heads", "kv"),
            4: ("embed_attn", "q_heads", "query_group", "kv"),
        },
    ),
    (
        frozenset({"wk", "wv", "k_proj", "v_proj", "key", "value", "key_proj", "value_proj"}),
        {2: ("embed_attn", "kv_heads"), 3: ("embed_attn", "kv_heads", "kv_head_dim")},
    ),
    (
        frozenset({"wo", "o_proj", "out", "out_proj"}),
        {
            2: ("heads", "embed_attn"),
            3: ("heads", "kv", "embed_attn"),
            4: ("heads", "query_group", "kv", "embed_attn"),
        },
    ),
    (
        frozenset(
            {"gate", "up", "gate_proj", "up_proj", "wi", "wi_0", "wi_1", "w1", "w3", "fc1", "c_fc"}
        ),
        {2: ("embed", "mlp")},
    ),
    (frozenset({"down", "down_proj", "w2", "fc2"}), {2: ("mlp", "embed")}),
    (frozenset({"expert_gate", "expert_up"}), {3: ("exp", "embed_moe", "mlp_moe")}),
    (frozenset({"expert_down"}), {3: ("exp", "mlp_moe", "embed_moe")}),
    (frozenset({"router"}), {2: ("embed_router", None)}),
)

#: Other names of parameters inside of a block of a kind.
_IN_BLOCK: Mapping[str, Mapping[str, str]] = {
    "moe": {
        "gate": "router",
        **dict.fromkeys(("wi", "wi_0", "wi_1", "up", "w1", "w3"), "expert_up"),
        **dict.fromkeys(("wo", "down", "w2"), "expert_down"),
    },
    "mlp": {"wo": "down", "out": "down"},
    "ffn": {"wo": "down", "out": "down"},
}

#: Arrays of examples: the batch comes first, and then, of tokens, the sequence.
_DATA = frozenset({
    "tokens", "inputs", "targets", "labels", "input_ids", "ids", "images", "x", "y", "batch",
    "inputs_position", "inputs_segmentation", "targets_position", "targets_segmentation",
    "positions", "segment_ids", "mask", "attention_mask",
})  # fmt: skip

#: The name of a dimension in every trainer, by its name in MaxText.
COMMON: Mapping[str, str] = {
    "vocab": "vocab", "embed_vocab": "embed", "embed_attn": "embed", "embed": "embed",
    "embed_moe": "embed", "embed_router": "embed", "norm": "embed", "q_heads": "heads",
    "kv_heads": "heads", "heads": "heads", "query_group": "query_group", "kv": "head_dim",
    "kv_head_dim": "head_dim", "mlp": "mlp", "mlp_moe": "mlp", "exp": "experts",
    "layers": "layers", "batch": "batch", "sequence": "sequence",
}  # fmt: skip


def roles_of(path: str, shape: Sequence[int], dtype: str) -> _Roles:
    """The name of each dimension of an argument in MaxText's words; ``None`` where unknown.

    Dimensions of examples are ``batch`` and ``sequence``.
    """
    rank = len(shape)
    # The array of a variable of NNX is its attribute ``value``.
    parts = [key.lower() for key in keys(path.removesuffix(".value"))]
    words = [key for key in parts if not key.isdigit()]
    name = next((word for word in reversed(words) if word not in _PLACES), "")
    data = words[-1:] and words[-1] in _DATA
    if data and rank:
        # Shards of float inputs along their second dimension are features, not tokens.
        second = ("sequence",) if rank > 1 and dtype.startswith(("i", "ui")) else ()
        return ("batch", *second, *(None,) * rank)[:rank]
    is_float = dtype.startswith(("f", "bf"))
    if not is_float or "bias" in (name, words[-1] if words else ""):
        return (None,) * rank
    for kind, names in _IN_BLOCK.items():
        if any(kind in word for word in words[:-1]) and name in names:
            name = names[name]
            break
    stacks = [number for number, part in enumerate(parts) if part in _STACKS]
    in_stack = bool(stacks)
    is_stack = in_stack and not any(part.isdigit() for part in parts[stacks[0] :])
    ranks = _ranks(name)
    # Blocks of several layers have both: a number of the block, and a dimension for its layers.
    is_stack |= in_stack and rank not in ranks
    roles = _stacked(ranks, rank, is_stack, second=words[-1:] == ["kernel"])
    if roles is not None:
        return roles[::-1] if path.endswith(".weight") else roles
    if re.search(r"norm|(^|_)ln(_|$|\d)", name) or name == "scale":
        norm: Mapping[int, _Roles] = {1: ("norm",)}
        is_stack |= in_stack and rank > 1
        return _stacked(norm, rank, is_stack, second=name == "scale") or (None,) * rank
    return (None,) * rank


def _ranks(name: str) -> Mapping[int, _Roles]:
    return next((ranks for names, ranks in _PARAMETERS if name in names), {})


def _stacked(
    ranks: Mapping[int, _Roles], rank: int, is_stack: bool, *, second: bool
) -> _Roles | None:
    """The roles for a rank, with ``layers`` first (in MaxText second) for a stack of layers."""
    if is_stack and rank - 1 in ranks:
        first, *rest = ranks[rank - 1]
        return (first, "layers", *rest) if second else ("layers", first, *rest)
    return ranks.get(rank)


__all__ = ["COMMON", "roles_of"]
