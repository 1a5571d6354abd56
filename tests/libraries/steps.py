"""Steps of training and simulation, written as the users of each library write them.

Each function returns a :class:`Step` with its arguments.  Its library is imported inside, so that
the others can be tested without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries.empty_modules import empty_modules

# keras reads these when it is imported.
os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("KERAS_HOME", tempfile.gettempdir())


@dataclasses.dataclass(frozen=True)
class Step:
    """A step and its first arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    #: The number of first arguments that are donated, and that the next step gets from the first
    #: results of this one.
    carried: int
    #: The context that it is traced in, such as a mesh.
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def integers(seed: int, most: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, most)


# -- haiku ---------------------------------------------------------------------------------------


def haiku_convnet() -> Step:
    """A residual network with batch norms, whose statistics are state, and dropout."""
    import haiku as hk
    import optax

    def forward(x: jax.Array, training: bool) -> jax.Array:
        x = hk.Conv2D(16, 3, with_bias=False)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, training))
        y = hk.Conv2D(16, 3)(x)
        x = hk.max_pool(jax.nn.relu(hk.GroupNorm(4)(y)) + x, (2, 2, 1), (2, 2, 1), "SAME")
        return hk.Linear(8)(hk.dropout(hk.next_rng_key(), 0.1, x.mean((1, 2))))

    network = hk.transform_with_state(forward)
    adam = optax.adam(1e-3)
    x, y = normal(0, 16, 8, 8, 4), integers(1, 8, 16)
    parameters, state = network.init(jax.random.key(0), x, True)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, state: Any, moments: Any, key: jax.Array, x: jax.Array, y: jax.Array):  # type: ignore[no-untyped-def]
        def loss(params: Any) -> Any:
            logits, new = network.apply(params, state, key, x, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), new, moments, value

    return Step(step, (parameters, state, adam.init(parameters), jax.random.key(2), x, y), 3)


def haiku_transformer() -> Step:
    """Layers that hk.layer_stack scans, with hk.MultiHeadAttention."""
    import haiku as hk
    import optax

    def layer(x: jax.Array) -> jax.Array:
        past = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1])))
        attention = hk.MultiHeadAttention(
            4, 8, w_init=hk.initializers.VarianceScaling(), model_size=32
        )
        h = hk.LayerNorm(-1, True, True)(x)
        x = x + attention(h, h, h, mask=past)
        h = hk.LayerNorm(-1, True, True)(x)
        return x + hk.nets.MLP([64, 32], activation=jax.nn.gelu)(h)

    def forward(tokens: jax.Array) -> jax.Array:
        x = hk.Embed(64, 32)(tokens) + hk.get_parameter("place", (16, 32), init=jnp.zeros)
        x = hk.layer_stack(3)(layer)(x)
        return hk.Linear(64)(hk.LayerNorm(-1, True, True)(x))

    network = hk.without_apply_rng(hk.transform(forward))
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, eps=1e-4))
    tokens = integers(0, 64, 16, 16)
    parameters = network.init(jax.random.key(0), tokens)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = network.apply(params, tokens)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimiser.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return Step(step, (parameters, optimiser.init(parameters), tokens), 2)


def haiku_recurrent() -> Step:
    """An LSTM that hk.dynamic_unroll runs over time."""
    import haiku as hk
    import optax

    def forward(x: jax.Array) -> jax.Array:
        core = hk.LSTM(32)
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.BatchApply(hk.Linear(8))(outputs)

    network = hk.without_apply_rng(hk.transform(forward))
    sgd = optax.sgd(0.1, momentum=0.9)
    x, y = normal(0, 12, 16, 8), normal(1, 12, 16, 8)
    parameters = network.init(jax.random.key(0), x)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, velocity: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(lambda p: ((network.apply(p, x) - y) ** 2).mean())(
            params
        )
        updates, velocity = sgd.update(gradients, velocity)
        return optax.apply_updates(params, updates), velocity, value

    return Step(step, (parameters, sgd.init(parameters), x, y), 2)


# -- jraph ---------------------------------------------------------------------------------------


def graph(jraph: Any, nodes: int, edges: int) -> Any:
    """A batch of two graphs and padding."""
    senders, receivers = (np.asarray(integers(seed, nodes, edges)) for seed in (1, 2))
    one = jraph.GraphsTuple(
        nodes=np.asarray(normal(3, nodes, 16)), edges=np.asarray(normal(4, edges, 8)),
        senders=senders, receivers=receivers, globals=np.ones((1, 8), np.float32),
        n_node=np.array([nodes]), n_edge=np.array([edges]),
    )  # fmt: skip
    padded = jraph.pad_with_graphs(jraph.batch_np([one, one]), 4 * nodes, 4 * edges, 8)
    return jax.tree.map(jnp.asarray, padded)


def jraph_network() -> Step:
    """Message passing with updates of nodes, edges and globals; networks of haiku."""
    import haiku as hk
    import jraph
    import optax

    def forward(graph: Any) -> Any:
        def update(size: int) -> Any:
            return jraph.concatenated_args(lambda x: hk.nets.MLP([32, size])(x))

        graph = jraph.GraphMapFeatures(hk.Linear(16), hk.Linear(32), hk.Linear(16))(graph)
        for _ in range(2):
            graph = jraph.GraphNetwork(update(16), update(32), update(16))(graph)
        return graph.globals

    network = hk.without_apply_rng(hk.transform(forward))
    adam = optax.adam(1e-3)
    batch = graph(jraph, 8, 16)
    parameters = network.init(jax.random.key(0), batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, batch: Any, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            mask = jraph.get_graph_padding_mask(batch)
            error = ((network.apply(params, batch)[:, 0] - labels) ** 2) * mask
            return error.sum() / mask.sum()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(gradients, moments)
        return optax.apply_updates(params, updates), moments, value

    return Step(step, (parameters, adam.init(parameters), batch, normal(5, 8)), 2)


def jraph_attention() -> Step:
    """A graph attention network and a graph convolution, with networks in plain JAX."""
    import jraph
    import optax

    def forward(params: Any, graph: Any) -> Any:
        attention = jraph.GAT(
            attention_query_fn=lambda nodes: nodes @ params["query"],
            attention_logit_fn=lambda sent, received, _edges: jax.nn.leaky_relu(
                jnp.concatenate([sent, received], axis=1) @ params["logit"]
            ),
            node_update_fn=jax.nn.relu,
        )
        convolution = jraph.GraphConvolution(
            lambda nodes: nodes @ params["update"], add_self_edges=True
        )
        return convolution(attention(graph._replace(edges=None))).nodes

    adam = optax.adam(1e-2)
    sizes = {"query": (16, 32), "logit": (64, 1), "update": (32, 8)}
    parameters = {name: 0.2 * normal(n, *size) for n, (name, size) in enumerate(sizes.items())}
    batch = graph(jraph, 8, 16)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, batch: Any, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = forward(params, batch)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(gradients, moments)
        return optax.apply_updates(params, updates), moments, value

    return Step(step, (parameters, adam.init(parameters), batch, integers(5, 8, 32)), 2)


# -- diffrax -------------------------------------------------------------------------------------


def neural_ode() -> Step:
    """A neural differential equation, solved with steps that adapt to the error."""
    import diffrax
    import equinox as eqx
    import optax

    class Field(eqx.Module):  # type: ignore[misc]
        mlp: Any

        def __call__(self, t: Any, y: jax.Array, args: Any) -> jax.Array:
            return self.mlp(y)

    adam = optax.adam(1e-3)
    field = Field(eqx.nn.MLP(4, 4, 32, 2, activation=jax.nn.softplus, key=jax.random.key(0)))
    times, paths = jnp.linspace(0.0, 1.0, 8), 0.5 * normal(1, 16, 8, 4)

    @eqx.filter_jit
    def step(field: Any, moments: Any, times: jax.Array, paths: jax.Array) -> Any:
        def solve(field: Any, start: jax.Array) -> jax.Array:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(field), diffrax.Tsit5(), t0=0.0, t1=1.0, dt0=0.1, y0=start,
                saveat=diffrax.SaveAt(ts=times), max_steps=64,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            ).ys  # fmt: skip

        @eqx.filter_value_and_grad
        def loss(field: Any) -> jax.Array:
            return ((jax.vmap(solve, in_axes=(None, 0))(field, paths[:, 0]) - paths) ** 2).mean()

        value, gradients = loss(field)
        updates, moments = adam.update(gradients, moments)
        return eqx.apply_updates(field, updates), moments, value

    moments = adam.init(eqx.filter(field, eqx.is_inexact_array))
    return Step(step, (field, moments, times, paths), 2)


def stochastic_paths() -> Step:
    """Paths of a stochastic differential equation, each with a Brownian motion of its own."""
    import diffrax

    @jax.jit
    def step(states: jax.Array, keys: jax.Array, drift: jax.Array) -> Any:
        def path(start: jax.Array, key: jax.Array) -> jax.Array:
            noise = diffrax.VirtualBrownianTree(0.0, 1.0, 1e-2, (4,), key)
            terms = diffrax.MultiTerm(
                diffrax.ODETerm(lambda t, y, a: -jnp.tanh(drift @ y)),
                diffrax.ControlTerm(lambda t, y, a: 0.1 * jnp.diag(jnp.cos(y)), noise),
            )
            solution = diffrax.diffeqsolve(
                terms, diffrax.Heun(), 0.0, 1.0, 0.1, start, adjoint=diffrax.DirectAdjoint()
            )
            return solution.ys[0]

        states = jax.vmap(path)(states, keys)
        return states, jax.vmap(lambda key: jax.random.split(key)[0])(keys), states.var()

    return Step(
        step, (normal(0, 64, 4), jax.random.split(jax.random.key(1), 64), normal(2, 4, 4)), 1
    )


# -- numpyro -------------------------------------------------------------------------------------


def variational_inference() -> Step:
    """Stochastic variational inference of a logistic regression."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x: jax.Array, y: jax.Array) -> None:
        weight = numpyro.sample("weight", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        bias = numpyro.sample("bias", dist.Cauchy(0, 2))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weight + bias), obs=y)

    inference = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())
    x, y = normal(0, 64, 16), integers(1, 2, 64)
    return Step(inference.update, (inference.init(jax.random.key(2), x, y), x, y), 1)


def no_u_turns() -> Step:
    """One transition of the no-U-turn sampler in each of several chains."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import NUTS

    def model(x: jax.Array, y: jax.Array) -> None:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        weight = numpyro.sample("weight", dist.Normal(0, scale).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ weight, 1.0), obs=y)

    x, y = normal(0, 64, 8), normal(1, 64)
    keys = jax.random.split(jax.random.key(2), 8)
    kernel = NUTS(model, max_tree_depth=3)
    state = kernel.init(keys, 10, None, (x, y), {})

    def transition(state: Any, x: jax.Array, y: jax.Array) -> Any:
        state = kernel.sample(state, (x, y), {})
        return state, state.potential_energy

    return Step(transition, (state, x, y), 1)


# -- keras ---------------------------------------------------------------------------------------


def keras_trainer(model: Any, x: jax.Array, y: jax.Array) -> Step:
    """The step that ``model.fit`` jits: the trainer's own."""
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(x, y))
    trained, other, moments = (
        [variable.value for variable in variables] for variables in (
            model.trainable_variables, model.non_trainable_variables, model.optimizer.variables,
        )
    )  # fmt: skip
    metrics = [variable.value for variable in model.metrics_variables]

    def step(state: Any, data: Any) -> Any:
        logs, state = model.train_step(state, data)
        return state, logs

    return Step(step, ((trained, other, moments, metrics), (x, y)), 1)


def keras_convnet() -> Step:
    import keras

    model = keras.Sequential([
        keras.layers.Input((8, 8, 4)),
        keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.Activation("relu"),
        keras.layers.SeparableConv2D(32, 3),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dropout(0.2, seed=1),
        keras.layers.Dense(8),
    ])  # fmt: skip
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return keras_trainer(model, normal(0, 16, 8, 8, 4), integers(1, 8, 16))


def keras_transformer() -> Step:
    import keras

    tokens = keras.Input((16,), dtype="int32")
    x = keras.layers.Embedding(64, 32)(tokens)
    for _ in range(2):
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, 8)(h, h, use_causal_mask=True)
        h = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(32)(keras.layers.Dense(64, "gelu")(h))
    model = keras.Model(tokens, keras.layers.Dense(64)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-4, clipnorm=1.0), loss)
    return keras_trainer(model, integers(0, 64, 16, 16), integers(1, 64, 16, 16))


# -- mujoco and brax -----------------------------------------------------------------------------

#: A cart with two poles on a rail, and a ball that hits the floor.
SCENE = """
<mujoco>
  <option timestep="0.01" iterations="2" ls_iterations="4"/>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 .1"/>
    <body pos="0 0 1">
      <joint name="slide" type="slide" axis="1 0 0" damping="0.1"/>
      <geom type="capsule" fromto="-.1 0 0 .1 0 0" size=".05" contype="0" conaffinity="0"/>
      <body>
        <joint type="hinge" axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 0 0 .5" size=".03" contype="0" conaffinity="0"/>
        <body pos="0 0 .5">
          <joint type="hinge" axis="0 1 0"/>
          <geom type="capsule" fromto="0 0 0 0 0 .5" size=".03" contype="0" conaffinity="0"/>
        </body>
      </body>
    </body>
    <body pos="1 0 .12"><freejoint/><geom type="sphere" size=".1"/></body>
  </worldbody>
  <actuator><motor joint="slide" gear="10"/></actuator>
</mujoco>
"""


def mujoco_worlds() -> Step:
    """A step of MuJoCo's physics in many worlds at once."""
    import mujoco
    from mujoco import mjx

    model = mjx.put_model(mujoco.MjModel.from_xml_string(SCENE))

    def world(key: jax.Array) -> Any:
        data = mjx.make_data(model)
        return data.replace(qvel=0.1 * jax.random.normal(key, (model.nv,)))

    @jax.jit
    def step(worlds: Any, force: jax.Array) -> Any:
        worlds = jax.vmap(lambda data, u: mjx.step(model, data.replace(ctrl=u)))(worlds, force)
        return worlds, worlds.qpos

    worlds = jax.vmap(world)(jax.random.split(jax.random.key(0), 32))
    return Step(step, (worlds, normal(1, 32, 1)), 1)


def brax_environments() -> Step:
    """A step of an environment in many worlds, as brax trains policies on."""
    from brax import envs

    environment = envs.training.wrap(
        envs.get_environment("inverted_pendulum", backend="positional"), episode_length=10
    )

    def step(state: Any, action: jax.Array) -> Any:
        state = environment.step(state, action)
        return state, state.reward

    state = jax.jit(environment.reset)(jax.random.split(jax.random.PRNGKey(0), 32))
    return Step(step, (state, normal(1, 32, 1)), 1)


# -- penzai --------------------------------------------------------------------------------------


def penzai_transformer() -> Step:
    """A Llama of named axes with random weights; its variables are taken out and put back."""
    import optax
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=32, projection_dim=8,
        mlp_hidden_dim=64, num_decoder_blocks=2, vocab_size=64, mlp_variant="swiglu",
        tie_embedder_and_logits=False, rope_wavelength=10_000.0, rms_norm_eps=1e-6,
        attention_type=llamalike_common.AttentionTypeGlobalCausal(),
        parameter_dtype=jnp.float32, activation_dtype=jnp.float32,
    )  # fmt: skip
    model = llamalike_common.build_llamalike_transformer(config, jax.random.key(0))
    rest, parameters = pz.unbind_params(model, freeze=True)
    adam = optax.adam(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, tokens: jax.Array) -> Any:
        named = pz.nx.wrap(tokens).tag("batch", "seq")

        def loss(params: Any) -> jax.Array:
            logits = pz.bind_variables(rest, params)(
                named, token_positions=pz.nx.arange("seq", tokens.shape[1])
            )
            logits = logits.unwrap("batch", "seq", "vocabulary")[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return Step(step, (parameters, adam.init(parameters), integers(1, 64, 16, 16)), 2)


# -- gemma and tunix -----------------------------------------------------------------------------


def gemma_transformer() -> Step:
    """A small Gemma 3, with local and global layers."""
    import optax

    with empty_modules():
        from gemma import gm

    config = gm.nn.config.TransformerConfig(
        num_embed=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8, num_kv_heads=2,
        final_logit_softcap=None, use_post_attn_norm=True, use_post_ffw_norm=True, use_qk_norm=True,
        attention_types=gm.nn.config.make_attention_layers_types(
            gm.nn.config.GEMMA3_ATTENTION_PATTERN, num_layers=6
        ),
        sliding_window_size=8, transpose_gating_einsum=True, global_base_frequency=1_000_000,
    )  # fmt: skip
    model = gm.nn.Transformer(config=config, tokens="batch.tokens", dtype=jnp.float32)
    tokens = integers(0, 64, 16, 16)
    parameters = model.init(jax.random.key(0), tokens)["params"]
    adam = optax.adamw(1e-3, eps=1e-4)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, moments: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, tokens).logits[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return Step(step, (parameters, adam.init(parameters), tokens), 2)


def tunix_trainer() -> Step:
    """The step of tunix's trainer on a small Llama 3; it updates model and optimiser in place."""
    import optax
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    config = llama.ModelConfig(
        num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=64, num_heads=4, head_dim=8,
        num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    trainer = peft_trainer.PeftTrainer(
        llama.Llama3(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3, eps=1e-4),
        peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=3),
    )  # fmt: skip
    train_step = trainer.create_train_step_fn()

    def step(model: Any, optimizer: Any, inputs: Any) -> Any:
        return train_step(model, optimizer, inputs)

    size, length = 16, 16
    batch = {
        "input_tokens": integers(0, 64, size, length),
        "input_mask": jnp.ones((size, length), bool),
        "positions": jnp.broadcast_to(jnp.arange(length), (size, length)),
        "attention_mask": jnp.tril(jnp.ones((size, length, length), bool)),
    }
    jitted = nnx.jit(step, donate_argnames=("model", "optimizer"))
    return Step(jitted, (trainer.model, trainer.optimizer, batch), 0)


#: The package and the module of each step's library.
LIBRARIES = {
    "haiku_convnet": ("dm-haiku", "haiku"),
    "haiku_transformer": ("dm-haiku", "haiku"),
    "haiku_recurrent": ("dm-haiku", "haiku"),
    "jraph_network": ("jraph", "jraph"),
    "jraph_attention": ("jraph", "jraph"),
    "neural_ode": ("diffrax", "diffrax"),
    "stochastic_paths": ("diffrax", "diffrax"),
    "variational_inference": ("numpyro", "numpyro"),
    "no_u_turns": ("numpyro", "numpyro"),
    "keras_convnet": ("keras", "keras"),
    "keras_transformer": ("keras", "keras"),
    "penzai_transformer": ("penzai", "penzai"),
    "mujoco_worlds": ("mujoco-mjx", "mujoco.mjx"),
    "brax_environments": ("brax", "brax"),
    "gemma_transformer": ("gemma", "gemma"),
    "tunix_trainer": ("google-tunix", "tunix"),
}
