"""Meshes, and what their axes get from the hardware they are laid on."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax._src import mesh_utils

from toast.errors import MeshError
from toast.hardware import COLLECTIVES, Algorithm, Collectives, Hardware, Mesh, load, names
from toast.hardware.links import lay_out, slice_of

Floats = npt.NDArray[np.float64]


def test_parsing() -> None:
    mesh = Mesh.parse(" data = 4 ,model=02,one=1")
    assert mesh.axes == (("data", 4), ("model", 2), ("one", 1))
    assert mesh.names == ("data", "model", "one")
    assert mesh.sizes == (4, 2, 1)
    assert mesh.devices == 8
    assert str(mesh) == "data=4,model=2,one=1"


def test_an_order_of_devices_can_be_given() -> None:
    mesh = Mesh.parse("data=4, model=2 @ model, data")
    assert mesh.order == ("model", "data")
    assert mesh.placed == (1, 0)
    assert str(mesh) == "data=4,model=2@model,data"
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse("data=4,model=2@data,model") == Mesh.parse("data=4,model=2")
    # Two nodes of eight: the innermost axis stays in its node.
    h100 = load("h100")
    near = Collectives(h100, Mesh.parse("data=2,model=8"))
    far = Collectives(h100, Mesh.parse("data=2,model=8@model,data"))
    assert "two-level" not in near.cheapest("all_gather", 1e9, ["model"]).name
    assert "between" in far.cheapest("all_gather", 1e9, ["model"]).name
    swapped = Collectives(h100, Mesh.parse("model=8,data=2"))
    for kind in COLLECTIVES:
        for axes in (["data"], ["model"], ["data", "model"]):
            assert far.cheapest(kind, 1e9, axes) == swapped.cheapest(kind, 1e9, axes)


def test_meshes_of_jax() -> None:
    devices = np.array(jax.devices()[:8])
    names = ("data", "model")
    assert Mesh.of(jax.sharding.Mesh(devices.reshape(4, 2), names)) == Mesh.parse("data=4,model=2")
    turned = Mesh.of(jax.sharding.Mesh(devices.reshape(2, 4).T, names))
    assert turned == Mesh.parse("data=4,model=2@model,data")
    assert Mesh.of(jax.sharding.AbstractMesh((4, 2), names)) == Mesh.parse("data=4,model=2")
    # No order of axes: as JAX would have it.
    shuffled = devices[[0, 3, 1, 2, 5, 4, 7, 6]].reshape(4, 2)
    assert Mesh.of(jax.sharding.Mesh(shuffled, names)) == Mesh.parse("data=4,model=2")
    one = Mesh.of(jax.sharding.Mesh(devices.reshape(1, 8), names))
    assert one == Mesh.parse("data=1,model=8")
    twice = devices[[0, 1, 2, 3, 4, 5, 6, 0]].reshape(4, 2)
    with pytest.raises(MeshError, match=r"mesh data=4,model=2: .* is in it twice"):
        Mesh.of(jax.sharding.Mesh(twice, names))


def test_meshes_of_mappings() -> None:
    assert Mesh.of({"data": 4, "model": 2}) == Mesh.parse("data=4,model=2")
    with pytest.raises(MeshError, match="axis data has size '0'"):
        Mesh.of({"data": 0})
    with pytest.raises(MeshError, match="no axes"):
        Mesh.of({})


NINE = "a=2,b=2,c=2,d=2,e=2,f=2,g=2,h=2,i=2,one=1"
EXAMPLE = "write data=4,model=4"
LETTERS = "use letters, digits and underscores"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no axes; write axis=size, for example data=4,model=4"),
        (" ", "no axes; write axis=size, for example data=4,model=4"),
        ("data", f"'data' is not axis=size; {EXAMPLE}"),
        ("data=4,", f"'' is not axis=size; {EXAMPLE}"),
        ("data=", "axis data has size ''; write a positive number of at most 9 digits"),
        ("data=x", "axis data has size 'x'; write a positive number of at most 9 digits"),
        ("data=0", "axis data has size '0'; write a positive number of at most 9 digits"),
        ("data=-4", "axis data has size '-4'; write a positive number of at most 9 digits"),
        ("data=2.5", "axis data has size '2.5'; write a positive number of at most 9 digits"),
        ("data=٤", "axis data has size '٤'; write a positive number of at most 9 digits"),
        ("data=4=4", "axis data has size '4=4'; write a positive number of at most 9 digits"),
        ("4=4", f"'4' is not an axis name; {LETTERS}"),
        ("=4", f"'' is not an axis name; {LETTERS}"),
        ("my axis=4", f"'my axis' is not an axis name; {LETTERS}"),
        ("a=2,a=2", "axis a occurs twice; rename one"),
        (NINE, "9 axes of several devices, more than 8; merge some"),
        (
            "a=2,b=2@a",
            "the device order a does not name every axis once; use each of a,b once",
        ),
        (
            "a=2,b=2@b,b",
            "the device order b,b does not name every axis once; use each of a,b once",
        ),
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


def unlimited(name: str) -> Hardware:
    return dataclasses.replace(load(name), max_devices=10**30)


def on(name: str, mesh: str) -> Collectives:
    return Collectives(unlimited(name), Mesh.parse(mesh))


def links(name: str, mesh: str) -> list[float]:
    """Links of the torus that the devices of each axis have for an all-gather.

    On rings of even size, the time is that of all bytes; on open lines, of those of the others.
    """
    costs, rate = on(name, mesh), load(name).interconnect.bandwidth_bytes_per_s
    used = []
    for axis, size in costs.mesh.axes:
        algorithm = costs.cheapest("all_gather", 1e12, [axis])
        whole = algorithm.name == "bidirectional ring" and size % 2 == 0
        moved = 1 if whole else (size - 1) / size
        used.append(moved / algorithm.seconds_per_byte / rate)
    return used


def cross(name: str, mesh: str) -> list[float]:
    """Bytes over each link in an all-to-all, per byte that a device has."""
    costs, rate = on(name, mesh), load(name).interconnect.bandwidth_bytes_per_s
    return [
        costs.cheapest("all_to_all", 1e12, [axis]).seconds_per_byte * rate
        for axis in costs.mesh.names
    ]


def every_line(costs: Collectives) -> list[Algorithm]:
    names = costs.mesh.names
    groups = [names[:1], names[-1:], names]
    return [
        line for kind in COLLECTIVES for axes in groups for line in costs.algorithms(kind, axes)
    ]


@given(meshes(most=4), st.sampled_from(names()))
def test_every_collective_has_algorithms_on_every_group(mesh: Mesh, name: str) -> None:
    machine = unlimited(name)
    costs = Collectives(machine, mesh)
    for line in every_line(costs):
        assert line.latency_s >= 0
        assert line.seconds_per_byte >= 0
    devices = [tuple(a for a in mesh.names[:k] if dict(mesh.axes)[a] > 1) for k in range(4)]
    for axes in filter(None, devices):
        for kind in COLLECTIVES:
            assert costs.cheapest(kind, 1e9, axes).seconds(1e9) > 0


@given(meshes(most=4), st.sampled_from(names()), st.integers(0, 2**40), st.data())
def test_the_table_is_the_cheapest_algorithm(
    mesh: Mesh, name: str, size: int, data: st.DataObject
) -> None:
    costs = Collectives(unlimited(name), mesh)
    mesh = mesh.real
    chosen = np.array(data.draw(st.lists(
        st.booleans(), min_size=len(mesh.axes), max_size=len(mesh.axes)
    )))  # fmt: skip
    axes = [axis for axis, here in zip(mesh.names, chosen, strict=True) if here]
    group = np.array([sum(1 << a for a, here in enumerate(chosen) if here)])
    for number, kind in enumerate(COLLECTIVES):
        found = costs.seconds(number, np.array([float(size)]), group)
        assert found[0] == pytest.approx(costs.cheapest(kind, size, axes).seconds(size))


@given(meshes(most=4), st.sampled_from(names()), st.integers(0, 4))
def test_axes_of_one_device_change_nothing(mesh: Mesh, name: str, place: int) -> None:
    wider = Mesh((*mesh.axes[:place], ("one_more", 1), *mesh.axes[place:]))
    before, after = (Collectives(unlimited(name), m) for m in (mesh, wider))
    for kind in COLLECTIVES:
        for axes in (mesh.names[:1], mesh.names[1:], mesh.names):
            assert before.algorithms(kind, axes) == after.algorithms(kind, axes)
            assert after.algorithms(kind, (*axes, "one_more")) == after.algorithms(kind, axes)


@pytest.mark.parametrize(
    ("devices", "dimensions", "expected"),
    [(16, 2, (4, 4)), (8, 2, (2, 4)), (1, 2, (1, 1)), (16, 3, (4, 2, 2)), (4, 3, (2, 2, 1))],
)
def test_slices_are_as_cubic_as_can_be(
    devices: int, dimensions: int, expected: tuple[int, ...]
) -> None:
    assert slice_of(devices, dimensions) == expected


JAX_MESHES = [
    ("tpu-v5e", "a=8,b=2"), ("tpu-v5e", "a=2,b=8"), ("tpu-v5e", "a=128,b=2"),
    ("tpu-v5e", "a=2,b=2,c=4"), ("tpu-v5e", "a=4,b=2,c=2"), ("tpu-v5e", "a=4,b=64"),
    ("tpu-v5e", "a=16,b=4"), ("tpu-v5e", "a=2,b=8,c=4"), ("tpu-v5e", "a=6"),
    ("tpu-v5p", "a=8,b=8"), ("tpu-v5p", "a=32,b=2"), ("tpu-v5p", "a=4,b=8"), ("tpu-v5p", "a=4,b=4"),
    ("tpu-v5p", "a=2,b=2,c=2"), ("tpu-v5p", "a=8,b=1,c=3"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), JAX_MESHES)
def test_axes_lie_as_jax_lays_them(name: str, mesh: str) -> None:
    link = load(name).interconnect
    ours = lay_out(link, Mesh.parse(mesh))
    sides = slice_of(Mesh.parse(mesh).devices, link.dimensions)
    grid = np.arange(np.prod(sides)).reshape(sides)
    _, theirs = mesh_utils._create_device_mesh_for_nd_torus(
        grid, Mesh.parse(mesh).sizes, allow_split_physical_axes=True
    )
    found = np.ones_like(theirs)
    for side, segments in enumerate(ours._dimensions):
        for segment in segments:
            found[side, segment.axis] *= segment.devices
    np.testing.assert_array_equal(found, theirs)


@pytest.mark.parametrize(
    ("name", "mesh", "expected"),
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
        ("tpu-v5p", "a=4,b=4", [1, 2]),  # 4 and 2x2: not a cube
        ("tpu-v5p", "a=4,b=4,c=4", [2, 2, 2]),  # a cube
        ("tpu-v5p", "a=2,b=4,c=4", [1, 1, 1]),
        ("tpu-v5p", "a=64", [6]),
        ("tpu-v4", "a=5,b=5,c=5", [1, 1, 1]),  # no multiples of 4
        ("tpu-v4", "a=8,b=8,c=8", [2, 2, 2]),
        # Of 16x16: b has two chips of each ring of 16, a one in two of those and whole rings.
        ("tpu-v5e", "a=128,b=2", [2 / 2 + 2, 1]),
        ("tpu-v5e", "a=8,b=2", [1 / 2 + 1, 1]),  # of 4x4
        ("tpu-v5e", "a=4,b=16", [1 / 2, 1 + 1]),  # of 8x8: whole lines, and two of each other
    ],
)
def test_rings_on_a_torus(name: str, mesh: str, expected: list[float]) -> None:
    assert links(name, mesh) == pytest.approx(expected)


def test_what_the_readme_says_of_meshes() -> None:
    """Devices of each axis along each dimension of a torus, and its share of a link."""
    link = load("tpu-v5e").interconnect

    def rings(text: str, axis: str) -> list[tuple[int, bool, float]]:
        mesh = Mesh.parse(text)
        found = lay_out(link, mesh).rings([name == axis for name in mesh.names])
        return [(r.devices, r.closed, r.bandwidth / link.bandwidth_bytes_per_s) for r in found]

    assert rings("model=16", "model") == [(4, False, 1.0), (4, False, 1.0)]
    for axis in ("data", "model"):
        assert rings("data=4,model=4", axis) == [(4, False, 1.0)]
        assert rings("data=16,model=16", axis) == [(16, True, 1.0)]
    assert rings("data=2,model=8", "model") == [(4, False, 1.0), (2, False, 1.0)]
    assert rings("data=2,model=8", "data") == [(2, False, 0.5)]
    nodes = lay_out(load("h100").interconnect, Mesh.parse("a=4,b=4"))
    assert [nodes.nodes(mask) for mask in ((True, False), (False, True))] == [(2, 2), (4, 1)]


def test_products_of_axes_use_the_links_of_all() -> None:
    costs = on("tpu-v5e", "a=2,b=4,c=16")
    rate = load("tpu-v5e").interconnect.bandwidth_bytes_per_s

    def rates(*axes: str) -> float:
        n = np.prod([dict(costs.mesh.axes)[axis] for axis in axes])
        line = costs.cheapest("all_gather", 1e12, axes)
        return float((n - 1) / n / line.seconds_per_byte / rate)

    assert rates("b", "c") == pytest.approx(3)  # a line and a ring
    assert rates("a", "b") == pytest.approx(1)  # the whole of the line that they share
    assert rates("a", "b", "c") == pytest.approx(3)


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


def test_figure_9_of_gshard() -> None:
    """On a 2D torus an all-reduce hardly grows, and an all-to-all with the root of the devices."""
    devices = [256, 1024, 4096]
    size = 64e6
    costs = [on("tpu-v5e", f"x={n}") for n in devices]
    reduce, exchange = (
        np.array([c.cheapest(kind, size, ["x"]).seconds(size) for c in costs])
        for kind in ("all_reduce", "all_to_all")
    )
    np.testing.assert_allclose(reduce / reduce[0], 1, atol=0.2)
    np.testing.assert_allclose(exchange / exchange[0], np.sqrt(devices) / 16, rtol=0.05)


def test_inner_axes_fill_a_node() -> None:
    machine = dataclasses.replace(load("h100"), measured=())
    inside, outside = (
        machine.interconnect.bandwidth_bytes_per_s,
        machine.interconnect.network_bandwidth_bytes_per_s,
    )
    for mesh, rates in {
        "a=8": [inside],
        "a=2,b=4": [inside, inside],
        "a=4,b=8": [outside, inside],
        "a=2,b=4,c=2": [outside, inside, inside],
    }.items():
        costs = Collectives(machine, Mesh.parse(mesh))
        for (axis, n), rate in zip(costs.mesh.axes, rates, strict=True):
            line = costs.cheapest("all_gather", 1e12, [axis])
            assert (n - 1) / n / line.seconds_per_byte == pytest.approx(rate)
    costs = Collectives(machine, Mesh.parse("a=4,b=8"))
    assert (
        costs.cheapest("all_gather", 1, ["a"]).latency_s
        > costs.cheapest("all_gather", 1, ["b"]).latency_s
    )


def test_two_levels_beat_one_where_the_network_is_slow() -> None:
    """Inside a node everything, between nodes an eighth each."""
    costs = on("h100", "nodes=4,gpus=8")
    small = costs.cheapest("all_gather", 1e6, ["nodes", "gpus"])
    assert small.name.startswith("two-level: ring")
    large = costs.cheapest("all_gather", 1e9, ["nodes", "gpus"])
    assert large.name == "ring"  # over the ports of all devices of a node
    across = costs.cheapest("all_gather", 1e9, ["nodes"])
    assert large.seconds(1e9) < across.seconds(1e9) / 2


def test_small_collectives_take_few_steps() -> None:
    machine = dataclasses.replace(load("h100"), measured=())
    costs = Collectives(machine, Mesh.parse("a=8"))
    assert costs.cheapest("all_gather", 1e3, ["a"]).name == "recursive doubling"
    assert {a.name for a in costs.algorithms("all_reduce", ["a"])} == {
        "ring", "recursive doubling", "tree",
    }  # fmt: skip
    odd = Collectives(machine, Mesh.parse("a=6"))
    assert odd.cheapest("all_gather", 1e3, ["a"]).name == "ring"


def test_meshes_larger_than_the_system() -> None:
    with pytest.raises(MeshError) as caught:
        Collectives(load("tpu-v5e"), Mesh.parse("data=32,model=16"))
    assert str(caught.value) == (
        "mesh data=32,model=16 has 512 devices; a tpu-v5e system has at most 256; use a smaller mesh, "
        "or several slices along an axis slice"
    )


@given(meshes(most=3), st.sampled_from(["tpu-v5e", "tpu-v5p", "p100"]), st.floats(1.01, 10))
def test_faster_links_make_faster_collectives(mesh: Mesh, name: str, factor: float) -> None:
    machine = unlimited(name)
    before, after = Collectives(machine, mesh), Collectives(scaled(machine, factor), mesh)
    for one, other in zip(every_line(before), every_line(after), strict=True):
        assert other.latency_s == one.latency_s
        assert other.seconds_per_byte * factor == pytest.approx(one.seconds_per_byte)


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


def chosen(name: str, collective: str, devices: int, size: float) -> str:
    return Collectives(load(name), Mesh((("x", devices),))).cheapest(collective, size, ["x"]).name


@pytest.mark.parametrize(("devices", "first", "then"), [(2, 2**20, 2**21), (4, 2**20, 2**21)])
def test_a_library_may_not_choose_the_fastest_protocol(devices: int, first: int, then: int) -> None:
    """NCCL leaves LL for Simple between 1 and 2 MiB on A100, where LL128 would be faster."""
    assert chosen("a100-80gb", "all_gather", devices, first) == "ring, LL"
    assert chosen("a100-80gb", "all_gather", devices, then) == "ring, Simple"
    costs = Collectives(load("a100-80gb"), Mesh((("x", devices),)))
    lines = [a for a in costs.algorithms("all_gather", ["x"]) if a.name == "ring, LL"]
    assert costs.cheapest("all_gather", then, ["x"]).seconds(then) > min(
        a.seconds(then) for a in lines
    )


def test_a_protocol_that_is_never_chosen_is_not_priced() -> None:
    costs = Collectives(load("a100-80gb"), Mesh((("x", 2),)))
    assert "ring, LL128" not in {a.name for a in costs.algorithms("all_gather", ["x"])}
    assert chosen("a100-80gb", "all_gather", 8, 8 * 2**20) == "ring, LL128"


def test_two_levels_keep_the_choice_inside_a_node() -> None:
    costs = Collectives(load("a100-80gb"), Mesh.parse("x=16"))
    for size in 2.0 ** np.arange(10, 30):
        assert costs.cheapest("all_reduce", size, ["x"]).seconds(size) > 0
        inside = [a for a in costs.algorithms("all_reduce", ["x"]) if "two-level" in a.name]
        assert any(a.least_bytes <= size < a.most_bytes for a in inside)


def test_without_the_collectives_of_a_protocol_the_others_run_at_all_sizes() -> None:
    machine = load("a100-80gb")
    only = dataclasses.replace(
        machine, measured=tuple(m for m in machine.measured if m.protocol == "Simple")
    )
    (line,) = Collectives(only, Mesh.parse("x=2")).algorithms("all_gather", ["x"])
    assert (line.least_bytes, line.most_bytes) == (0, np.inf)
