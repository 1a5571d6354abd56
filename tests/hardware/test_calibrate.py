"""Collectives fitted to measured times."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pandas as pd
import pytest

from toast.errors import HardwareError
from toast.hardware import Collectives, Mesh, load
from toast.hardware.calibrate import calibrate, errors, file_text
from toast.hardware.measured_tables import COLUMNS, read_table
from toast.resources import directory

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def table(name: str = "h100", noise: float = 0.0) -> pd.DataFrame:
    """What a device would measure that is exactly as its file says, give or take."""
    random = np.random.default_rng(0)
    rows = []
    for n in (2, 4, 8):
        costs = Collectives(load(name), Mesh((("x", n),)))
        for kind in KINDS:
            for size in 2.0 ** np.arange(9, 30):
                seconds = costs.cheapest(kind, size, ["x"]).seconds(size)
                rows.append((kind, n, size, seconds * np.exp(noise * random.normal())))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def test_a_fit_finds_what_made_the_table() -> None:
    found = calibrate(load("h200"), table("h100", noise=0.03))
    worst = found.errors.groupby("size", observed=True)["mean"].max()
    assert worst["64 MB and more"] < 0.1
    assert worst["1 to 64 MB"] < 0.3
    assert {m.kind for m in found.measured} == set(KINDS)


def test_protocols_are_fitted_where_the_library_chooses_them() -> None:
    rows = table("a100-80gb", noise=0.03)
    rows = rows[rows["collective"] == "all_gather"]
    found = calibrate(load("a100-80gb"), rows)
    assert {m.protocol for m in found.measured if m.kind == "all_gather"} == {
        "LL",
        "LL128",
        "Simple",
    }
    assert found.errors["mean"].max() < 0.06


def test_the_same_table_gives_the_same_fit() -> None:
    rows = table()
    rows = rows[rows["collective"] == "reduce_scatter"]
    assert calibrate(load("h100"), rows).measured == calibrate(load("h100"), rows).measured


def test_kinds_without_rows_are_kept() -> None:
    machine, rows = load("h100"), table("h200")
    found = calibrate(machine, rows[rows["collective"] == "all_gather"])
    assert [m for m in found.measured if m.kind != "all_gather"] == [
        m for m in machine.measured if m.kind != "all_gather"
    ]


@pytest.mark.parametrize("name", ["h100", "a100", "a100-80gb"])
def test_the_shipped_fit_is_of_a_node(name: str) -> None:
    """Nothing is faster than the datasheet; all four collectives of the file are measured."""
    machine = load(name)
    assert {m.kind for m in machine.measured} == set(KINDS)
    link = machine.interconnect
    for m in machine.measured:
        assert m.link_bandwidth_bytes_per_s <= link.bandwidth_bytes_per_s / link.efficiency * 1.001


def test_files_are_written_and_read_back(tmp_path: pathlib.Path) -> None:
    rows = table("h200", noise=0.01)
    rows = rows[rows["collective"].isin(["all_gather", "all_to_all"])]
    found = calibrate(load("h100"), rows)
    path = tmp_path / "mine.toml"
    path.write_text(file_text("h100", found, "Measured here"))
    again = load(str(path))
    assert again.measured == found.measured
    assert again.flops_per_s == load("h100").flops_per_s
    assert errors(again, rows).equals(found.errors)
    basis = load("h100").collectives_basis
    assert again.collectives_basis == (
        f"Measured here (inside a node: all_gather, all_to_all); all else: {basis}"
    )
    assert again.products_basis == load("h100").products_basis
    # A second fit replaces the first.
    path.write_text(file_text(str(path), found, "Measured again"))
    assert load(str(path)) == again
    assert load(str(path)).collectives_basis == again.collectives_basis.replace("here", "again")


def test_tables_may_have_notes_and_other_columns(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("# nccl\nbytes,seconds,collective,devices,busbw\n1024,1e-5,all-gather,8,3\n\n")
    assert read_table(path).to_dict("list") == {
        "collective": ["all_gather"], "devices": [8], "bytes": [1024.0], "seconds": [1e-5],
    }  # fmt: skip


HEAD = "collective,devices,bytes,seconds\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "collective,devices,bytes\n",
            ":1: column seconds is missing; the columns are collective,",
        ),
        ("collective,devices,bytes,bytes,seconds\n", ":1: column bytes occurs twice; remove one"),
        (HEAD + "all_gather,8,1024\n", ":2: 'all_gather,8,1024' is not collective,devices,"),
        (HEAD + "all_gather,8,x,1e-5\n", ":2: 'all_gather,8,x,1e-5' is not collective,"),
        (HEAD + "gather,8,1024,1e-5\n", ":2: unknown collective gather; known: all_gather,"),
        (HEAD + "all_gather,1,1024,1e-5\n", "devices must be at least 2, and bytes and seconds"),
        (HEAD + "all_gather,8,1024,nan\n", "devices must be at least 2, and bytes and seconds"),
        (HEAD + "all_gather,8,inf,1e-5\n", "devices must be at least 2, and bytes and seconds"),
        (HEAD + "all_gather,8,1024,17\n", "17 s is implausibly slow; use seconds, not"),
        (HEAD, ": no measured times; write rows of collective,devices,bytes,seconds"),
    ],
)
def test_bad_tables(text: str, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(HardwareError) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_tables_that_cannot_be_read() -> None:
    with pytest.raises(HardwareError, match=r"missing.csv: cannot read: No such file"):
        read_table("missing.csv")


def test_tables_may_be_a_spreadsheet_s(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text(
        '"collective","devices","bytes","seconds"\n"all_gather",8,1024,1e-5\n', "utf-8-sig"
    )
    assert len(read_table(path)) == 1


def test_what_is_not_fitted_stays_as_it_stands(tmp_path: pathlib.Path) -> None:
    """Also where collectives stand before other tables, or have blanks in their brackets."""
    h100 = (directory("hardware") / "h100.toml").read_text()
    head, *blocks = h100.split("[[collective]]")
    path = tmp_path / "mine.toml"
    tables = "".join("[[ collective ]]" + block.rstrip() + "\n" for block in blocks)
    first, second = head.split("[efficiency]")
    path.write_text(f"{first}{tables}[efficiency]{second}")
    assert load(str(path)) == load("h100")
    rows = table("h200")
    found = calibrate(load(str(path)), rows[rows["collective"] == "all_reduce"])
    text = file_text(str(path), found, "Here")
    path.write_text(text)
    assert set(load(str(path)).measured) == set(found.measured)
    assert text.count("# Here: fitted") == sum(m.kind == "all_reduce" for m in found.measured)
    with pytest.raises(HardwareError, match="the source of fitted figures must be one line"):
        file_text(str(path), found, "one\ntwo")


def test_slow_links_can_be_fitted(tmp_path: pathlib.Path) -> None:
    text = (directory("hardware") / "h100.toml").read_text().split("[[collective]]")[0]
    slow = re.sub(r"((?:node|network)_bandwidth_bytes_per_s = )\S+", r"\g<1>0.125e9", text)
    path = tmp_path / "slow.toml"
    path.write_text(slow)
    rows = pd.DataFrame([("all_reduce", 8, 2.0**n, 1e-4 + 2.0**n / 1e8) for n in range(10, 24)])
    rows.columns = list(COLUMNS)
    assert calibrate(load(str(path)), rows).measured


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(HardwareError, match="tpu-v5e is a torus"):
        calibrate(load("tpu-v5e"), table())
    rows = table()
    rows["devices"] *= 8
    with pytest.raises(HardwareError, match="h100 has 8 devices per node, the table 64"):
        calibrate(load("h100"), rows)


def test_tables_of_a_faster_device_are_refused() -> None:
    with pytest.raises(HardwareError) as caught:
        calibrate(load("p100"), table("h100"))
    assert str(caught.value).startswith("no figures within the links of p100 fit ")
    assert "if the table is of another device, take the file of that device" in str(caught.value)


@pytest.mark.parametrize(("count", "said"), [(1, "1 size of"), (3, "3 sizes of")])
def test_too_few_sizes_are_refused(count: int, said: str) -> None:
    """Four figures do not follow from one number, however often it was measured."""
    rows = table()
    few = rows[(rows["collective"] == "all_gather") & (rows["bytes"] < 2.0 ** (9 + count))]
    assert len(few) == 3 * count
    with pytest.raises(HardwareError) as caught:
        calibrate(load("h100"), few)
    assert str(caught.value) == (
        f"the table has {said} all_gather, but a fit needs 4 or more, small and large; add rows, "
        "or remove those of all_gather to keep the figures of h100"
    )


def test_few_rows_are_fitted_by_one_variant() -> None:
    rows = table()
    few = rows[(rows["collective"] == "all_gather") & (rows["devices"] == 8)].iloc[::4]
    assert 4 <= len(few) < 8
    found = calibrate(load("h100"), few)
    assert len([m for m in found.measured if m.kind == "all_gather"]) == 1


@pytest.mark.parametrize("rate", ["3350.6e9", "3352.3e9", "3e12"])
def test_rounding_does_not_pass_the_datasheet(rate: str, tmp_path: pathlib.Path) -> None:
    """Links and memory of one rate, with more digits than are written: the fit is at both."""
    text = (directory("hardware") / "h100.toml").read_text().split("[[collective]]")[0]
    text = re.sub(r"(node_bandwidth_bytes_per_s = )\S+", rf"\g<1>{rate}", text)
    text = re.sub(r"(\nbandwidth_bytes_per_s = )\S+", rf"\g<1>{rate}", text)
    path = tmp_path / "fast.toml"
    path.write_text(text.replace("memory = 0.9", "memory = 1").replace("link = 0.6", "link = 1"))
    # Faster than can be: all rates end at their limits.
    rows = [("all_gather", 8, 2.0**n, 1e-6 + 2.0**n / 9e12) for n in range(10, 30)]
    found = calibrate(load(path), pd.DataFrame(rows, columns=list(COLUMNS)))
    path.write_text(file_text(str(path), found, "Here"))
    fastest = max(m.link_bandwidth_bytes_per_s for m in load(path).measured)
    assert float(rate) * 0.999 <= fastest <= float(rate)
