"""Decoder language models as they are trained and served.

One decoder has the parts of Llama, Qwen, Mixtral, Gemma 3 and DeepSeek: grouped key/value heads or
latent ones, norms of queries and keys, local layers among global ones, and experts.  Its train step
has attention without stored scores, layers in scans, recomputation, float32 weights that products
use in bfloat16, AdamW with clipping, and a loss that has only a part of the logits in memory.  A
call for a prompt or for one token has a paged cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType

from toast.errors import TargetError
from toast.models.attention import attention, paged_attention, pages_of
from toast.models.experts import capacity_of, expert_layer, route
from toast.models.forms import Form, product
from toast.models.layers import materialised_loss, rms_norm, rotary, vocabulary_loss
from toast.models.parameters import shapes_in, stacked
from toast.models.registry import Model
from toast.models.ring_attention import ring_attention


class Kind(NamedTuple):
    """What distinguishes the layers of a decoder from each other."""

    #: The number of keys that a query sees; 0 for all before it.
    window: int
    #: Whether the feed-forward layer consists of experts.
    experts: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(Form):
    """Sizes of a decoder and of its batch; the defaults of its parts are those of Llama 3."""

    layers: int
    d_model: int
    #: The width of one of the two projections of a gated MLP.
    hidden: int
    heads: int
    kv_heads: int
    key_size: int
    vocabulary: int
    #: The element size of values and of rotary positions; 0 for ``key_size``.
    value_size: int = 0
    rotary_size: int = 0
    activation: str = "silu"
    #: Whether the embedding is also the output projection.
    tied: bool = False
    #: Whether embeddings are multiplied by the root of ``d_model``.
    scale_embedding: bool = False
    #: Added to the scale of norms.
    norm_offset: float = 0.0
    #: Whether queries and keys are normed.
    qk_norm: bool = False
    #: Whether the results of attention and of the MLP are normed, too.
    post_norms: bool = False
    rope_theta: float = 500_000.0
    #: Local layers see ``window`` keys; every ``period``-th layer sees all.  0: none is local.
    window: int = 0
    period: int = 6
    local_theta: float = 10_000.0
    #: The sizes of the latents of keys and values, and of queries (DeepSeek's attention), or 0.
    latent: int = 0
    query_latent: int = 0
    #: Experts of a layer, those of a token, and those of every token; 0: no layer has experts.
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    expert_hidden: int = 0
    #: The first layers, which have no experts.
    dense_layers: int = 0
    #: The places of an expert, over its share of the tokens.
    capacity: float = 1.25
    #: Weight of the loss that balances experts.
    balance: float = 0.01

    sequence: int = 8192
    #: ``train``, ``prefill`` (a prompt of ``sequence`` tokens into an empty cache) or ``decode``
    #: (one token; the cache of each sequence has room for ``sequence`` tokens).
    step: str = "train"
    #: ``fused`` into few kernels, or ``materialised``: computed step by step, as PyTorch does
    #: without a compiler (:func:`toast.models.layers.materialised_loss`).
    loss: str = "fused"
    #: Parts of a fused loss.
    loss_parts: int = 8
    #: Tokens of a page of the cache.
    page: int = 64
    #: Devices of a mesh axis ``ring`` that splits sequences: keys and values of global layers go
    #: around.  1: XLA gathers them if a plan splits sequences.
    ring: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step not in ("train", "prefill", "decode"):
            raise TargetError(f"step {self.step}: use train, prefill or decode")
        if self.loss not in ("fused", "materialised"):
            raise TargetError(f"loss {self.loss}: use fused or materialised")
        if self.step == "train" and self.sequence % self.loss_parts:
            raise TargetError(
                f"sequence {self.sequence}: not a multiple of the {self.loss_parts} parts of the "
                "loss; change --sequence or --set loss_parts=N"
            )
        if self.ring > 1 and (self.step == "decode" or self.sequence % self.ring):
            raise TargetError(
                f"ring {self.ring}: use a divisor of the sequence of {self.sequence} tokens, in "
                "step=train or step=prefill"
            )
        if self.step != "train" and self.sequence % self.page:
            raise TargetError(
                f"sequence {self.sequence}: not a multiple of the {self.page} tokens of a page"
            )

    @property
    def weights(self) -> str:
        """The element type of parameters; a call for tokens has them as products use them."""
        return super().weights if self.step == "train" else self.compute

    @property
    def values(self) -> int:
        """The size of a value head."""
        return self.value_size or self.key_size

    @property
    def rotary(self) -> int:
        """The elements of a query or key with rotary positions."""
        return self.rotary_size or self.key_size

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer."""
        return tuple(
            Kind(
                self.window if (number + 1) % self.period else 0,
                bool(self.experts) and number >= self.dense_layers,
            )
            for number in range(self.layers)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names that values of the layers have, for policies of recomputation."""
        layers = [layer_shapes(self, kind) for kind in {*self.kinds}]
        parts = {part for layer in layers for part in layer}
        return (
            "layer_input", *("latent",) * ("latent_down" in parts), "query", "key", "value",
            "attention", "attention_output", *("gate", "up") * ("gate" in parts),
            *("sent", "expert_gate", "expert_up") * ("expert_gate" in parts), "mlp_output",
        )  # fmt: skip

    @property
    def segments(self) -> tuple[tuple[int, tuple[Kind, ...]], ...]:
        """Runs of layers: a number of repetitions, and the kinds of the layers of one.

        A scan runs the repetitions if there are several.
        """
        if self.unroll:
            return ((1, self.kinds),)
        period = self.period if self.window else 1
        first, rest = self.kinds[: self.dense_layers], self.kinds[self.dense_layers :]
        cycles: list[tuple[Kind, ...]] = [(kind,) for kind in first]
        cycles += [rest[start : start + period] for start in range(0, len(rest), period)]
        return tuple((len([*equal]), kinds) for kinds, equal in itertools.groupby(cycles))


def layer_shapes(config: DecoderConfig, kind: Kind) -> dict[str, Any]:
    """The shapes of the parameters of one layer."""
    c = config
    shape = shapes_in(c.weights)
    groups, queries = c.kv_heads, c.heads // c.kv_heads
    shapes = {"attention_norm": shape(c.d_model), "mlp_norm": shape(c.d_model)}
    queries_from = c.query_latent or c.d_model
    if c.latent:
        shapes |= {
            "latent_down": shape(c.d_model, c.latent),
            "latent_norm": shape(c.latent),
            "rotary_key": shape(c.d_model, c.rotary),
            "wk": shape(c.latent, c.heads, c.key_size - c.rotary),
            "wv": shape(c.latent, c.heads, c.values),
            "wq": shape(queries_from, c.heads, c.key_size),
            "wo": shape(c.heads, c.values, c.d_model),
        }
        if c.query_latent:
            shapes |= {
                "query_down": shape(c.d_model, c.query_latent),
                "query_latent_norm": shape(c.query_latent),
            }
    else:
        shapes |= {
            "wq": shape(c.d_model, groups, queries, c.key_size),
            "wk": shape(c.d_model, groups, c.key_size),
            "wv": shape(c.d_model, groups, c.values),
            "wo": shape(groups, queries, c.values, c.d_model),
        }
    if c.qk_norm:
        shapes |= {"query_norm": shape(c.key_size), "key_norm": shape(c.key_size)}
    if c.post_norms:
        shapes |= {"attention_post_norm": shape(c.d_model), "mlp_post_norm": shape(c.d_model)}
    dense = c.shared * c.expert_hidden if kind.experts else c.hidden
    if dense:
        shapes |= {
            "gate": shape(c.d_model, dense),
            "up": shape(c.d_model, dense),
            "down": shape(dense, c.d_model),
        }
    if kind.experts:
        shapes |= {
            "router": shape(c.d_model, c.experts),
            "expert_gate": shape(c.experts, c.d_model, c.expert_hidden),
            "expert_up": shape(c.experts, c.d_model, c.expert_hidden),
            "expert_down": shape(c.experts, c.expert_hidden, c.d_model),
        }
    return shapes


def parameter_shapes(config: DecoderConfig) -> dict[str, Any]:
    """The pytree of parameter shapes.

    ``layers`` has a list for each of ``config.segments``, with an entry for each of its layers.
    """
    c = config
    shape = shapes_in(c.weights)
    shapes = {
        "embedding": shape(c.vocabulary, c.d_model),
        "layers": _in_segments(c, functools.partial(layer_shapes, c)),
        "final_norm": shape(c.d_model),
    }
    return shapes if c.tied else shapes | {"output": shape(c.d_model, c.vocabulary)}


def _in_segments(config: DecoderConfig, shapes: Callable[[Kind], Any]) -> list[list[Any]]:
    """Shapes for each layer, stacked for the repetitions of a segment."""
    return [
        [shapes(kind) if times == 1 else stacked(shapes(kind), times) for kind in kinds]
        for times, kinds in config.segments
    ]


def cache_shapes(config: DecoderConfig) -> list[list[Any]]:
    """The pages of the cache, ``[pages, page, heads, size]``, for each layer as in ``layers``.

    Latent attention stores its latents and the rotary part of its keys, which all heads share.
    """
    c = config
    shape = shapes_in(c.compute)
    pages = c.batch * pages_of(c.sequence, c.page)

    def of_layer(_kind: Kind) -> dict[str, Any]:
        if c.latent:
            return {"latent": shape(pages, c.page, 1, c.latent + c.rotary)}
        return {
            "key": shape(pages, c.page, c.kv_heads, c.key_size),
            "value": shape(pages, c.page, c.kv_heads, c.values),
        }

    return _in_segments(c, of_layer)


@dataclasses.dataclass(frozen=True)
class _TokenPlaces:
    """Where the tokens of a call are."""

    #: ``[1, sequence]`` or ``[batch, sequence]``.
    positions: jax.Array
    #: ``[batch, pages of a sequence]``; ``None`` in training.
    table: jax.Array | None = None
    #: Whether there is one token per sequence, which attends to the cache.
    decoding: bool = False


def _written(pages: jax.Array, new: jax.Array, place: _TokenPlaces, page: int) -> jax.Array:
    """``pages`` with the keys or values ``new : [batch, sequence, heads, size]``."""
    assert place.table is not None
    new = new.astype(pages.dtype)
    if place.decoding:
        position = place.positions[:, 0]
        mine = jnp.take_along_axis(place.table, position[:, None] // page, axis=1)[:, 0]
        return pages.at[mine, position % page].set(new[:, 0])
    batch, sequence = new.shape[:2]
    split = new.reshape(batch, sequence // page, page, *new.shape[2:])
    return pages.at[place.table].set(split)


def _attention(
    config: DecoderConfig, query: jax.Array, key: jax.Array, value: jax.Array, window: int = 0
) -> jax.Array:
    """Causal attention; in a ring if the model has one, but local layers gather their keys."""
    if config.ring < 2 or window:
        return attention(query, key, value, window=window)
    mesh = AbstractMesh((config.ring,), ("ring",), axis_types=(AxisType.Auto,))
    return ring_attention(query, key, value, mesh=mesh, axis="ring")


def _grouped_attention(
    config: DecoderConfig,
    kind: Kind,
    layer: dict[str, Any],
    cache: Any,
    x: jax.Array,
    place: _TokenPlaces,
) -> tuple[jax.Array, Any]:
    """Attention with a key and a value head per group of query heads."""
    c = config
    theta = c.local_theta if kind.window else c.rope_theta
    query = product("bsd,dgrk->bsgrk", x, layer["wq"])
    key = product("bsd,dgk->bsgk", x, layer["wk"])
    if c.qk_norm:
        query = rms_norm(query, layer["query_norm"], c.norm_offset)
        key = rms_norm(key, layer["key_norm"], c.norm_offset)
    query = checkpoint_name(rotary(query, theta, positions=place.positions), "query")
    key = checkpoint_name(rotary(key, theta, positions=place.positions), "key")
    value = checkpoint_name(product("bsd,dgv->bsgv", x, layer["wv"]), "value")
    if place.table is not None:
        cache = {
            "key": _written(cache["key"], key, place, c.page),
            "value": _written(cache["value"], value, place, c.page),
        }
    if place.decoding:
        attended = paged_attention(
            query[:, 0], cache["key"], cache["value"], place.table, place.positions[:, 0] + 1,
            window=kind.window,
        )[:, None]  # fmt: skip
    else:
        attended = _attention(c, query, key, value, kind.window)
    return product("bsgrv,grvd->bsd", attended, layer["wo"]), cache


def _latent_attention(
    config: DecoderConfig, layer: dict[str, Any], cache: Any, x: jax.Array, place: _TokenPlaces
) -> tuple[jax.Array, Any]:
    """DeepSeek's attention: keys and values are projections of a latent.

    Rotary positions are in a part of queries and keys; all heads share that of the keys.  Decoding
    applies the projections to the queries and the result, so that it reads the latents alone.
    """
    c = config
    source = x
    if c.query_latent:
        source = product("bsd,dl->bsl", x, layer["query_down"])
        source = rms_norm(source, layer["query_latent_norm"], c.norm_offset)
    query = product("bsl,lhk->bshk", source, layer["wq"])
    plain = c.key_size - c.rotary
    turned = rotary(query[..., plain:], c.rope_theta, positions=place.positions)
    latent = product("bsd,dl->bsl", x, layer["latent_down"])
    latent = checkpoint_name(rms_norm(latent, layer["latent_norm"], c.norm_offset), "latent")
    shared = product("bsd,dk->bsk", x, layer["rotary_key"])[:, :, None]
    shared = rotary(shared, c.rope_theta, positions=place.positions)
    if place.table is not None:
        both = jnp.concatenate([latent[:, :, None], shared], axis=-1)
        cache = {"latent": _written(cache["latent"], both, place, c.page)}
    if place.decoding:
        inside = product("bhk,lhk->bhl", query[:, 0, :, :plain], layer["wk"])
        # The scale of attention is that of the keys, not that of the latents.
        scale = ((c.latent + c.rotary) / c.key_size) ** 0.5
        whole = jnp.concatenate([inside, turned[:, 0]], axis=-1) * jnp.asarray(scale, x.dtype)
        attended = paged_attention(
            whole[:, None], cache["latent"], cache["latent"], place.table,
            place.positions[:, 0] + 1, value_size=c.latent,
        )[:, 0]  # fmt: skip
        attended = product("bhl,lhv->bhv", attended, layer["wv"])[:, None]
    else:
        query = jnp.concatenate([query[..., :plain], turned], axis=-1)
        query = checkpoint_name(query, "query")
        key = product("bsl,lhk->bshk", latent, layer["wk"])
        shared = jnp.broadcast_to(shared, (*key.shape[:3], c.rotary))
        key = checkpoint_name(jnp.concatenate([key, shared], axis=-1), "key")
        value = checkpoint_name(product("bsl,lhv->bshv", latent, layer["wv"]), "value")
        attended = _attention(c, query[:, :, :, None], key, value)[:, :, :, 0]
    return product("bshv,hvd->bsd", attended, layer["wo"]), cache


def _feed_forward(
    config: DecoderConfig, kind: Kind, layer: dict[str, Any], x: jax.Array, decoding: bool
) -> tuple[jax.Array, jax.Array]:
    """A gated MLP, experts, or the sum of both; and the loss that balances experts."""
    c = config
    y, balance = jnp.zeros_like(x), jnp.zeros((), jnp.float32)
    if "gate" in layer:
        gate = checkpoint_name(product("bsd,df->bsf", x, layer["gate"]), "gate")
        up = checkpoint_name(product("bsd,df->bsf", x, layer["up"]), "up")
        y = product("bsf,fd->bsd", getattr(jax.nn, c.activation)(gate) * up, layer["down"])
    if kind.experts:
        # The groups are sequences; the single tokens of a batch are one group, and none is dropped.
        tokens = jnp.swapaxes(x, 0, 1) if decoding else x
        routing = route(tokens, layer["router"], c.chosen)
        count = tokens.shape[1]
        capacity = count if decoding else capacity_of(count, c.experts, c.chosen, c.capacity)
        routed = expert_layer(layer, tokens, routing, capacity)
        routed = jnp.swapaxes(routed, 0, 1) if decoding else routed
        y, balance = (y + routed if "gate" in layer else routed), routing.balance
    return checkpoint_name(y, "mlp_output"), balance


def _layer(
    config: DecoderConfig, kind: Kind, place: _TokenPlaces, x: jax.Array, layer: Any, cache: Any
) -> tuple[jax.Array, jax.Array, Any]:
    """One layer: its result, the loss that balances experts, and its part of the cache."""
    c = config

    def norm(x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, layer[name], c.norm_offset)

    x = checkpoint_name(x, "layer_input")
    normed = norm(x, "attention_norm")
    if c.latent:
        attended, cache = _latent_attention(c, layer, cache, normed, place)
    else:
        attended, cache = _grouped_attention(c, kind, layer, cache, normed, place)
    attended = checkpoint_name(attended, "attention_output")
    x = x + (norm(attended, "attention_post_norm") if c.post_norms else attended)
    y, balance = _feed_forward(c, kind, layer, norm(x, "mlp_norm"), place.decoding)
    return x + (norm(y, "mlp_post_norm") if c.post_norms else y), balance, cache


def _embedded(config: DecoderConfig, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens].astype(config.compute)
    if config.scale_embedding:
        x = x * jnp.asarray(config.d_model**0.5, x.dtype)
    return x


def _output(config: DecoderConfig, params: dict[str, Any]) -> jax.Array:
    """The output projection, ``[d_model, vocabulary]``."""
    return params["embedding"].T if config.tied else params["output"]


def loss(
    config: DecoderConfig, params: dict[str, Any], tokens: jax.Array, targets: jax.Array
) -> jax.Array:
    """Mean next-token cross entropy, and the loss that balances experts.

    ``tokens, targets : [batch, sequence]`` of int32.
    """
    c = config
    place = _TokenPlaces(jnp.arange(tokens.shape[1])[None])
    carried = _embedded(c, params, tokens), jnp.zeros((), jnp.float32)
    for (times, kinds), layers in zip(c.segments, params["layers"], strict=True):
        run = [
            c.checkpointed(
                functools.partial(_train_layer, c, kind, place), c.names, scanned=times > 1
            )
            for kind in kinds
        ]
        body = functools.partial(_in_turn, run)
        carried = body(carried, layers) if times == 1 else _scanned(body, carried, layers)
    x, balance = carried
    x = rms_norm(x, params["final_norm"], c.norm_offset)
    if c.loss == "materialised":
        value = materialised_loss(x, _output(c, params), targets)
    else:
        value = vocabulary_loss(x, _output(c, params), targets, c.loss_parts)
    return value + c.balance * balance / c.layers if c.experts else value


def _train_layer(
    config: DecoderConfig, kind: Kind, place: _TokenPlaces, carried: Any, layer: Any
) -> tuple[jax.Array, jax.Array]:
    x, total = carried
    x, balance, _ = _layer(config, kind, place, x, layer, None)
    return x, total + balance


def _in_turn(run: Sequence[Callable[..., Any]], carried: Any, layers: Sequence[Any]) -> Any:
    """The layers of one repetition of a segment, each run by its own function."""
    for function, layer in zip(run, layers, strict=True):
        carried = function(carried, layer)
    return carried


def _scanned(body: Callable[..., Any], carried: Any, layers: Any) -> Any:
    return jax.lax.scan(lambda carried, slice_: (body(carried, slice_), None), carried, layers)[0]


def serve(
    config: DecoderConfig,
    params: dict[str, Any],
    cache: list[list[Any]],
    table: jax.Array,
    lengths: jax.Array,
    tokens: jax.Array,
) -> tuple[jax.Array, list[list[Any]]]:
    """Logits after the last of ``tokens``, ``[batch, vocabulary]``, and the new cache.

    :param cache: pages, with the shapes of :func:`cache_shapes`.
    :param table: ``[batch, pages of a sequence]`` of int32, the pages of each sequence.
    :param lengths: ``[batch]`` of int32, the tokens in the cache; all 0 before a prompt.
    :param tokens: ``[batch, sequence]`` of int32, one token of each sequence or a whole prompt.
    """
    c = config
    decoding = tokens.shape[1] == 1
    positions = lengths[:, None] + jnp.arange(tokens.shape[1])
    place = _TokenPlaces(positions, table, decoding)
    x = _embedded(c, params, tokens)
    new: list[list[Any]] = []
    for (times, kinds), layers, pages in zip(c.segments, params["layers"], cache, strict=True):

        def body(x: jax.Array, both: Any, kinds: tuple[Kind, ...] = kinds) -> tuple[jax.Array, Any]:
            written = []
            for kind, layer, mine in zip(kinds, *both, strict=True):
                x, _, mine = _layer(c, kind, place, x, layer, mine)
                written.append(mine)
            return x, written

        run = body if times == 1 else functools.partial(jax.lax.scan, body)
        x, written = run(x, (layers, pages))
        new.append(written)
    x = rms_norm(x[:, -1], params["final_norm"], c.norm_offset)
    return (x @ _output(c, params).astype(x.dtype)).astype(jnp.float32), new


def model(config: DecoderConfig, name: str) -> Model:
    """The step of ``config`` with abstract arguments, for :func:`toast.plan`."""
    c = config
    params = parameter_shapes(c)
    integers = shapes_in("int32")
    if c.step == "train":
        tokens = integers(c.batch, c.sequence)
        return c.train(name, functools.partial(loss, c), params, tokens, tokens)

    def call(
        params: Any, cache: Any, table: jax.Array, lengths: jax.Array, tokens: jax.Array
    ) -> tuple[jax.Array, Any]:
        return serve(c, params, cache, table, lengths, tokens)

    return Model(
        name=f"{name}-{c.step}",
        function=call,
        arguments=(
            params,
            cache_shapes(c),
            integers(c.batch, pages_of(c.sequence, c.page)),
            integers(c.batch),
            integers(c.batch, c.sequence if c.step == "prefill" else 1),
        ),
        donate=(1,),
    )
