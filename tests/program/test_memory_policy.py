"""Memory policies: their text, their decisions, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest

from toast.errors import TargetError
from toast.program import PRESETS, Block, BlockPolicy, MemoryPolicy, Residual


def residual(name: str, kind: str = "other") -> Residual:
    return Residual(name, kind, ("f32[4]",), 16)  # type: ignore[arg-type]


LAYER = Block(
    "layer",
    (
        residual("x", "input"), residual("query", "product"), residual("scores", "batched_product"),
        residual("attention", "kernel"), residual("gate", "product"), residual("gelu"),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "layer: keep=query,gate offload=x",
        "layer: recompute=*; head: keep=* recompute=logits",
        "layer: keep=@product",
        "layer[:12]: recompute=*; layer[12:30]: keep=@product; *[30:]: keep=*",
    ],
)
def test_texts_are_read_and_written(text: str) -> None:
    assert str(MemoryPolicy.parse(text)) == text
    policy = MemoryPolicy.parse(text)
    assert MemoryPolicy.from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize(
    ("text", "keep", "recompute", "offload"),
    [
        ("none", "x query scores attention gate gelu", "", ""),
        ("full", "x", "query scores attention gate gelu", ""),
        ("minimal", "x query gate", "scores attention gelu", ""),
        ("minimal_with_context", "x query attention gate", "scores gelu", ""),
        ("save_qkv_proj", "x query", "scores attention gate gelu", ""),
        ("qkv_proj_offloaded", "x", "scores attention gate gelu", "query"),
        ("layer: keep=* recompute=g*", "x query scores attention", "gate gelu", ""),
        ("layer: keep=g* recompute=gate", "x gelu", "query scores attention gate", ""),
        ("lay*: keep=@product offload=gate", "x query", "scores attention gelu", "gate"),
        ("*: offload=x", "", "query scores attention gate gelu", "x"),
    ],
)
def test_decisions(text: str, keep: str, recompute: str, offload: str) -> None:
    (decision,) = MemoryPolicy.parse(text).resolved([LAYER]).blocks
    assert decision.keep == tuple(keep.split())
    assert decision.recompute == tuple(recompute.split())
    assert decision.offload == tuple(offload.split())


def test_the_name_of_a_block_decides_before_a_pattern() -> None:
    policy = MemoryPolicy.parse("*: recompute=*; layer: keep=query")
    assert policy.of("layer").keep == ("query",)
    assert policy.of("head").recompute == ("*",)
    assert MemoryPolicy.parse("layer: keep=query").of("head") == BlockPolicy("head", keep=("*",))


def test_runs_of_a_block_decide_differently() -> None:
    policy = MemoryPolicy.parse("*[:2]: recompute=*; layer[:4]: keep=query; *: keep=*")
    assert policy.cuts("layer") == (4,)
    assert policy.cuts("head") == (2,)
    assert policy.of("layer[:4]").keep == ("query",)
    assert policy.of("layer[4:]").keep == ("*",)
    assert policy.of("head[:2]").recompute == ("*",)
    parts = [dataclasses.replace(LAYER, name=name) for name in ("layer[:4]", "layer[4:]")]
    resolved = MemoryPolicy.parse("*: keep=*; layer[:4]: keep=query").resolved(parts)
    assert [entry.block for entry in resolved.blocks] == ["layer[:4]", "layer[4:]"]
    assert resolved.resolved(parts) == resolved
    assert resolved.cuts("layer") == (4,)
    with pytest.raises(TargetError, match=r"^remat layer\[9:\]: .*: layer has no such runs; use "):
        MemoryPolicy.parse("layer[9:]: keep=query").resolved([LAYER])


def test_resolving_twice_changes_nothing() -> None:
    for name in ("named", "minimal", "full"):
        once = MemoryPolicy.parse(name).resolved([LAYER])
        assert once.resolved([LAYER]) == once
        assert once.preset == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fulll", "remat 'fulll': neither a policy nor a preset; use auto, "),
        ("", "remat '': names no block; use auto, "),
        ("layer: keep", "remat 'layer: keep': 'keep' is not a choice; write "),
        ("layer: save=x", "remat 'layer: save=x': 'save=x' is not a choice; write "),
        ("layer: keep=a keep=b", "remat 'layer: keep=a keep=b': 'keep=b' is not a choice; write "),
        ("layer[4:4]: keep=a", "remat layer[4:4]: has no runs; write layer[:N] for the first N "),
        ("layer: keep=a offload=a", "remat layer: a occurs twice; keep, offload or recompute it"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(TargetError) as error:
        MemoryPolicy.parse(text)
    assert str(error.value).startswith(message)


def test_presets_name_their_values_once() -> None:
    for policy in PRESETS.values():
        assert len({*policy.patterns}) == len(policy.patterns)


def test_weights_stay_gathered_or_are_gathered_again() -> None:
    block = Block("layer", (*LAYER.residuals, residual("w", "input")))
    again = MemoryPolicy.parse("layer: keep=query").resolved([block])
    stays, before = again.changed([block], "gathered", ["w"])
    assert (before, stays.of("layer").gathered) == (("keep",), ("w",))
    assert stays.of("layer").keep == ("x", "query")
    for pattern in ("*", "@input"):
        everything = MemoryPolicy.parse(f"layer: keep=query recompute=* gathered={pattern}")
        assert everything.resolved([block]).of("layer").gathered == ("x", "w")
    # Other changes leave it, and the way back is to keep it as it is: an argument.
    moved, _ = stays.changed([block], "offload", ["query"])
    assert moved.of("layer").gathered == ("w",)
    assert moved.changed([block], "keep", ["query"]) == (stays, ("offload",))
    back, before = stays.changed([block], "keep", ["w"])
    assert (str(back.resolved([block])), before) == (str(again), ("gathered",))
    for policy, names, message in (
        (again, ["gate"], "gathered=gate: no argument of a block is named gate; those of layer (x"),
        (stays, ["w"], "gathered=w: the plan has w gathered already"),
        (MemoryPolicy.parse("none"), ["w"], "gathered=w: the plan has w gathered already"),
    ):
        with pytest.raises(TargetError) as error:
            policy.changed([block], "gathered", names)
        assert str(error.value).startswith(message)


def test_the_input_of_a_layer_has_a_name_of_its_own_everywhere() -> None:
    carry = dataclasses.replace(residual("x", "input"), alias="layer_input")
    block = Block("scan", (carry, *LAYER.residuals[1:]))
    assert MemoryPolicy.parse("scan: offload=layer_input").resolved([block]).of("scan").offload == (
        "x",
    )
    changed, _ = MemoryPolicy.parse("full").changed([block], "offload", ["layer_input"])
    assert changed.of("scan").offload == ("x",)
    with pytest.raises(TargetError, match="no residual is named layer_input"):
        MemoryPolicy.parse("layer: offload=layer_input").resolved([LAYER])


def test_an_argument_of_this_name_comes_before_the_input_of_a_layer() -> None:
    carry = dataclasses.replace(residual("x", "input"), alias="layer_input")
    block = Block("layer", (carry, residual("layer_input", "input"), residual("gate", "product")))
    policy = MemoryPolicy.parse("layer: offload=layer_input gathered=x").resolved([block])
    assert (policy.of("layer").offload, policy.of("layer").gathered) == (("layer_input",), ("x",))
    changed, _ = MemoryPolicy.parse("full").changed([block], "offload", ["layer_input"])
    assert changed.of("layer").offload == ("layer_input",)
