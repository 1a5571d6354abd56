"""Meshes, and what their axes get from the hardware they are laid on."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toast.errors import MeshError
from toast.hardware import Hardware, Links, Mesh, axis_links, load, names

Floats = npt.NDArray[np.float64]


def test_parsing() -> None:
    mesh = Mesh.parse(" data = 4 ,model=02,one=1")
    assert mesh.axes == (("data", 4), ("model", 2), ("one", 1))
    assert mesh.names == ("data", "model", "one")
    assert mesh.sizes == (4, 2, 1)
    assert mesh.devices == 8
    assert str(mesh) == "data=4,model=2,one=1"


NINE = "a=1,b=1,c=1,d=1,e=1,f=1,g=1,h=1,i=1"
EXAMPLE = "write data=4,model=4"
LETTERS = "use letters, digits and underscores"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no axes; write axis=size, for example data=4,model=4"),
        (" ", "no axes; write axis=size, for example data=4,model=4"),
        ("data", f"'data' is not axis=size; {EXAMPLE}"),
        ("data=4,", f"'' is not axis=size; {EXAMPLE}"),
        ("data=", "axis data has size ''; write a positive number"),
        ("data=x", "axis data has size 'x'; write a positive number"),
        ("data=0", "axis data has size '0'; write a positive number"),
        ("data=-4", "axis data has size '-4'; write a positive number"),
        ("data=2.5", "axis data has size '2.5'; write a positive number"),
        ("data=٤", "axis data has size '٤'; write a positive number"),
        ("data=4=4", "axis data has size '4=4'; write a positive number"),
        ("4=4", f"'4' is no axis name; {LETTERS}"),
        ("=4", f"'' is no axis name; {LETTERS}"),
        ("my axis=4", f"'my axis' is no axis name; {LETTERS}"),
        ("a=2,a=2", "axis a occurs twice; rename one"),
        (NINE, "9 axes, more than 8; merge some"),
    ],
)
def test_meshes_that_do_not_parse(text: str, message: str) -> None:
    with pytest.raises(MeshError) as caught:
        Mesh.parse(text)
    where = "" if message.startswith("no axes") else text
    assert str(caught.value) == f"mesh '{where}': {message}"


def test_very_large_sizes_are_refused() -> None:
    with pytest.raises(MeshError, match="write a positive number"):
        Mesh.parse("data=" + "9" * 5000)


def test_meshes_made_by_hand_are_checked_too() -> None:
    with pytest.raises(MeshError, match="mesh 'a=0': axis a has size '0'"):
        Mesh((("a", 0),))
    with pytest.raises(MeshError, match="mesh '': no axes"):
        Mesh(())


axis_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)


@st.composite
def meshes(draw: st.DrawFn, most: int = 8) -> Mesh:
    found = draw(st.lists(axis_names, min_size=1, max_size=most, unique=True))
    return Mesh(tuple((name, draw(st.integers(1, 999))) for name in found))


@given(meshes())
def test_meshes_print_as_they_parse(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.devices == np.prod(mesh.sizes, dtype=object)


def links_of(name: str, mesh: str) -> Links:
    return axis_links(load(name), Mesh.parse(mesh))


def ring(name: str, mesh: str) -> Floats:
    """Links of the torus, or links of the node, that each axis has for a ring."""
    rate = load(name).interconnect.bandwidth_bytes_per_s
    return links_of(name, mesh).bandwidth_bytes_per_s / rate


def cross(name: str, mesh: str) -> Floats:
    """Bytes over each link in an all-to-all, per byte that a device has."""
    links, sizes = links_of(name, mesh), np.array(Mesh.parse(mesh).sizes)
    rate = load(name).interconnect.bandwidth_bytes_per_s
    return np.asarray((sizes - 1) / sizes * rate / links.all_to_all_bandwidth_bytes_per_s)


@given(meshes(), st.sampled_from(names()))
def test_links_are_those_of_a_device(mesh: Mesh, name: str) -> None:
    machine = load(name)
    links = axis_links(machine, mesh)
    most = 2 * max(machine.interconnect.dimensions, 1) * machine.interconnect.bandwidth_bytes_per_s
    for rates in (links.bandwidth_bytes_per_s, links.all_to_all_bandwidth_bytes_per_s):
        assert rates.shape == (len(mesh.axes),)
        assert rates.dtype == np.float64
        assert (rates > 0).all()
        assert (rates <= most * (1 + 1e-9)).all()
    assert links.latency_s.shape == (len(mesh.axes),)


@given(meshes(most=7), st.sampled_from(names()), st.integers(0, 7))
def test_axes_of_one_device_change_nothing(mesh: Mesh, name: str, place: int) -> None:
    wider = Mesh((*mesh.axes[:place], ("one_more", 1), *mesh.axes[place:]))
    kept = [axis for axis, found in enumerate(wider.names) if found != "one_more"]
    before, after = axis_links(load(name), mesh), axis_links(load(name), wider)
    for rates in ("bandwidth_bytes_per_s", "all_to_all_bandwidth_bytes_per_s", "latency_s"):
        np.testing.assert_array_equal(getattr(before, rates), getattr(after, rates)[kept])


@pytest.mark.parametrize(
    ("name", "mesh", "links"),
    [
        ("tpu-v5e", "a=4,b=4", [1, 1]),  # open lines
        ("tpu-v5e", "a=8,b=16", [1, 2]),  # only the longer side is closed
        ("tpu-v5e", "a=16,b=16", [2, 2]),
        ("tpu-v5e", "a=2", [1]),
        ("tpu-v5e", "a=16", [2]),  # 4x4, open
        ("tpu-v5e", "a=256", [4]),  # 16x16, closed
        ("tpu-v5e", "a=7", [1]),  # cannot be folded
        ("tpu-v5e", "a=2,b=4,c=16", [1 / 4, 1, 2]),  # a and b share an open line of 8
        ("tpu-v5e", "a=4,b=4,c=16", [2 / 4, 1, 2]),  # a goes round the ring of 16, b does not
        ("tpu-v5p", "a=4,b=4", [2, 1]),  # 2x2 and 4: not a cube
        ("tpu-v5p", "a=4,b=4,c=4", [2, 2, 2]),  # a cube
        ("tpu-v5p", "a=2,b=4,c=4", [1, 1, 1]),
        ("tpu-v5p", "a=64", [6]),
    ],
)
def test_rings_on_a_torus(name: str, mesh: str, links: list[float]) -> None:
    assert ring(name, mesh) == pytest.approx(links)
    assert links_of(name, mesh).parallel_axes


@pytest.mark.parametrize(
    ("name", "mesh", "load_per_link"),
    [
        ("tpu-v5e", "a=16,b=16", [16 / 8, 16 / 8]),  # n / 8 on a closed ring
        ("tpu-v5e", "a=4,b=8", [4 / 4, 8 / 4]),  # n / 4 on an open line
        ("tpu-v5e", "a=2,b=3", [1 / 2, 2 / 3]),  # odd: 1 * 2 pairs cross, a third each
        ("tpu-v5e", "a=256", [16 / 8]),  # the side of 16x16, not 256
        ("tpu-v5e", "a=8", [4 / 4]),  # the longer side of 4x2
        ("tpu-v5e", "a=4,b=4,c=16", [4 * 4 / 8, 4 / 4, 16 / 8]),  # four groups share the links
    ],
)
def test_all_to_all_is_limited_by_the_cut(name: str, mesh: str, load_per_link: list[float]) -> None:
    assert cross(name, mesh) == pytest.approx(load_per_link)


def crossings(n: int, closed: bool) -> int:
    """Pairs over the busiest link and direction when all send to all by a shortest way."""
    loads = np.zeros((n, 2), dtype=int)
    for start in range(n):
        for stop in range(n):
            ahead = (stop - start) % n
            right = (
                (ahead < n / 2 or (2 * ahead == n and start % 2 == 0)) if closed else stop > start
            )
            at = start
            while at != stop:
                after = (at + (1 if right else -1)) % n
                loads[at if right else after, int(right)] += 1
                at = after
    return int(loads.max())


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 12, 15])
def test_the_cut_of_an_open_line_is_its_busiest_link(n: int) -> None:
    assert cross("tpu-v5e", f"a={n},b={n}")[0] == pytest.approx(crossings(n, closed=False) / n)


@pytest.mark.parametrize("n", [16, 20, 32])
def test_the_cut_of_a_ring_is_its_busiest_link(n: int) -> None:
    assert cross("tpu-v5e", f"a={n},b={n}")[0] == pytest.approx(crossings(n, closed=True) / n)


@pytest.mark.parametrize("sizes", [range(2, 16), range(16, 64)])
def test_all_to_all_slows_down_as_a_line_grows(sizes: range) -> None:
    spent = [cross("tpu-v5e", f"a={n},b={n}")[0] for n in sizes]
    assert (np.diff(spent) >= -1e-12).all()


def test_all_to_all_of_a_whole_pod_grows_with_the_square_root() -> None:
    """Figure of GShard, section 5.3: four times the devices, twice the time."""
    assert cross("tpu-v5e", "a=1024")[0] == pytest.approx(2 * cross("tpu-v5e", "a=256")[0])


def test_inner_axes_fill_a_node() -> None:
    machine = load("h100")
    inside, outside = (
        machine.interconnect.bandwidth_bytes_per_s,
        machine.interconnect.network_bandwidth_bytes_per_s,
    )
    for mesh, rates in {
        "a=8": [inside],
        "a=16": [outside],
        "a=2,b=4": [inside, inside],
        "a=4,b=8": [outside, inside],
        "a=2,b=4,c=2": [outside, inside, inside],
        "a=8,b=2": [outside, inside],
    }.items():
        links = axis_links(machine, Mesh.parse(mesh))
        assert links.bandwidth_bytes_per_s.tolist() == rates
        assert links.all_to_all_bandwidth_bytes_per_s.tolist() == rates
        assert not links.parallel_axes
    links = links_of("h100", "a=4,b=8")
    assert links.latency_s[0] > links.latency_s[1]


@given(meshes(), st.sampled_from(["h100", "a100", "p100"]))
def test_outer_axes_of_a_switch_are_never_faster(mesh: Mesh, name: str) -> None:
    links = axis_links(load(name), mesh)
    assert (np.diff(links.bandwidth_bytes_per_s) >= 0).all()
    assert (np.diff(links.latency_s) <= 0).all()


@given(meshes(), st.sampled_from(names()), st.floats(1.01, 10))
def test_faster_links_make_faster_axes(mesh: Mesh, name: str, factor: float) -> None:
    machine = load(name)
    faster = scaled(machine, factor)
    before, after = axis_links(machine, mesh), axis_links(faster, mesh)
    np.testing.assert_allclose(after.bandwidth_bytes_per_s, factor * before.bandwidth_bytes_per_s)
    np.testing.assert_allclose(
        after.all_to_all_bandwidth_bytes_per_s, factor * before.all_to_all_bandwidth_bytes_per_s
    )


def scaled(machine: Hardware, factor: float) -> Hardware:
    link = machine.interconnect
    return dataclasses.replace(
        machine,
        interconnect=dataclasses.replace(
            link,
            bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s,
            network_bandwidth_bytes_per_s=factor * link.network_bandwidth_bytes_per_s,
        ),
    )
