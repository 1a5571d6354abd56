"""Slices that a network joins: their axis, prices, meshes and devices."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

import toast
from tests.apply.test_meshes import Granule
from tests.helpers import f32, mlp
from toast.apply.device_meshes import device_grid
from toast.errors import HardwareError, MeshError
from toast.hardware import COLLECTIVES, Collectives, Mesh, load, meshes_of
from toast.hardware.network_axes import network_of
from toast.plan import network_notes
from toast.plan.files import hardware_digest
from toast.resources import directory

V5E = load("tpu-v5e")
RATE = V5E.networks[0].bandwidth_bytes_per_s
SIZE = float(2**26)


def seconds(kind: str, mesh: str, *axes: str, hardware: Any = V5E) -> float:
    return Collectives(hardware, Mesh.parse(mesh)).cheapest(kind, SIZE, axes).seconds(SIZE)


def edited(tmp_path: pathlib.Path, *edits: tuple[str, str], name: str = "tpu-v5e") -> pathlib.Path:
    text = (directory("hardware") / f"{name}.toml").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return path


def test_axes_inside_slices_cost_what_they_cost_in_one() -> None:
    for kind in COLLECTIVES:
        for axes in (("x",), ("y",), ("x", "y")):
            assert seconds(kind, "slice=4,x=4,y=4", *axes) == seconds(kind, "x=4,y=4", *axes)


def test_bytes_over_the_network() -> None:
    """The part of a device goes over the network; the rest moves inside the slice."""
    latency = V5E.networks[0].latency_s
    alone = seconds("all_reduce", "slice=2,x=4,y=4", "slice")
    assert alone == pytest.approx(2 * latency + SIZE / RATE)
    whole = seconds("all_reduce", "slice=2,x=4,y=4", "slice", "x", "y")
    inside = sum(seconds(kind, "x=4,y=4", "x", "y") for kind in ("reduce_scatter", "all_gather"))
    assert whole == pytest.approx(inside + 2 * latency + SIZE / 16 / RATE)
    # Half of the data of a device has its goal in the other slice.
    assert seconds("all_to_all", "slice=2,x=4,y=4", "slice", "x", "y") == pytest.approx(
        latency + SIZE / 2 / RATE, rel=0.01
    )
    assert seconds("collective_permute", "slice=2,x=4", "slice", "x") == pytest.approx(
        latency + SIZE / RATE
    )
    for kind in COLLECTIVES:
        assert seconds(kind, "slice=4", "slice") > seconds(kind, "x=4", "x")


def test_networks_of_networks_and_of_switches(tmp_path: pathlib.Path) -> None:
    more = (
        '\n[[network]]\naxis = "{}"\nmax_slices = 4\nbandwidth_bytes_per_s = {}\nlatency_s = 1e-4\n'
    )
    path = edited(tmp_path, name="h100")
    path.write_text(path.read_text() + more.format("hall", "6e9") + more.format("site", "1e9"))
    machine = load(path)
    mesh = "site=2,hall=2,node=2,gpu=8"
    for kind in COLLECTIVES:
        inside = seconds(kind, "node=2,gpu=8", "node", "gpu", hardware=machine)
        hall = seconds(kind, mesh, "hall", "node", "gpu", hardware=machine)
        site = seconds(kind, mesh, "site", "hall", "node", "gpu", hardware=machine)
        assert inside < hall < site
    assert hardware_digest(machine) != hardware_digest(load("h100"))


@pytest.mark.parametrize("name", ["dcn", "dcn_data", "dcn_data_parallelism", "replica_dcn"])
def test_axes_named_after_the_data_centre_network_go_over_it(name: str) -> None:
    for kind in COLLECTIVES:
        for axes in (("slice",), ("slice", "x"), ("x", "y")):
            own = [name if axis == "slice" else axis for axis in axes]
            found = seconds(kind, f"{name}=4,x=4,y=4", *own)
            assert found == seconds(kind, "slice=4,x=4,y=4", *axes)


def test_several_axes_over_one_network_are_its_slices() -> None:
    mesh = "dcn_data=2,dcn_fsdp=4,x=4,y=4"
    for kind in COLLECTIVES:
        both = seconds(kind, mesh, "dcn_data", "dcn_fsdp", "x")
        assert both == seconds(kind, "slice=8,x=4,y=4", "slice", "x")
        assert seconds(kind, mesh, "dcn_fsdp") == seconds(kind, "slice=4,x=4,y=4", "slice")


def test_data_centre_axes_go_over_the_outermost_network(tmp_path: pathlib.Path) -> None:
    more = (
        '\n[[network]]\naxis = "dcn_site"\nmax_slices = 4\n'
        "bandwidth_bytes_per_s = 2e8\nlatency_s = 1e-3\n"
    )
    path = edited(tmp_path)
    path.write_text(path.read_text() + more)
    machine = load(path)
    for axis, network in (("slice", "slice"), ("dcn_site", "dcn_site"), ("dcn", "dcn_site")):
        found = network_of(machine, axis)
        assert found is not None
        assert found.axis == network
    assert network_of(machine, "adcn") is None
    assert network_of(machine, "data") is None


@pytest.mark.parametrize(
    ("hardware", "mesh", "axes"),
    [
        ("tpu-v4", "dcn=2,x=4", "axis dcn has"),
        ("tpu-v3", "slice=2,x=4", "axis slice has"),
        ("tpu-v4", "dcn_data=2,dcn_fsdp=2,x=4", "axes dcn_data, dcn_fsdp have"),
        ("h100", "dcn=2,x=4", "axis dcn has"),
        ("h100", "dcn=2,x=8", ""),  # between nodes
        ("tpu-v4", "dcn=1,x=4", ""),
        ("tpu-v4", "data=2,x=4", ""),
        ("tpu-v5e", "dcn=2,x=4", ""),
    ],
)
def test_a_note_says_that_a_network_is_missing(hardware: str, mesh: str, axes: str) -> None:
    notes = network_notes(load(hardware), Mesh.parse(mesh))
    if not axes:
        assert notes == []
        return
    (note,) = notes
    assert note.startswith(
        f"{hardware} has no [[network]] of this name, so {axes} the price of links"
    )


def test_plans_have_the_note_of_a_missing_network() -> None:
    plan = toast.plan(
        mlp, f32(64, 32), f32(32, 64), f32(64, 32), mesh="dcn=2,model=2", hardware="tpu-v4",
        settings=toast.Settings(rounds=1),
    )  # fmt: skip
    assert "tpu-v4 has no [[network]] of this name, so axis dcn has" in plan.note


def test_meshes_beyond_a_slice_have_an_axis_over_slices() -> None:
    one, two = meshes_of(256, V5E), meshes_of(512, V5E)
    assert [mesh.axes for mesh in two] == [(("slice", 2), *mesh.axes) for mesh in one]
    assert meshes_of(768, V5E)[0].axes[0] == ("slice", 3)
    assert math.prod(meshes_of(600, V5E)[0].sizes) == 600
    for wrong, message in ((257, "no slices of equal sizes"), (10**6, "has at most 16384")):
        with pytest.raises(MeshError, match=message):
            meshes_of(wrong, V5E)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("x=4,slice=2", "axis slice joins slices of tpu-v5e, so it must be the first axis"),
        ("slice=2,x=4@x,slice", "must be the first axis"),
        ("x=4,dcn=2", "axis dcn joins slices of tpu-v5e, so it must be the first axis"),
        (
            "dcn_a=8,dcn_b=16,x=4",
            "axes dcn_a, dcn_b of 128 slices; a tpu-v5e system has at most 64",
        ),
        ("slice=65,x=4", "axis slice of 65 slices; a tpu-v5e system has at most 64"),
        ("slice=2,x=512", "has slices of 512 devices; .* at most 256; use a smaller mesh"),
        ("x=512", "has 512 devices; .* at most 256; use .*, or several slices along an axis slice"),
    ],
)
def test_meshes_that_cannot_be(mesh: str, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Collectives(V5E, Mesh.parse(mesh))
    Collectives(load("h100"), Mesh.parse("x=4,slice=2"))  # no network has this name


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (('axis = "slice"', 'axis = "my slice"'), r"toml:\d+: axis is 'my slice'; write the name of"),
        (("max_slices = 64", "max_slices = 0"), r"toml:\d+: max_slices is 0"),
        (("bandwidth_bytes_per_s = 1.23e9", "bandwidth_bytes_per_s = 1.23e12"), "that of the memory"),
        (("latency_s = 410e-6", 'latency_s = 410e-6\nnodes = 3'), r"unknown key nodes"),
        (("latency_s = 410e-6", 'latency_s = 410e-6\n[[network]]\naxis = "slice"\nmax_slices = 2\n'
          "bandwidth_bytes_per_s = 1e9\nlatency_s = 1e-4"), r"axis slice occurs twice"),
    ],
)  # fmt: skip
def test_wrong_tables(edit: tuple[str, str], message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(HardwareError, match=message):
        load(edited(tmp_path, edit))


def test_plans_keep_large_arrays_inside_slices() -> None:
    plan = toast.plan(
        mlp, f32(4096, 1024), f32(1024, 8192), f32(8192, 1024), mesh="slice=2,data=2,model=2",
        hardware="tpu-v5e", settings=toast.Settings(rounds=1),
    )  # fmt: skip
    assert not any("slice" in transfer.axes for transfer in plan.transfers)
    assert np.isfinite(
        plan.jit()(np.ones((4096, 1024)), np.ones((1024, 8192)), np.ones((8192, 1024)))
    ).all()


@pytest.mark.parametrize(("mesh", "inner", "outer"), [
    ("slice=2,data=2,model=2", (1, 2, 2), (2, 1, 1)), ("slice=2,hall=2,model=2", (1, 1, 2), (2, 2, 1)),
])  # fmt: skip
def test_devices_are_laid_out_as_by_jax(mesh: str, inner: Any, outer: Any) -> None:
    granules = [Granule(device, math.prod(outer)) for device in reversed(jax.devices()[:8])]
    grid = device_grid(Mesh.parse(mesh), granules)
    assert (grid == mesh_utils.create_hybrid_device_mesh(inner, outer, granules)).all()
    slices = np.vectorize(lambda granule: granule.slice_index)(grid)
    assert (slices == slices[..., :1]).all()
    assert len({*slices[..., 0].flat}) == math.prod(outer)
