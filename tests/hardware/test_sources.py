"""What the figures of hardware files stand on."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest

import toast
from tests.helpers import f32, mlp, printed
from toast import report
from toast.errors import HardwareError
from toast.hardware import Mesh, load, names
from toast.hardware.sources import ASSUMED, figure_sources
from toast.report import hardware_tables
from toast.report.price_basis import basis_lines, energy_text, most_joules, price_basis

FILE = """\
# Sources.
#   [sheet] Data sheet
#     https://example.com/sheet

name = "mine"
max_devices = 4  # Assumed: one box

[flops_per_s]
bf16 = 1e12  # [sheet] 1 TFLOPS

[efficiency]
# [sheet] sustained; the rest is assumed.
matmul = 0.5
memory = 0.9  # [other] not in the list
vector = 0.5  # Measured on a node of ours

[[collective]]
seconds = 1e-6  # [sheet]
"""


def test_figures_cite_the_sources_of_their_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    found = figure_sources(path)
    (source,) = found.sources
    assert (source.tag, source.title) == ("sheet", "Data sheet")
    assert source.address == "https://example.com/sheet"
    assert found.of(("flops_per_s", "bf16")) == "sheet"
    assert found.of(("flops_per_s", "bf16"), ("efficiency", "matmul")) == "sheet, assumed"
    assert found.of(("", "max_devices")) == ASSUMED
    assert found.of(("efficiency", "memory")) == ""
    assert found.of(("flops_per_s", "bf16"), ("efficiency", "vector")) == "sheet, measured"
    assert found.of(("collective", "seconds")) == "sheet"


@pytest.mark.parametrize("name", names())
def test_every_figure_of_a_shipped_file_stands_on_something(name: str) -> None:
    found = figure_sources(name)
    assert found.sources
    for figure in (("memory", "bandwidth_bytes_per_s"), ("efficiency", "matmul")):
        assert found.of(figure)


def test_collectives_cite_their_sources_by_kind(tmp_path: pathlib.Path) -> None:
    entry = '\n[[collective]]  # [sheet]\nkind = "{}"\nlatency_s = 1e-6  # {}\n'
    path = tmp_path / "mine.toml"
    path.write_text(
        FILE + entry.format("all_gather", "[sheet]") + entry.format("all_reduce", "Assumed")
        + entry.format("all_gather", "Measured here")
    )  # fmt: skip
    found = figure_sources(path)
    assert found.of(("collective.all_gather", "latency_s")) == "sheet, measured"
    assert found.of(("collective.all_reduce", "latency_s")) == ASSUMED
    assert found.of(("collective.reduce_scatter", "latency_s")) == ""


@pytest.mark.parametrize("name", names())
def test_plans_for_gpus_say_what_their_prices_stand_on(name: str) -> None:
    machine = load(name)
    gpu = machine.platform == "cuda"
    assert bool(machine.products_basis) == bool(machine.collectives_basis) == gpu
    assert (machine.power_w is not None) == gpu  # Google states none for TPUs
    lines = price_basis(machine)
    assert [line.partition(":")[0] for line in lines] == (
        ["Prices of products", "Prices of collectives"] if gpu else []
    )
    borrowed = name in ("b200", "h200", "p100")
    assert ("8 H100" in machine.collectives_basis) >= borrowed
    assert ("stands behind them" in machine.collectives_basis) == borrowed


def test_the_energy_of_a_step_is_bounded_by_the_power_of_all_devices() -> None:
    plan = toast.plan(
        mlp, f32(64, 32), f32(32, 64), f32(64, 32), mesh="data=4", hardware="h100",
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    joules = most_joules(plan)
    assert joules == pytest.approx(4 * 700 * plan.after.step_seconds)
    assert re.fullmatch(
        r"Energy of a step: at most [\d.]+ m?J \(4 x 700 W by the datasheet\), without hosts and "
        "switches",
        energy_text(plan),
    )
    assert basis_lines(plan)[-1] == energy_text(plan)
    shown = printed(report.plan_tables(plan))
    assert "Prices of collectives: NCCL on one node of 8 H100" in shown
    assert "Energy of a step: at most" in shown
    page = report.html_text(plan)
    assert page.count('<p class="note">Prices of') == 2
    assert '<p class="note">Energy of a step: at most' in page
    unknown = dataclasses.replace(plan.hardware, power_w=None, products_basis="")
    assert most_joules(dataclasses.replace(plan, hardware=unknown)) is None
    assert [line[:21] for line in price_basis(unknown)] == ["Prices of collectives"]


def test_the_table_of_collectives_says_what_its_times_stand_on() -> None:
    def rows(name: str, mesh: str) -> dict[tuple[str, str], str]:
        table = hardware_tables(load(name), Mesh.parse(mesh), figure_sources(name))
        lines = [line for line in printed(table).splitlines() if line.startswith("│")]
        cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
        return {(row[0], row[1]): row[-1] for row in cells if len(row) == 6 and row[0]}

    found = rows("b200", "a=4,b=4")
    assert found["all_gather", "b"] == "nccl, tuner, assumed"
    assert found["all_gather", "a, b"] == "nccl, tuner, assumed, basepod"
    assert found["all_to_all", "a, b"] == "dgx-b200, nccl, assumed, basepod"
    assert found["collective_permute", "b"] == "dgx-b200, nccl, assumed"
    found = rows("tpu-v5e", "dcn=2,b=4")
    assert found["all_reduce", "dcn"] == "tables, v6e, xla"
    assert found["all_reduce", "b"] == "v5e, hops, xla"
    assert found["all_reduce", "dcn, b"] == "tables, v6e, xla, v5e, hops"


def test_an_unknown_device_has_no_sources() -> None:
    with pytest.raises(HardwareError, match="no hardware named h1000; did you mean h100"):
        figure_sources("h1000")
