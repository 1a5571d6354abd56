"""Hardware files and meshes: sourced, checked, and clear about what is wrong."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toast.errors import HardwareError, MeshError
from toast.hardware import Mesh, axis_links, load, names
from toast.resources import directory


@pytest.mark.parametrize("name", names())
def test_shipped_files_load_and_name_the_source_of_every_figure(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert machine.memory_limit_bytes <= machine.memory_capacity_bytes
    previous = ""
    for line in (directory("hardware") / f"{name}.toml").read_text().splitlines():
        if re.match(r"\w+ = [\d.]", line):
            assert previous.startswith("# "), line
            assert re.search(r"https://|datasheet|paper|whitepaper|Assumed|XLA|As ", previous), line
        previous = line


def test_the_paper_s_devices_are_there() -> None:
    assert {"tpu-v3", "tpu-v5e", "tpu-v5p", "tpu-v6e", "a100", "h100", "h200", "p100"} <= set(
        names()
    )


def test_peaks_fall_back_to_float32() -> None:
    machine = load("p100")
    assert machine.peak("f64") < machine.peak("f32")
    assert machine.peak("i32") == machine.peak("f32")


BAD = {
    "unknown key": ("bandwidth_bytes_per_s = 819e9", "bandwith_bytes_per_s = 819e9",
                    r"unknown key bandwith_bytes_per_s; did you mean bandwidth_bytes_per_s\?"),
    "missing key": ("latency_s = 1e-6\n", "", r"missing key latency_s; add it, with its source"),
    "negative": ("capacity_bytes = 17179869184", "capacity_bytes = -1",
                 r"capacity_bytes is -1; write a positive number"),
    "text": ("dimensions = 2", 'dimensions = "two"', r"dimensions is 'two'; write a number"),
    "absurd link": ("link_bandwidth_bytes_per_s = 50e9", "link_bandwidth_bytes_per_s = 50e12",
                    r"a link faster than the device's memory; check the unit"),
    "fraction": ("matmul = 0.9", "matmul = 1.9", r"1.9 is more than all; use 0 to 1"),
    "topology": ('"torus"', '"star"', r"topology is 'star'; use torus or switch"),
    "limit": ("limit_bytes = 16911433728", "limit_bytes = 99e9", r"more than capacity_bytes"),
    "table": ("[efficiency]", "[eficiency]", r"unknown table; known"),
    "syntax": ("dimensions = 2", "dimensions = = 2", r"not TOML"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_file_and_line(case: str, tmp_path: pathlib.Path) -> None:
    old, new, message = BAD[case]
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    # A missing key is reported at its table.
    place = "[interconnect]" if case == "missing key" else old
    line = text[: text.index(place)].count("\n") + 1
    with pytest.raises(HardwareError, match=rf"mine.toml:{line}: {message}") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_unknown_hardware_is_suggested() -> None:
    with pytest.raises(HardwareError, match=r"no hardware called tpu_v5e; did you mean tpu-v5e\?"):
        load("tpu_v5e")
    with pytest.raises(HardwareError, match="cannot read: No such file"):
        load("missing.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not axis=size; write data=4,model=4"),
        ("data", "'data' is not axis=size"),
        ("data=4,", "'' is not axis=size"),
        ("data=x", "axis data has size 'x'; write a positive number"),
        ("data=0", "axis data has size '0'"),
        ("data=-4", "axis data has size '-4'"),
        ("4=data", "'4' is no axis name"),
        ("a=2,a=2", "axis a occurs twice; rename one"),
        ("a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1", "9 axes, more than 8; merge some"),
    ],
)
def test_meshes_that_do_not_parse(text: str, message: str) -> None:
    with pytest.raises(MeshError, match=re.escape(f"mesh '{text}'") + ".*" + re.escape(message)):
        Mesh.parse(text)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True), st.integers(1, 999)),
        min_size=1, max_size=8, unique_by=lambda axis: axis[0],
    )
)  # fmt: skip
def test_meshes_print_as_they_parse(axes: list[tuple[str, int]]) -> None:
    mesh = Mesh(tuple(axes))
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.devices == np.prod([size for _, size in axes], dtype=object)


def test_gpu_axes_that_leave_the_node_are_slow() -> None:
    links = axis_links(load("h100"), Mesh.parse("data=4,model=8"))
    assert links.bandwidth_bytes_per_s[0] < links.bandwidth_bytes_per_s[1]
    assert links.latency_s[0] > links.latency_s[1]
    assert not links.parallel_axes


def test_torus_axes_use_both_directions_of_a_ring() -> None:
    machine = load("tpu-v5e")
    links = axis_links(machine, Mesh.parse("data=4,model=16"))
    rate = machine.interconnect.bandwidth_bytes_per_s
    np.testing.assert_allclose(links.bandwidth_bytes_per_s, 2 * rate)
    np.testing.assert_allclose(rate, 46.6e9, rtol=1e-3)
    # All-to-all slows down with the size of the ring.
    assert (np.diff(links.all_to_all_bandwidth_bytes_per_s) < 0).all()
