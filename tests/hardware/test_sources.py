"""What the figures of hardware files stand on."""

from __future__ import annotations

import pathlib

import pytest

from toast.errors import HardwareError
from toast.hardware import names
from toast.hardware.sources import ASSUMED, figure_sources

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


def test_an_unknown_device_has_no_sources() -> None:
    with pytest.raises(HardwareError, match="no hardware named h1000; did you mean h100"):
        figure_sources("h1000")
