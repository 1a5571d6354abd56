"""PyTorch modules and train steps as programs."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import numpy as np
import pytest

import toast
from tests.docs.blocks import ROOT
from tests.pytorch import need_pytorch
from toast import api
from toast.errors import TargetError
from toast.frontend.torch import TrainStep
from toast.targets import load

need_pytorch()

import torch

from tests.frontend import torch_samples as samples
from toast.frontend.torch_environment import jax_type

SAMPLES = pathlib.Path(samples.__file__).relative_to(ROOT)
X = torch.zeros(2, 4)


def tokens(seed: int = 0) -> Any:
    return torch.randint(16, (32,), generator=torch.Generator().manual_seed(seed))


def as_jax(tensor: Any) -> np.ndarray:
    return tensor.detach().numpy().astype(jax_type(tensor).dtype)


def test_names_are_those_of_the_module() -> None:
    model = samples.Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    program = api.program_of(TrainStep(model, samples.loss, optimizer), tokens(), tokens())
    assert program.name == "Tagger"
    assert program.arguments == (
        "embed.weight", "frozen", "norm.bias", "norm.weight",
        "norm.num_batches_tracked", "norm.running_mean", "norm.running_var", "plain", "scale",
        "optimizer.embed.weight.momentum_buffer", "optimizer.norm.bias.momentum_buffer",
        "optimizer.norm.weight.momentum_buffer", "tokens", "tags",
    )  # fmt: skip
    # Every array that the step takes and returns is updated in place.
    assert program.results == (*program.arguments[:-2], "loss")
    assert program.aliases == (*range(12), -1)
    assert program.source.calling.tied == {"head.weight": "embed.weight"}
    assert program.source.calling.owners["norm.running_mean"] == "BatchNorm1d"


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: torch.optim.Adam(
        [{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.1}]
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_program_computes_what_pytorch_does(optimizer: str) -> None:
    torch.manual_seed(0)
    model = samples.Tagger()
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    step = TrainStep(model, samples.loss, made)
    step(tokens(), tokens(1))  # optimizers make their states in the first step
    plan = toast.plan(
        step, tokens(2), tokens(3), mesh="data=2", hardware="tpu-v5e",
        constraints=toast.Constraints(pin={"tokens": jax.P("data"), "embed.weight": jax.P(None)}),
    )  # fmt: skip
    parameters = {name: as_jax(p) for name, p in model.named_parameters()}
    buffers = {name: as_jax(b) for name, b in model.named_buffers()}
    buffers["plain"] = as_jax(model.plain)
    names = {id(p): name for name, p in model.named_parameters()}
    states = {
        f"optimizer.{names[id(p)]}.{key}": as_jax(value)
        for p, state in made.state.items() for key, value in state.items()
        if value is not None and f"optimizer.{names[id(p)]}.{key}" in plan.arguments
    }  # fmt: skip
    run = plan.jit(jax.devices()[:2])
    new, new_buffers, _, value = run(
        parameters, buffers, states, as_jax(tokens(2)), as_jax(tokens(3))
    )
    assert float(step(tokens(2), tokens(3))) == pytest.approx(float(value), rel=1e-5)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(as_jax(parameter), new[name], atol=2e-5, err_msg=name)
    # torchax leaves running statistics as they are.
    for name in ("scale", "norm.num_batches_tracked"):
        np.testing.assert_allclose(as_jax(model.get_buffer(name)), new_buffers[name])


def test_meta_modules_and_forward_passes() -> None:
    with torch.device("meta"):
        model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        program = api.program_of(model, src=torch.empty(2, 3, 8))
    assert program.arguments[-2:] == ("self_attn.out_proj.weight", "src")
    assert set(program.arguments[:-1]) == {name for name, _ in model.named_parameters()}
    assert program.results == ("result",)


def test_inputs_are_trees_with_static_leaves() -> None:
    def loss(model: Any, batch: Any, weight: Any, *, scale: float) -> Any:
        return (model(batch["x"][0]) * weight).sum() * scale

    step = TrainStep(samples.Linear(), loss)
    shape = jax.ShapeDtypeStruct((2, 4), np.float32)
    program = api.program_of(step, {"x": [shape, None]}, X.numpy(), scale=2.0)
    # The module has a tensor named weight, too.
    assert program.arguments == ("bias", "weight", "batch['x'][0]", "batch.weight")
    assert program.results == ("bias.grad", "weight.grad", "loss")


def test_dropout_draws_from_a_fixed_key() -> None:
    one, two, still = (
        api.program_of(TrainStep(samples.Tagger(dropout), samples.loss), tokens(), tokens())
        for dropout in (0.5, 0.5, 0.0)
    )
    assert one.digest == two.digest
    assert len(one.ops) > len(still.ops)
    assert one.arguments == still.arguments


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported_programs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    exported = torch.export.export(model, (X,))
    program = api.program_of(exported)
    assert program.arguments == ("0.weight", "0.bias", "2.weight", "2.bias", "input")
    with pytest.raises(TargetError, match=r"arguments of a torch\.export program"):
        api.program_of(exported, X)


def test_explanations_name_the_users_lines() -> None:
    program = api.program_of(TrainStep(samples.Tagger(), samples.loss), tokens(), tokens())
    places = {program.location(n).shown_file for n in range(len(program.ops))}
    assert str(SAMPLES) in places
    assert not [place for place in places if "torchax" in place or "torch/nn" in place]


def test_a_policy_for_memory() -> None:
    model = torch.nn.Sequential(*(samples.Linear(torch.tanh) for _ in range(4)))
    step = TrainStep(model, lambda model, x: model(x).square().sum())
    full = api.program_of(step, X, remat="full")
    assert len(full.ops) > len(api.program_of(step, X).ops)


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program = load("tests.frontend.torch_samples:tagger")
    assert (program.name, program.arguments[-1]) == ("tagger", "tags")


def branch_line() -> int:
    lines = pathlib.Path(samples.__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if "# BRANCH" in line)


GLOBAL = torch.ones(4)
DEPENDS = (
    "depends on the values of a tensor (data-dependent control flow or shape), and one program "
    "must serve all values; use torch.where or a fixed size"
)


def test_control_flow_that_depends_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(TargetError) as caught:
        api.program_of(samples.Gated(), X)
    assert str(caught.value) == (f"Gated: layers.1 (Gate) at {SAMPLES}:{branch_line()} {DEPENDS}")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda y: y[y > 0], DEPENDS), (lambda y: y * int(y[0, 0]), DEPENDS),
        (lambda y: y * GLOBAL, "uses a tensor that is neither a parameter, a buffer nor an arg"),
        (lambda y: y.reshape(3), "cannot be traced: TypeError: cannot reshape"),
    ],
    ids=["mask", "number", "global", "shape"],
)  # fmt: skip
def test_modules_that_cannot_be_traced(call: Any, text: str) -> None:
    with pytest.raises(TargetError) as caught:
        api.program_of(samples.Linear(call), X)
    message = str(caught.value)
    assert message.startswith("Linear: Linear at ")
    assert "test_torch.py:" in message
    assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (lambda y: y, "a tensor of shape (2, 4)"), (lambda y: None, "NoneType"),
        (lambda y: (y.sum(), y), "tuple"),
    ],
    ids=["tensor", "nothing", "tuple"],
)  # fmt: skip
def test_losses_are_scalars(result: Any, what: str) -> None:
    with pytest.raises(TargetError) as caught:
        api.program_of(TrainStep(samples.Linear(), lambda model, x: result(model(x))), X)
    assert str(caught.value) == (
        f"Linear: the loss is {what}, not a scalar; return one number, such as loss.mean()"
    )


def test_invalid_steps() -> None:
    model = samples.Linear()
    with pytest.raises(TargetError, match=r"a int is not a torch\.nn\.Module"):
        TrainStep(3, samples.loss)
    with pytest.raises(TargetError, match="a str is not a function"):
        TrainStep(model, "mse")  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"is not a torch\.optim\.Optimizer"):
        TrainStep(model, samples.loss, 0.1)
    with pytest.raises(TargetError, match="a parameter that the model does not have"):
        TrainStep(model, samples.loss, torch.optim.SGD(samples.Linear().parameters()))
    with pytest.raises(TargetError, match="donate=1: use positions of arguments of the batch"):
        api.program_of(model, X, donate=1)
    step = TrainStep(model, lambda m, x: m(x).sum(), torch.optim.Adafactor(model.parameters()))
    with pytest.raises(TargetError, match="the step of Adafactor cannot be traced"):
        api.program_of(step, X)


def test_lazy_modules_have_no_shapes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyLinear(8))
    for target in (model, TrainStep(model, lambda model, x: model(x).sum())):
        with pytest.raises(TargetError, match=r"1\.weight has no shape yet .* run the module once"):
            api.program_of(target, X)
    model(X)
    assert "1.weight" in api.program_of(model, X).arguments


def test_functions_of_jax_take_no_tensors() -> None:
    with pytest.raises(TargetError, match=r"<lambda>: .* torch\.Tensor; pass an nn\.Module \(or"):
        api.program_of(lambda batch: batch["x"] @ batch["x"].T, {"x": X})


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TargetError, match=r"pip install 'toast-partitioner\[torch\]'"):
        TrainStep(3, samples.loss)
