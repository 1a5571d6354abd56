"""Plans in the formats of trainers: what they say is what the plan says, or they name it."""

from __future__ import annotations

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import toast
from tests.export.small_plan import plan, train_step, values
from toast.errors import PlanError
from toast.export import export_file, logical_axes
from toast.export.axis_rules import applied
from toast.export.exported_text import UNSAID
from toast.export.flax_names import flax_names
from toast.export.levanter_axes import levanter_mappings
from toast.export.logical_axes import roles_of
from toast.export.maxtext_rules import maxtext_rules
from toast.plan import read
from toast.program import Spec


def module_of(text: str) -> Any:
    module = types.ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), module.__dict__)
    return module


def first_match(rules: list[tuple[str, tuple[str, ...]]], names: tuple[str | None, ...]) -> Spec:
    """Flax's ``logical_to_mesh_axes``, in other words."""
    spec: dict[int, tuple[str, ...]] = {}
    for name, axes in rules:
        for place, own in enumerate(names):
            taken = {axis for held in spec.values() for axis in held}
            if own == name and place not in spec and not taken & {*axes}:
                spec[place] = axes
    return tuple(spec.get(place, ()) for place in range(len(names)))


def yaml_rules(text: str) -> list[tuple[str, tuple[str, ...]]]:
    rows = re.findall(r"^  - \[(\w+), \[([\w, ]*)\]\]$", text, re.MULTILINE)
    return [(name, tuple(axes.split(", ")) if axes else ()) for name, axes in rows]


def yaml_mapping(text: str, key: str) -> dict[str, tuple[str, ...]]:
    block = re.search(rf"^    {key}:\n((?:      .*\n)*)", text, re.MULTILINE)
    assert block is not None
    rows = re.findall(r"(\w+): \[([\w, ]*)\]", block[1])
    return {name: tuple(axes.split(", ")) for name, axes in rows}


def test_the_exported_plan() -> None:
    """Weights have both axes, and the batch has that of their model dimension."""
    assert plan().arguments["params['up']"] == (("data",), ("model",))
    assert plan().arguments["params['norm']"] == ((),)
    assert plan().arguments["tokens"] == (("data",), ())


def test_python_runs_the_step() -> None:
    exported = module_of(plan().export("python"))
    mesh = exported.make_mesh()
    arguments = values()
    ins = exported.in_shardings(mesh, *arguments)
    outs = exported.out_shardings(mesh, jax.eval_shape(train_step, *arguments))
    assert exported.PARAMETERS == ("params", "tokens")
    own = plan().shardings_for(mesh)
    expected = jax.jit(train_step)(*arguments)
    for exported_tree, tree, leaves in [
        (ins, own.in_shardings, arguments), (outs, own.out_shardings, expected),
    ]:  # fmt: skip
        assert jax.tree.all(jax.tree.map(
            lambda one, two, leaf: one.is_equivalent_to(two, np.ndim(leaf)),
            exported_tree, tree, leaves,
        ))  # fmt: skip
    params, loss = jax.jit(train_step, in_shardings=ins, out_shardings=outs)(*arguments)
    assert params["up"].sharding.spec == P("data", "model")
    assert np.allclose(loss, expected[1])


def test_python_names_what_does_not_fit() -> None:
    exported = module_of(plan().export("python"))
    mesh = jax.make_mesh((3, 2), ("data", "model"), devices=jax.devices()[:6])
    params, tokens = values()
    with pytest.raises(
        ValueError, match=r"params\['down'\]: dimension 1 has \d+ elements, which 3"
    ):
        exported.in_shardings(mesh, params, tokens)
    with pytest.raises(ValueError, match="takes params, tokens, not 1"):
        exported.in_shardings(mesh, params)
    with pytest.raises(ValueError, match=r"needs 4 devices, not 2"):
        exported.make_mesh(jax.devices()[:2])
    with pytest.warns(UserWarning, match=r"params\['new'\] is not in the plan"):
        exported.in_shardings(exported.make_mesh(), {**params, "new": tokens}, tokens)


def test_python_of_a_file_is_that_of_the_plan(tmp_path: Any) -> None:
    plan().to_json(tmp_path / "plan.json")
    assert export_file(read(tmp_path / "plan.json"), "python") == plan().export("python")


def test_maxtext_gives_each_argument_its_sharding() -> None:
    """But the norm, which has the name of no other array and is whole."""
    text, axes = plan().export("maxtext"), logical_axes(plan())
    assert UNSAID + "params" not in text
    assert "mesh_axes: [data, tensor]\n" in text
    assert "ici_tensor_parallelism: 2\n" in text
    rules = [(name, tuple("model" if a == "tensor" else a for a in own))
             for name, own in yaml_rules(text)]  # fmt: skip
    for argument in axes.arguments:
        names = tuple(
            "activation_embed_and_logits_batch" if role == "batch" else role
            for role in argument.roles
        )
        assert first_match(rules, names) == argument.spec, argument.path
    weights, activations = maxtext_rules(axes)
    assert [rule.name for rule in weights].count("embed") == 1
    assert applied(activations, ["activation_batch", None]) == (("data",), ())


def test_levanter_has_a_mapping_for_parameters_and_one_for_values() -> None:
    text = plan().export("levanter")
    parameters, inner = levanter_mappings(logical_axes(plan()))
    assert yaml_mapping(text, "param_mapping").items() >= {
        "embed": ("data",), "mlp": ("model",), "vocab": ("model",)}.items()  # fmt: skip
    assert yaml_mapping(text, "compute_mapping")["batch"] == ("data",)
    assert inner["batch"] == ("data",)
    assert parameters["mlp"] == ("model",)
    # The norm has the name of the model dimension, and is whole.
    assert UNSAID + "params['norm']: P() in the plan, P('data') by the rules" in text
    assert "\n#   parameter_axis_resources:\n#     " in text


def test_flax_says_every_argument() -> None:
    rules, names = flax_names(logical_axes(plan()))
    for path, spec in plan().arguments.items():
        assert tuple(rules.get(name or "", ()) for name in names[path]) == spec
    exported = module_of(plan().export("flax"))
    assert dict(exported.RULES)["mlp"] == "model"
    assert exported.NAMES["params['norm']"] == (None,)
    params, _ = values()
    assert exported.logical_specs(params, "params")["up"] == P("embed", "mlp")
    with pytest.raises(ValueError, match=r"params\['new'\] is not in the plan"):
        exported.logical_specs({"new": params["up"]}, "params")


def test_dimensions_may_be_named() -> None:
    names = {"params['u*']:1": "hidden"}
    exported = module_of(plan().export("flax", names=names))
    assert exported.NAMES["params['down']"] == ("hidden", "embed")
    for wrong, text in [
        ({"params['u']:1": "hidden"}, r"no argument matches params\['u'\]; use params\['up'\]"),
        ({"tokens:2": "hidden"}, "tokens has 2 dimensions; use a number from 0 to 1"),
        ({"tokens": "hidden"}, "write an argument with the number of a dimension"),
        ({"tokens:0": "a b"}, "use a word for the name"),
    ]:
        with pytest.raises(PlanError, match=text):
            plan().export("flax", names=wrong)


def test_names_of_values_that_the_rules_do_not_say() -> None:
    """An op with another sharding than most is counted, and the largest are shown."""
    axes = logical_axes(plan())
    assert 0 <= len(axes.other_values) < axes.inner_count
    for value in axes.other_values:
        assert value.spec != value.expected


@pytest.mark.parametrize(("to", "options", "text"), [
    ("maxtxt", {}, "no such format; did you mean maxtext"),
    ("python", {"names": {"tokens:0": "b"}}, "no logical axes to name"),
    ("flax", {"rename": {"model": "tensor"}}, "mesh axes of the plan"),
    ("maxtext", {"rename": {"tensor": "model"}}, "the mesh has no such axis; use data, model"),
    ("maxtext", {"rename": {"model": "wide"}}, "MaxText has no mesh axis wide"),
    ("maxtext", {"rename": {"model": "data"}}, "two axes of the mesh would be MaxText's data"),
])  # fmt: skip
def test_wrong_options(to: str, options: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan().export(to, **options)


def test_a_program_without_names_of_maxtext() -> None:
    f32 = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    pin = toast.Constraints(pin={"a": "P('data')"})
    other = toast.plan(
        lambda a, b: a @ b, f32, f32, mesh="data=2", hardware="tpu-v5e", constraints=pin
    )
    for to in ("maxtext", "levanter"):
        with pytest.raises(PlanError, match='name some, as in --name "a:0=embed"'):
            other.export(to)
    names = {"a:0": "embed", "b:1": "mlp"}
    assert "[embed, [data]]" in other.export("maxtext", names=names)
    whole = toast.Constraints(pin=dict.fromkeys(("a", "b", "result"), "P()"))
    other = toast.plan(
        lambda a, b: a @ b, f32, f32, mesh="data=2", hardware="h100", constraints=whole
    )
    assert "\nlogical_axis_rules: []\n" in other.export("maxtext", names=names)


@pytest.mark.parametrize(("path", "shape", "roles"), [
    ("params['layers'][*]['wq']", (8, 4, 2), ("embed_attn", "q_heads", "kv")),
    ("params['layers']['wq']", (2, 8, 4, 2), ("layers", "embed_attn", "q_heads", "kv")),
    ("state[0].mu['layers']['wq']", (2, 8, 4, 2), ("layers", "embed_attn", "q_heads", "kv")),
    ("params['layers'][0][0]['gate']", (2, 8, 16), ("layers", "embed", "mlp")),
    ("params['layers'][0][0]['wq']", (2, 8, 4, 2), ("layers", "embed_attn", "q_heads", "kv")),
    ("params['layers'][3]['wq']", (8, 4, 2, 2), ("embed_attn", "q_heads", "query_group", "kv")),
    ("params['layers'][3]['moe']['gate']", (4, 8, 16), ("exp", "embed_moe", "mlp_moe")),
    ("model.experts[1].wo.weight", (8, 16), ("embed", "mlp")),
    ("model.embed_tokens.weight", (32, 8), ("vocab", "embed_vocab")),
    ("q", (8, 4, 2), (None, None, None)),
    ("params['params']['decoder']['layers']['mlp']['wi_0']['kernel']", (8, 2, 16),
     ("embed", "layers", "mlp")),
    ("params['params']['decoder']['layers']['self_attention']['out']['kernel']", (4, 3, 2, 8),
     ("heads", "layers", "kv", "embed_attn")),
    ("params['params']['decoder']['decoder_norm']['scale']", (8,), ("norm",)),
    ("model.layers[0].mlp.up_proj.weight", (16, 8), ("mlp", "embed")),
    ("model.up.kernel.value", (8, 16), ("embed", "mlp")),
    ("params['layers'][3]['expert_down']", (4, 16, 8), ("exp", "mlp_moe", "embed_moe")),
    ("params['layers'][3]['MoeBlock_0']['gate']['kernel']", (8, 4), ("embed_router", None)),
    ("params['head']['bias']", (8,), (None,)),
    ("x", (8, 16), ("batch", None)),
])  # fmt: skip
def test_names_of_parameters(path: str, shape: tuple[int, ...], roles: Any) -> None:
    assert roles_of(path.replace("[*]", "[0]"), shape, "f32") == roles


def test_names_cannot_break_out_of_the_file() -> None:
    """A key of a tree is text in the exported module, whatever it has."""
    key = '"""\nraise SystemExit\n#'

    def step(params: Any) -> Any:
        return params[key] * 2

    own = toast.plan(
        step, {key: jax.ShapeDtypeStruct((8,), jnp.float32)}, mesh="data=2", hardware="tpu-v5e"
    )
    for to in ("python", "flax"):
        module_of(own.export(to))


def test_exports_name_the_memory_policy_and_the_microbatches() -> None:
    """They have shardings alone; MaxText's configuration has both."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = toast.checkpoint(lambda y, w: jnp.tanh(y @ w), name="layer")
        gradient = jax.value_and_grad(lambda w, x: (layer(x, w) ** 2).mean())
        return toast.accumulate(gradient, batch_argnums=1)(w, x)[1]

    shapes = (jax.ShapeDtypeStruct(size, "float32") for size in ((64, 64), (256, 64)))
    cut = toast.plan(step, *shapes, mesh="data=4", hardware="tpu-v5e", remat="full", microbatches=2)
    python = cut.export("python")
    assert "with the memory policy full and in 2 microbatches" in " ".join(python.split()[:40])
    compile(python, "plan.py", "exec")
    lines = cut.to_maxtext().splitlines()
    assert lines[:2] == ["remat_policy: full", "gradient_accumulation_steps: 2"]
    assert "per_device_batch_size" in lines[2]
    assert "memory policy" not in plan().export("python")
