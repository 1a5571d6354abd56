"""Hardware files: sourced, loaded, and clear about what is wrong."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from toast.errors import HardwareError
from toast.hardware import COLLECTIVES, Collectives, Mesh, load, names
from toast.hardware.description import SCHEDULED_ALL_TO_ALL
from toast.resources import directory

SHIPPED = {
    "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e",
    "p100", "a100", "a100-80gb", "h100", "h100-96gb-500w", "h200", "b200",
}  # fmt: skip


def test_the_shipped_devices() -> None:
    assert names() == sorted(SHIPPED)


@pytest.mark.parametrize("name", names())
def test_shipped_files_load(name: str) -> None:
    machine = load(name)
    assert machine.name == name
    assert machine.description
    assert machine.memory_limit_bytes < machine.memory_capacity_bytes
    assert {"f32"} < set(machine.flops_per_s)
    assert machine.peak("f32") == machine.flops_per_s["f32"] * machine.matmul_efficiency
    assert load(str(directory("hardware") / f"{name}.toml")) == machine


@pytest.mark.parametrize("name", names())
def test_every_figure_has_a_source_with_an_address(name: str) -> None:
    head, body = (directory("hardware") / f"{name}.toml").read_text().split("\n\n", 1)
    sources = re.findall(r"^#   \[([\w-]+)\] \S.*\n#     (https://\S+)$", head, re.MULTILINE)
    tags = {tag for tag, _ in sources}
    cited: set[str] = set()
    comments = figures = 0
    above = ""
    for line in body.splitlines():
        if line.startswith("#"):
            above += line
            continue
        if re.match(r"\w+ = [\d.[]", line):
            figures += 1
            comment = above + line.partition("#")[2]
            found = set(re.findall(r"\[([\w-]+)\]", comment))
            assert found or "Assumed" in comment, f"{line}: no source"
            assert found <= tags, f"{line}: {found - tags} is not in the list of sources"
            cited |= found
            comments += bool(comment)
        above = ""
    assert cited == tags, f"never cited: {tags - cited}"
    assert figures == comments > 10


def test_peaks_fall_back_to_float32() -> None:
    machine = load("p100")
    assert machine.peak("f64") < machine.peak("f32") < machine.peak("f16")
    assert machine.peak("bf16") == machine.peak("i32") == machine.peak("f32")


def test_attention_has_the_rate_of_products_unless_the_file_states_its_own() -> None:
    assert load("p100").attention_share == 1
    machine = load("h100")
    assert machine.attention_share == pytest.approx(0.48 / 0.745)


def test_rates_are_achievable_ones() -> None:
    machine = load("tpu-v5e")
    assert machine.interconnect.bandwidth_bytes_per_s == pytest.approx(46.6e9)
    assert machine.memory_bytes_per_s == pytest.approx(0.8 * 819e9)
    assert machine.memory_limit_bytes == 15.75 * 2**30


def test_a_tile_and_waves_of_tiles_exclude_each_other(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    text = (directory("hardware") / "h100.toml").read_text()
    path.write_text(text + "\n[tile]\nm = 128\nn = 128\nk = 32\n")
    line = text.count("\n") + 2
    with pytest.raises(HardwareError) as error:
        load(path)
    assert str(error.value) == f"{path}:{line}: [tile] and [products] are both there; remove [tile]"


PROTOCOL = """
[[protocol]]
name = "LL"
algorithm = "ring"
latency_s = 1e-6
step_latency_s = 1e-6
bandwidth_bytes_per_s = 1e9
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[[128, 256], ",
            "[[128, 256, 64], ",
            "tiles is [[128, 256, 64], [128, 128], [64, 64]]; write pairs of rows and columns, for example [[128, 256], [128, 128]]",
        ),
        ("units = 132", "units = 0", "units is 0; write a whole number from 1 to 1000000"),
        (
            "[efficiency]",
            "[[protocol]]\nname = 'LL'\n[efficiency]",
            'missing key algorithm; add it: "ring"',
        ),
        (
            "[efficiency]",
            PROTOCOL + PROTOCOL + "[efficiency]",
            "duplicate ring LL; remove it, or set another name",
        ),
        (
            "parts = [1, 4, 16, 64]",
            "parts = []",
            "parts is []; write numbers of parts, for example [1, 4]",
        ),
    ],
)
def test_bad_waves_and_protocols(old: str, new: str, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((directory("hardware") / "h100.toml").read_text().replace(old, new))
    with pytest.raises(HardwareError) as error:
        load(path)
    assert message in str(error.value)


#: A change to tpu-v5e.toml, the line (of the old text) that is reported, and the message.
BAD = {
    "unknown key": (
        "bandwidth_bytes_per_s = 819e9", "bandwith_bytes_per_s = 819e9", None,
        "unknown key bandwith_bytes_per_s; did you mean bandwidth_bytes_per_s?",
    ),
    "unknown key, nothing near": (
        "dimensions = 2", "dimensions = 2\nx = 2\n#", "wraparound_from",
        "unknown key x; known: topology, dimensions, wraparound_from, "
        "link_bandwidth_bytes_per_s, latency_s",
    ),
    "unknown top key": (
        'name = "tpu-v5e"', 'name = "tpu-v5e"\nvendor = "Google"', "description",
        "unknown key vendor; known: name, description, platform, device_kind, max_devices, power_w, product_operands, grouped_operands, recomputes_images, transcendentals_per_s, gathers_ahead, background, early_gathers, vector_products_per_s, vector_elements_per_s, integer_operations_per_s, transposed_elements_per_s, row_elements_per_s, lane_elements_per_s, rows_in_pairs, product_latency_s, kernel_latency_s",
    ),
    "power in kilowatts": (
        'name = "tpu-v5e"', 'name = "tpu-v5e"\npower_w = 0.2', "description",
        "power_w is 0.2; write watts, for example 700",
    ),
    "switch key on a torus": (
        "latency_s = 1e-6", "node_latency_s = 1e-6", None,
        "unknown key node_latency_s; did you mean latency_s?",
    ),
    "table inside a table": (
        "[memory]  #", "[memory.cache]\n[memory]  #", None,
        "unknown key cache; known: capacity_bytes, limit_bytes, bandwidth_bytes_per_s, lanes, fast_bytes, heap_gaps",
    ),
    "missing key": (
        "latency_s = 1e-6", "#", "[interconnect]", "missing key latency_s; add it: seconds, for example 1e-6",
    ),
    "missing name": ('name = "tpu-v5e"', "#", "# Sources", "missing key name; add it: a printable text"),
    "missing topology": (
        'topology = "torus"', "#", "[interconnect]", 'missing key topology; write "torus" or "switch"',
    ),
    "unknown table": (
        "[efficiency]", "[eficiency]", None, "unknown table eficiency; did you mean efficiency?",
    ),
    "missing table": ("[memory]  #", "#", "# Sources", "missing table memory; add [memory]"),
    "missing interconnect": (
        "[interconnect]  #", "#", "# Sources", "missing table interconnect; add [interconnect]",
    ),
    "no element type": ("bf16 = 197e12", "bf61 = 197e12", None, "bf61 is not an element type; write for example bf16"),
    "text for a number": ("dimensions = 2", 'dimensions = "two"', None, "dimensions is 'two'; write 2 or 3"),
    "number for a text": ('name = "tpu-v5e"', "name = 5", None, "name is 5; write a printable text"),
    "empty text": ('name = "tpu-v5e"', 'name = " "', None, "name is ' '; write a printable text"),
    "text of two lines": ('name = "tpu-v5e"', 'name = "a\\nb"', None, "name is 'a\\nb'; write a printable text"),
    "control character": (
        'name = "tpu-v5e"', 'name = "a\\u001bb"', None, "name is 'a\\x1bb'; write a printable text",
    ),
    "truth for a number": ("latency_s = 1e-6", "latency_s = true", None, "latency_s is True; write seconds, for example 1e-6"),
    "fraction for a count": (
        "wraparound_from = 16", "wraparound_from = 16.5", None, "wraparound_from is 16.5; write a whole number from 1 to 1000000",
    ),
    "negative": (
        "capacity_bytes = 17179869184", "capacity_bytes = -1", None, "capacity_bytes is -1; write bytes, for example 16e9",
    ),
    "unit forgotten": (
        "capacity_bytes = 17179869184", "capacity_bytes = 16", None, "capacity_bytes is 16; write bytes, for example 16e9",
    ),
    "not a number": (
        "bandwidth_bytes_per_s = 819e9", "bandwidth_bytes_per_s = nan", None,
        "bandwidth_bytes_per_s is nan; write bytes per second, for example 819e9",
    ),
    "infinite": ("bf16 = 197e12", "bf16 = inf", None, "bf16 is inf; write FLOP/s, for example 197e12"),
    "dimensions": ("dimensions = 2", "dimensions = 5", None, "dimensions is 5; write 2 or 3"),
    "fraction": ("matmul = 0.883", "matmul = 1.9", None, "matmul is 1.9; write a fraction from 0.001 to 1"),
    "topology": ('"torus"', '"star"', None, "topology is 'star'; write \"torus\" or \"switch\""),
    "limit": (
        "limit_bytes = 16911433728", "limit_bytes = 99e9", None, "limit_bytes exceeds capacity_bytes; lower it",
    ),
    "limit of another unit": (
        "limit_bytes = 16911433728", "limit_bytes = 1e6", None,
        "limit_bytes is less than a hundredth of capacity_bytes; check the unit; use --memory to limit a plan",
    ),
    "peak of another unit": (
        "i8 = 393e12", "i8 = 393e15", None, "i8 exceeds 10000 FLOP per byte of memory traffic; check the units of both",
    ),
    "transcendentals": (
        "transcendentals_per_s = 3.6e11", "transcendentals_per_s = 50e15", None,
        "transcendentals_per_s exceeds the peak of matrix products; check the unit",
    ),
    "lanes of another unit": (
        "lane_elements_per_s = 6.9e8", "lane_elements_per_s = 6.9e14", None,
        "lane_elements_per_s exceeds the peak of matrix products; check the unit",
    ),
    "too many devices": (
        "max_devices = 256", "max_devices = 2000000", None,
        "max_devices is 2000000; write a whole number from 1 to 1000000",
    ),
    "hundreds of digits": (
        "max_devices = 256", "max_devices = " + "7" * 400, None,
        f"max_devices is {'7' * 60}... (400 characters); write a whole number from 1 to 1000000",
    ),
    "thousands of digits": (
        "max_devices = 256", "max_devices = " + "7" * 5000, None, "a number has thousands of digits; correct the line",
    ),
    "thousands of hexadecimal digits": (
        "max_devices = 256", "max_devices = 0x" + "7" * 5000, None,
        "max_devices is a number of thousands of digits; write a whole number from 1 to 1000000",
    ),
    "link faster than memory": (
        "link_bandwidth_bytes_per_s = 50e9", "link_bandwidth_bytes_per_s = 50e12", None,
        "link_bandwidth_bytes_per_s exceeds that of the memory; check the unit",
    ),
    "compute slower than memory": (
        "[memory]  #", "bf16 = 1e9\n[memory]  #", None, "bf16 is less than the memory's bytes/s; check the unit",
    ),
    "syntax": ("dimensions = 2", "dimensions = = 2", None, "not TOML: Invalid value; correct the line"),
    "key twice": ("dimensions = 2", "dimensions = 2\ndimensions = 3", "wraparound_from", "not TOML: Cannot overwrite a value; correct the line"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_file_line_reason_and_remedy(
    case: str, tmp_path: pathlib.Path
) -> None:
    old, new, place, message = BAD[case]
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    if case == "compute slower than memory":  # no other peak is the best one
        text = re.sub(r"^(bf16|f32|i8) = .*", "", text, flags=re.MULTILINE)
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    line = text[: text.index(place or old)].count("\n") + 1
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert str(caught.value) == f"{path}:{line}: {message}"


#: The same for the first [[collective]] of h100.toml.
BAD_COLLECTIVES = {
    "unknown kind": ('kind = "all_gather"', 'kind = "gather"', None, "kind is 'gather'; write \"all_gather\", \"all_reduce\", \"reduce_scatter\" or \"all_to_all\""),
    "missing key": ('algorithm = "ring"', "#", "[[collective]]", "missing key algorithm; add it: a printable text"),
    "unknown key": ('algorithm = "ring"', 'algorithm = "ring"\nx = 1', "protocol", "unknown key x; known: kind, algorithm, protocol, latency_s, step_latency_s, memory_bandwidth_bytes_per_s, link_bandwidth_bytes_per_s"),
    "unknown algorithm": ('algorithm = "ring"', 'algorithm = "star"', None, "algorithm of all_gather is 'star'; write \"ring\" or \"recursive doubling\""),
    "another collective's": ('algorithm = "ring"', 'algorithm = "tree"', None, "algorithm of all_gather is 'tree'; write \"ring\" or \"recursive doubling\""),
    "a second one": ('protocol = "middle"', 'protocol = "low latency"', 'SECOND', "duplicate all_gather ring low latency; remove it, or set another protocol"),
    "one table": ("[[collective]]", "[collective]", None, "not TOML: "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_COLLECTIVES)
def test_bad_measurements_are_refused(case: str, tmp_path: pathlib.Path) -> None:
    old, new, place, message = BAD_COLLECTIVES[case]
    text = (directory("hardware") / "h100.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    if case == "one table":
        assert message in str(caught.value)
    else:
        at = text.rindex("[[collective]]", 0, text.index(old)) if place == "SECOND" else None
        line = text[: text.index(place or old) if at is None else at].count("\n") + 1
        assert str(caught.value) == f"{path}:{line}: {message}"


def test_measured_links_faster_than_memory(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "h100.toml").read_text()
    path = tmp_path / "mine.toml"
    last = text.rindex("link_bandwidth_bytes_per_s")
    path.write_text(text[:last] + "link_bandwidth_bytes_per_s = 1e14\n")
    line = text[:last].count("\n") + 1
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    reason = "link_bandwidth_bytes_per_s exceeds that of the memory; check the unit"
    assert str(caught.value) == f"{path}:{line}: {reason}"


def test_a_torus_has_no_measured_collectives(tmp_path: pathlib.Path) -> None:
    h100, text = ((directory("hardware") / f"{n}.toml").read_text() for n in ("h100", "tpu-v5e"))
    path = tmp_path / "mine.toml"
    path.write_text(text + h100[h100.index("[[collective]]") :])
    with pytest.raises(
        HardwareError, match="a torus cannot have measured collectives; remove them"
    ):
        load(str(path))


def test_a_value_where_a_table_belongs(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text("efficiency = 1\n" + text[: text.index("[efficiency]")])
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert str(caught.value) == f"{path}:1: missing table efficiency; add [efficiency]"


def test_no_peaks_at_all(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    text = re.sub(r"^(bf16|f32|i8) = .*\n", "", text, flags=re.MULTILINE)
    path = tmp_path / "mine.toml"
    path.write_text(text)
    line = text[: text.index("[flops_per_s]")].count("\n") + 1
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert (
        str(caught.value)
        == f"{path}:{line}: no figure for any element type; add for example bf16 = 197e12"
    )


def test_network_faster_than_memory(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "h100.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(
        text.replace(
            "network_bandwidth_bytes_per_s = 50e9", "network_bandwidth_bytes_per_s = 50e12"
        )
    )
    line = text[: text.index("network_bandwidth_bytes_per_s")].count("\n") + 1
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    reason = "network_bandwidth_bytes_per_s exceeds that of the memory; check the unit"
    assert str(caught.value) == f"{path}:{line}: {reason}"


def test_network_faster_than_links(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "h100.toml").read_text()
    path = tmp_path / "mine.toml"
    old = "network_bandwidth_bytes_per_s = 50e9"
    path.write_text(text.replace(old, "network_bandwidth_bytes_per_s = 451e9"))
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    reason = "network_bandwidth_bytes_per_s exceeds that of the links inside a node; check the unit"
    assert str(caught.value) == f"{path}:{line}: {reason}"


@pytest.mark.parametrize(
    "text", ["memory.bandwidth_bytes_per_s = 1", 'memory . "bandwidth_bytes_per_s"=1']
)
def test_dotted_and_quoted_keys_have_lines_too(text: str, tmp_path: pathlib.Path) -> None:
    shipped = (directory("hardware") / "tpu-v5e.toml").read_text()
    start, end = shipped.index("[memory]"), shipped.index("[interconnect]")
    dotted = "memory.capacity_bytes = 2e9\nmemory.limit_bytes = 1e9\n" + text + "\n\n"
    path = tmp_path / "mine.toml"
    path.write_text(dotted + shipped[:start] + shipped[end:])
    with pytest.raises(HardwareError, match=re.escape(f"{path}:3: bandwidth_bytes_per_s is 1; ")):
        load(str(path))


def test_a_file_cut_short(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ndescription = "')
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert str(caught.value).startswith(f"{path}:2: not TOML: ")
    assert str(caught.value).endswith("; correct the line")


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(HardwareError) as caught:
        load("missing.toml")
    assert (
        str(caught.value) == "missing.toml: cannot read: No such file or directory; check the path"
    )
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareError) as caught:
        load(str(path))
    assert str(caught.value) == f"{path}: cannot read: not text; check the path"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tpu_v5e", "did you mean tpu-v5e? "), ("A100", "did you mean a100? "), ("abacus", "")],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load(name)
    assert str(caught.value) == (
        f"no hardware named {name}; {hint}known: {', '.join(names())}; "
        "or use the path of a .toml file"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('topology = "torus"', "topology = [1]", "topology is [1]; write "),
        ('topology = "torus"', "topology = {a = 1}", "topology is {'a': 1}; write "),
        ("bf16 = 197e12", "bf16 = {a = 1}", "bf16 is {'a': 1}; write FLOP/s, for example 197e12"),
        ("bf16 = 197e12", '"b`[...].f" = "x"', "b`[...].f is 'x'; write FLOP/s, for example 197e12"),
        ('name = "tpu-v5e"', 'name = "x"\ncollective = [1]', "collective is not a list of tables; "),
        ('product_operands = "bf16"', "product_operands = 5", "product_operands is 5; write "),
        ("m = 8", 'm = "8"', "m is '8'; write a whole number from 1 to 1000000"),
    ],
)  # fmt: skip
def test_values_of_other_kinds(old: str, new: str, message: str, tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(HardwareError, match=re.escape(f": {message}")):
        load(str(path))


def test_only_bytes_take_collectives_time_in_schedules_of_xla() -> None:
    """Its partitioner and its scheduler assume links that small slices lack."""
    real = load("tpu-v5e")
    small, large = np.array([0.0]), np.array([1e9])
    line = Collectives(real, Mesh.parse("d=4"))
    compiled, scheduled = (
        Collectives(each, Mesh.parse("d=4"))
        for each in (real.as_compiled_for, real.as_scheduled_for)
    )
    axes, gather = np.array([1], dtype=np.uint8), COLLECTIVES.index("all_gather")
    assert scheduled.seconds(gather, small, axes) == 0 < compiled.seconds(gather, small, axes)
    assert compiled.seconds(gather, large, axes) < line.seconds(gather, large, axes)
    exchange = COLLECTIVES.index("all_to_all")
    links = real.interconnect.bandwidth_bytes_per_s
    for size in (4, 8):  # one rate on one dimension of the torus, and one on several
        every = Collectives(real.as_scheduled_for, Mesh.parse(f"a={size},b={size}"))
        for group, share in zip((1, 3), SCHEDULED_ALL_TO_ALL, strict=True):
            seconds = every.seconds(exchange, large, np.array([group], dtype=np.uint8))
            assert seconds == pytest.approx(large / (links * share))
    assert load("h100").as_scheduled_for == load("h100")


def test_groups_that_share_links_have_all_of_them_in_schedules() -> None:
    """XLA's scheduler counts the dimensions that a group spans, and two links along each."""
    for name, mesh, groups in (
        ("tpu-v5e", "data=2,fsdp=4,model=2", {1: 1, 2: 1, 3: 2, 4: 1, 5: 1, 6: 2, 7: 2}),
        ("tpu-v4", "data=2,model=8", {1: 1, 2: 2, 3: 3}),
    ):
        hardware = load(name).as_scheduled_for
        table, size = Collectives(hardware, Mesh.parse(mesh)), np.array([1e9])
        rate = 2 * hardware.interconnect.bandwidth_bytes_per_s
        for group, dimensions in groups.items():
            for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
                seconds = table.seconds(COLLECTIVES.index(kind), size, np.array([group]))
                assert seconds == pytest.approx(passes * size / (rate * dimensions))


@pytest.mark.parametrize(("mesh", "sums"), [("data=16", False), ("data=8,model=8", True)])
def test_only_slices_of_whole_cubes_gather_by_sums(mesh: str, sums: bool) -> None:
    """However XLA's partitioner and scheduler see the links."""
    real = load("tpu-v4")
    for hardware in (real, real.as_compiled_for, real.as_scheduled_for):
        assert Collectives(hardware, Mesh.parse(mesh)).gathers_by_sums.any() == sums


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), None, "x"])
def test_figures_that_divide_are_above_zero(value: Any) -> None:
    machine = load("tpu-v5e")
    with pytest.raises(HardwareError) as error:
        dataclasses.replace(machine, host_bytes_per_s=value)
    assert str(error.value) == (
        f"hardware tpu-v5e: host_bytes_per_s={value!r}: use a number above 0, or inf if there is "
        "no link"
    )
    with pytest.raises(HardwareError, match=r"memory_bytes_per_s=.*: use a number above 0$"):
        dataclasses.replace(machine, memory_bytes_per_s=value)
    assert dataclasses.replace(machine, host_bytes_per_s=float("inf")).host_bytes_per_s > 0


def test_a_link_to_the_host_without_a_rate(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "tpu-v5e.toml").read_text()
    lines = text.splitlines()
    row = next(n for n, line in enumerate(lines) if line.startswith("[host]")) + 1
    while not lines[row].startswith("bandwidth_bytes_per_s"):
        row += 1
    lines[row] = "bandwidth_bytes_per_s = 0.0"
    file = tmp_path / "own.toml"
    file.write_text("\n".join(lines))
    with pytest.raises(HardwareError) as error:
        load(file)
    assert str(error.value).startswith(
        f"{file}:{row + 1}: bandwidth_bytes_per_s is 0.0; write bytes"
    )
