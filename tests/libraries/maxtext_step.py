"""MaxText's own train step: its configuration, its mesh and its logical axes."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.libraries.empty_modules import empty_modules
from tests.libraries.steps import Step

#: Llama 3.1 8B, and its form with two narrow layers.  The latter computes in float32: XLA's backend
#: for CPUs adds up some products of bfloat16 in bfloat16, depending on their layouts.
LARGE = {"model_name": "llama3.1-8b", "max_target_length": 2048, "per_device_batch_size": 1}
SMALL = {
    "model_name": "llama3.1-8b", "override_model_config": "true", "base_num_decoder_layers": 2,
    "base_emb_dim": 64, "base_mlp_dim": 128, "base_num_query_heads": 4, "base_num_kv_heads": 2,
    "head_dim": 16, "dtype": "float32", "vocab_size": 256, "max_target_length": 32, "per_device_batch_size": 2,
}  # fmt: skip
#: FSDP over eight devices, as a machine without TPUs and without Google's cloud has it.
_COMMON = {
    "attention": "dot_product", "compile_topology": "v5e-8", "compile_topology_num_slices": 1,
    "enable_checkpointing": "false", "dataset_type": "synthetic", "hardware": "cpu",
    "skip_jax_distributed_system": "true", "ici_fsdp_parallelism": 8,
}  # fmt: skip


def train_step(options: dict[str, object]) -> tuple[Step, jax.sharding.Mesh]:
    """MaxText's train step with shapes in place of arguments, and its mesh."""
    with empty_modules():
        import maxtext
        from flax.core.spmd import logical_axis_rules
        from maxtext.configs import pyconfig
        from maxtext.trainers.pre_train import train, train_compile
        from maxtext.utils import maxtext_utils, sharding

        (root,) = maxtext.__path__
        words = [f"{name}={value}" for name, value in {**_COMMON, **options}.items()]
        config = pyconfig.initialize(["", str(pathlib.Path(root, "configs/base.yml")), *words])
        mesh = jax.sharding.Mesh(
            maxtext_utils.create_device_mesh(config, jax.devices()), config.mesh_axes
        )
        arguments, _, shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
        parameters, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
        data = sharding.get_input_data_sharding(config, mesh)
        function, *_ = maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, shardings, model, config, parameters
        )

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with empty_modules(), jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    return Step(function, tuple(arguments), 1, context), mesh


def state_shardings(file: pathlib.Path, options: dict[str, object]) -> dict[str, Any]:
    """The shardings of MaxText's train state by path, with the rules of a configuration file."""
    with empty_modules():
        from maxtext.configs import pyconfig
        from maxtext.trainers.pre_train import train_compile
        from maxtext.utils import maxtext_utils

        own = {**_COMMON, **options}
        words = [f"{name}={value}" for name, value in own.items() if not name.startswith("ici_")]
        config = pyconfig.initialize(["", str(file), *words])
        mesh = jax.sharding.Mesh(
            maxtext_utils.create_device_mesh(config, jax.devices()), config.mesh_axes
        )
        arguments, _, shardings, *_ = train_compile.get_shaped_inputs(mesh, config)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arguments[0])]
    leaves = jax.tree.leaves(shardings)
    return {
        f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in zip(paths, leaves, strict=True)
    }


def random_arguments(step: Step) -> Step:
    """The step with positive random numbers as its arguments."""
    leaves, tree = jax.tree.flatten(step.arguments)
    values = [_random(jax.random.key(number), leaf) for number, leaf in enumerate(leaves)]
    return Step(step.function, jax.tree.unflatten(tree, values), step.carried, step.context)


def _random(key: jax.Array, shape: Any) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, int(np.prod(shape.shape)) or 1).reshape(shape.shape)
    if jnp.issubdtype(shape.dtype, jnp.floating):
        return jnp.abs(0.05 * jax.random.normal(key, shape.shape)).astype(shape.dtype)
    return jnp.ones(shape.shape, shape.dtype)
