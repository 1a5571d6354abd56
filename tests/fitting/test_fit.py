"""Sizes that fit: the answers are those of plans, one by one."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import toast
from tests.helpers import f32
from toast.errors import MeshError, SearchError, TargetError
from toast.fitting import FitRow, PlanRequest, RequestPlanner
from toast.fitting.requests import limited
from toast.hardware import Mesh, load
from toast.models import Model

ONCE = toast.Settings(rounds=1)
ON: dict[str, Any] = {"mesh": "data=4", "hardware": "tpu-v5e", "settings": ONCE, "uneven": 0.0}


def forward(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def arrays(batch: int) -> tuple[Any, ...]:
    return f32(batch, 512), f32(512, 2048)


def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]


def train(weights: Any, x: Any) -> Any:
    layer = toast.checkpoint(block, prevent_cse=False)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0] ** 2)

    gradient = toast.accumulate(jax.grad(loss), batch_argnums=1)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient(weights, x))


def batches(batch: int, sequence: int = 512) -> tuple[Any, ...]:
    return {"up": f32(4, 128, 512), "down": f32(4, 512, 128)}, f32(batch, sequence, 128)


@pytest.fixture(scope="module")
def table() -> toast.Fit:
    return toast.fit(
        train, batches, find="batch", sizes={"batch": 64}, microbatches=1, memory_bytes=2**26, **ON
    )  # fmt: skip


def test_the_largest_batch_without_recomputation() -> None:
    found = toast.fit(forward, arrays, sizes={"batch": 4096}, memory_bytes=2**23, **ON)
    assert found.value is not None
    assert found.largest is not None
    assert found.unit == "rows"
    limit = {**ON, "memory_bytes": 2**23}
    assert toast.plan(forward, *arrays(found.value), **limit).fits
    # The next multiple of a sixteenth of the power of two below.
    step = 2 ** (found.value.bit_length() - 1) // 16
    assert found.value % step == 0
    with pytest.raises(toast.ToastError, match="no plan") as caught:
        toast.plan(forward, *arrays(found.value + step), **limit)
    assert isinstance(caught.value, SearchError)
    assert caught.value.plan.after.peak_bytes > 2**23
    row = found.largest
    assert row.rate == row.value("batch") / row.step_seconds
    assert [r.rate for r in found.rows] == sorted((r.rate for r in found.rows), reverse=True)


@pytest.mark.parametrize("batch", [1000, 37 * 2**7 + 1])
def test_the_largest_batch_is_about_the_same_whatever_it_begins_with(batch: int) -> None:
    """Halves of some batches are odd, or not divided by the mesh; smaller ones fit all the same."""
    limit = {"memory_bytes": 15 * 2**17, **ON}
    small = toast.fit(forward, arrays, sizes={"batch": 64}, **limit).value
    found = toast.fit(forward, arrays, sizes={"batch": batch}, **limit).value
    assert small is not None
    assert found is not None
    assert found % 4 == 0
    assert abs(found - small) <= small / 16


def test_the_climb_goes_on_until_the_memory_is_full() -> None:
    """Between a batch of 7 and the largest one are 21 doublings."""

    def found(first: int) -> toast.Fit:
        return toast.fit(
            train, lambda batch: batches(batch, 1), sizes={"batch": first}, remat="full",
            microbatches=1, **{**ON, "mesh": "data=8"},
        )  # fmt: skip

    small, large = found(7), found(2**16)
    assert small.value is not None
    assert large.value is not None
    assert small.value > 7 * 2**17
    assert abs(small.value - large.value) <= large.value / 16
    for fit in (small, large):
        assert fit.value is not None
        assert fit.next_size is not None
        assert fit.value < fit.next_size <= fit.value * 17 / 16
        assert f"No plan was found that fits for batch {fit.next_size};" in " ".join(
            str(fit).split()
        )


def test_layers_are_counted_one_by_one_and_the_largest_comes_first() -> None:
    def layered(layers: int) -> tuple[Any, ...]:
        return {"up": f32(layers, 128, 512), "down": f32(layers, 512, 128)}, f32(64, 8, 128)

    options = {**ON, "mesh": "data=8", "memory_bytes": 4e6}
    values = set()
    for first in (2, 20):
        found = toast.fit(
            train, layered, find="layers", sizes={"layers": first}, remat="full", microbatches=1,
            **options,
        )  # fmt: skip
        assert found.value is not None
        assert 8 < found.value < 32
        assert found.next_size == found.value + 1
        assert "none between" not in str(found)
        assert found.best is found.largest
        layers = [row.value("layers") for row in found.rows]
        assert layers == sorted(layers, reverse=True)
        values.add(found.value)
    (value,) = values
    plans = {"remat": "full", "microbatches": 1, **options}
    assert toast.plan(train, *layered(value), **plans).fits
    with pytest.raises(toast.ToastError, match="no plan"):
        toast.plan(train, *layered(value + 1), **plans)


def test_the_end_of_the_sizes_is_said() -> None:
    first = 2**40  # which fits, as nothing grows with it
    found = toast.fit(forward, lambda rows: arrays(64), find="rows", sizes={"rows": first}, **ON)
    assert found.value == first
    assert found.next_size is None
    assert "No larger rows was tried: more may fit" in str(found)


def test_each_size_has_the_policy_that_is_best_for_it(table: toast.Fit) -> None:
    assert table.unit == "tokens"
    assert table.fits
    for row in table.rows:
        assert row.fits
        assert row.peak_bytes <= 2**26
        assert row.rate == row.value("batch") * 512 / row.step_seconds
    best, largest = table.best, table.largest
    assert best is not None
    assert largest is not None
    # The largest batch recomputes more than the fastest one.
    assert largest.value("batch") > best.value("batch")
    assert largest.policy != best.policy
    assert largest.plan is not None
    assert largest.plan.after.peak_bytes == largest.peak_bytes


def test_the_table_as_text_data_and_frame(table: toast.Fit) -> None:
    text = str(table)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Largest batch of train that fits on mesh data=4 of tpu-v5e")
    assert "tokens/s" in text
    frame = table.frame()
    assert len(frame) == len(table.rows)
    assert list(frame.columns) == [
        "batch", "sequence", "microbatches", "remat", "mesh", "devices", "step_seconds",
        "peak_bytes", "fit_probability", "tokens_per_s",
    ]  # fmt: skip
    data = json.loads(json.dumps(table.to_dict()))
    assert data["value"] == table.value
    assert [row["sizes"]["batch"] for row in data["rows"]] == list(frame["batch"])
    assert repr(table).startswith("<Fit of train: batch ")


def test_a_fixed_policy_stays_and_the_batch_is_cut() -> None:
    found = toast.fit(
        train, batches, find="batch", sizes={"batch": 16}, remat="none", memory_bytes=2**26, **ON,
    )  # fmt: skip
    assert {row.remat for row in found.rows} == {"none"}
    assert {row.microbatches for row in found.rows} == {1, 2}
    (cut,) = (row for row in found.rows if row.microbatches == 2)
    assert found.value is not None
    assert cut.value("batch") > found.value
    assert "(more in microbatches)" in " ".join(str(found).split())


def test_sizes_are_multiples_of_the_axis_and_of_the_microbatches() -> None:
    found = toast.fit(
        train, batches, find="batch", sizes={"batch": 16}, remat="full", microbatches=2,
        memory_bytes=3 * 2**24, **ON,
    )  # fmt: skip
    assert found.value is not None
    assert found.value % (4 * 2) == 0
    assert found.value & (found.value - 1)


def test_the_request_of_a_row_plans_the_row_again() -> None:
    machine, most = load("tpu-v5e"), 1.5e6

    def analysis_of(sizes: Any, policy: Any, microbatches: Any, progress: Any) -> Any:
        arguments = batches(sizes["batch"], 64)
        return toast.analyze(train, *arguments, remat=policy, microbatches=microbatches)

    planner = RequestPlanner(analysis_of, limited(machine, most), ONCE, uneven=0.0)
    request = PlanRequest((("batch", 16),), None, Mesh.parse("data=4"), remat="auto")
    row = FitRow.of(planner.joint(request), request, 16.0)
    assert row.fits
    # Without a number of microbatches, the plan of this command might have more.
    assert row.request.words == (
        "--mesh", "data=4", "--remat", "auto", "--microbatches", "1"
    )  # fmt: skip
    again = toast.plan(
        train, *batches(16, 64), memory_bytes=most, remat=row.request.remat,
        microbatches=row.request.microbatches, **ON,
    )  # fmt: skip
    assert again.microbatches == row.microbatches
    assert again.policy is not None
    assert (again.policy.preset or str(again.policy)) == row.policy
    assert again.after.step_seconds == row.step_seconds
    assert again.after.peak_bytes == row.peak_bytes
    assert again.after.fit_probability == row.fit_probability


def test_the_fewest_devices() -> None:
    options = {**ON, "memory_bytes": 2**25}
    del options["mesh"]
    found = toast.fit(forward, arrays(8192), find="devices", **options)
    assert found.value is not None
    assert found.best is found.largest
    assert found.rows[0].devices == found.value < found.rows[-1].devices
    assert toast.plan(forward, *arrays(8192), devices=found.value, **options).fits
    with pytest.raises(toast.ToastError, match="no plan"):
        toast.plan(forward, *arrays(8192), devices=found.value // 2, **options)
    assert str(found).startswith(f"Fewest devices that forward fits on: {found.value} of tpu-v5e")
    assert found.next_size == found.value // 2
    assert f"No plan was found that fits on {found.next_size} device" in str(found)


def test_nothing_fits() -> None:
    found = toast.fit(forward, arrays, sizes={"batch": 4}, memory_bytes=2**20, **ON)
    assert not found.fits
    assert found.value is None
    assert found.best is None
    assert found.nearest is not None
    assert found.nearest.value("batch") == 1
    first = " ".join(str(found).split())
    assert first.startswith("Nothing fits: no batch of forward fits on tpu-v5e (1 MiB per device)")
    assert "the smallest need found is" in first
    assert found.frame().empty


def test_a_budget_ends_the_question() -> None:
    settings = toast.Settings(rounds=1, budget=0.0)
    found = toast.fit(forward, arrays, sizes={"batch": 64}, **{**ON, "settings": settings})
    assert found.stopped == "budget"
    assert found.plans == 1
    assert found.value == 64
    assert "its budget ran out" in str(found)


def test_a_function_of_sizes_may_return_a_model() -> None:
    def build(batch: int = 64) -> Model:
        return Model("two", forward, arrays(batch))

    settings = toast.Settings(rounds=1, budget=0.0)
    found = toast.fit(build, find="batch", **{**ON, "settings": settings})
    assert found.program == "two"
    assert found.value == 64


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: toast.fit(forward, arrays, find="sequence", sizes={"batch": 4}, **ON),
         TargetError, "find='sequence': the target has no such size; use one of batch, devices"),
        (lambda: toast.fit(forward, arrays, **ON),
         TargetError, "size batch has no value; give a whole number to begin with"),
        (lambda: toast.fit(forward, arrays, sizes={"batch": 4, "rows": 4}, **ON),
         TargetError, "the function has no size rows; it has batch"),
        (lambda: toast.fit(forward, arrays(4), **ON),
         TargetError, "the arguments have one size; pass a function of it"),
        (lambda: toast.fit(forward, arrays(4), find="devices", **ON),
         MeshError, "looks for the number of devices; remove mesh and devices"),
        (lambda: toast.fit(forward, lambda batch: f32(batch, 4), sizes={"batch": 4}, **ON),
         TargetError, "return the tuple of arguments, also if there is only one"),
        (lambda: toast.fit(forward, arrays, sizes={"batch": 4}, colour="red", **ON),
         TargetError, "colour: is no option of toast.fit"),
        (lambda: toast.fit(forward, arrays, sizes={"batch": 4}, remat="auto", **ON),
         TargetError, "nothing is differentiated in it"),
    ],
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
