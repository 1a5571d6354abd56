"""``--trip-count``: in plans, in the files of plans, and in later commands."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from tests.cli.test_cli import run
from tests.helpers import f32

OPTIONS = ("--mesh", "d=4")


@pytest.fixture
def loop(tmp_path: pathlib.Path) -> pathlib.Path:
    def until_small(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: jnp.abs(y).max() > 1, lambda y: y @ w, x)

    path = tmp_path / "loop.mlir"
    path.write_text(jax.jit(until_small).lower(f32(32, 32), f32(4096, 32)).as_text())
    return path


def test_stated_iterations_are_kept_with_the_plan(
    loop: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    saved = tmp_path / "plan.json"
    once = run("plan", loop, *OPTIONS)
    assert once.output.count("trip count unknown: loop 0") == 1
    assert "--trip-count" in once.output
    often = run("plan", loop, *OPTIONS, "--trip-count", "0=50", "--json", saved)
    assert often.exit_code == 0, often.output
    assert "trip count unknown" not in often.output
    assert json.loads(saved.read_text())["origin"]["trip_counts"] == {"0": 50}
    explained = run("explain", saved, "--argument", "x")
    again = explained if explained.exit_code == 0 else run("explain", saved, "--argument", "arg1")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "--trip-count 3: write PLACE=N, such as model.py:12=100"),
        ("a.py:1=many", "--trip-count a.py:1=many: write PLACE=N"),
        ("7=3", "trip_counts 7: loop has no loop there whose trip count is unknown; these are 0"),
    ],
)
def test_errors_are_one_line(loop: pathlib.Path, text: str, message: str) -> None:
    result = run("plan", loop, *OPTIONS, "--trip-count", text)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
