"""A frontend and a backend from outside, each a class of a few lines."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import toast
from toast import api, cli, ports
from toast.errors import PlanError, TargetError
from toast.program import Builder, Program, Shardings, TensorType


class Products:
    """Chains of matrix products, as JSON: ``[8, 4, 2]`` is f32[8,4] times f32[4,2]."""

    name = "products"
    suffixes = frozenset({".products"})
    takes_arguments = False
    cacheable = False

    def accepts(self, target: Any) -> bool:
        return isinstance(target, str | pathlib.Path) and pathlib.Path(target).suffix == ".products"

    def program(self, target: Any, *arguments: Any, **options: Any) -> Program:
        path = pathlib.Path(target)
        sizes = json.loads(path.read_text())
        builder, types = Builder(), [TensorType(pair, "f32") for pair in itertools.pairwise(sizes)]
        factors = [builder.add("argument", (), (type_,))[0] for type_ in types]
        product = factors[0]
        contraction = (
            ("lhs_batching_dimensions", ()), ("lhs_contracting_dimensions", (1,)),
            ("rhs_batching_dimensions", ()), ("rhs_contracting_dimensions", (0,)),
        )  # fmt: skip
        for factor in factors[1:]:
            shape = (sizes[0], builder.type(factor).shape[1])
            (product,) = builder.add(
                "dot_general", (product, factor), (TensorType(shape, "f32"),), contraction
            )
        builder.add("return", (product,), ())
        names = [f"factor{i}" for i in range(len(factors))]
        return builder.build(path.stem, names, ["product"], [-1])


class Numpy:
    """Runs such products on one machine, shard by shard, along the rows of the first factor."""

    name = "numpy"

    def build(self, program: Program, shardings: Shardings, **options: Any) -> Any:
        rows = shardings.of(program, program.argument_values[0])[0]
        shards = int(np.prod([dict(shardings.mesh.axes)[axis] for axis in rows], dtype=int))

        def run(first: Any, *factors: Any) -> Any:
            parts = np.split(first, shards)
            return np.concatenate([np.linalg.multi_dot([part, *factors]) for part in parts])

        run.shards = shards  # type: ignore[attr-defined]
        return run


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_FRONTENDS", [*ports._FRONTENDS])
    monkeypatch.setattr(ports, "_BACKENDS", {**ports._BACKENDS})
    ports.register_frontend(Products())
    ports.register_backend("numpy", Numpy())


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "chain.products"
    path.write_text("[65536, 64, 32, 16]")
    return path


@pytest.mark.usefixtures("registered")
def test_a_frontend_and_a_backend_from_outside(file: pathlib.Path) -> None:
    plan = toast.plan(file, mesh="data=4", hardware="tpu-v5e")
    assert plan.arguments["factor0"] == (("data",), ())
    run = plan.build("numpy")
    assert run.shards == 4
    random = np.random.default_rng(0)
    factors = [random.random(shape) for shape in ((65536, 64), (64, 32), (32, 16))]
    np.testing.assert_allclose(run(*factors), np.linalg.multi_dot(factors))


@pytest.mark.usefixtures("registered")
def test_the_command_line_reads_it_too(file: pathlib.Path) -> None:
    result = CliRunner().invoke(cli.app, ["analyze", str(file)])
    assert result.exit_code == 0, result.output
    with pytest.raises(TargetError, match="donate: has no effect for a target of type PosixPath"):
        api.program_of(file, donate=0)


def test_backends_are_named(file: pathlib.Path) -> None:
    assert {"jax", "stablehlo"} <= set(ports._BACKENDS)
    with pytest.raises(PlanError, match=r"there is no backend tofu; use one of .*stablehlo"):
        ports.backend("tofu")


def test_a_fact_base_cannot_be_run_by_the_backends_of_modules(
    registered: None, file: pathlib.Path
) -> None:
    plan = toast.plan(file, mesh="data=4", hardware="tpu-v5e")
    with pytest.raises(PlanError, match="has no program to annotate or run"):
        plan.jit()
