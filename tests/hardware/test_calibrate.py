"""Collectives fitted to measured times."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pandas as pd
import pytest

from toast.errors import HardwareError
from toast.hardware import Collectives, Mesh, load
from toast.hardware.calibrate import COLUMNS, calibrate, errors, file_text, read_table
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


def test_the_same_table_gives_the_same_fit() -> None:
    assert calibrate(load("h100"), table()).measured == calibrate(load("h100"), table()).measured


def test_kinds_without_rows_are_kept() -> None:
    machine, rows = load("h100"), table("h200")
    found = calibrate(machine, rows[rows["collective"] == "all_gather"])
    assert [m for m in found.measured if m.kind != "all_gather"] == [
        m for m in machine.measured if m.kind != "all_gather"
    ]


def test_the_shipped_fit_is_of_a_node() -> None:
    """Nothing is faster than the datasheet; all four collectives of h100.toml are measured."""
    machine = load("h100")
    assert {m.kind for m in machine.measured} == set(KINDS)
    link = machine.interconnect
    for m in machine.measured:
        assert m.link_bandwidth_bytes_per_s <= link.bandwidth_bytes_per_s / link.efficiency * 1.001


def test_files_are_written_and_read_back(tmp_path: pathlib.Path) -> None:
    found = calibrate(load("h100"), table("h200", noise=0.01))
    path = tmp_path / "mine.toml"
    path.write_text(file_text("h100", found, "Measured here"))
    again = load(str(path))
    assert again.measured == found.measured
    assert again.flops_per_s == load("h100").flops_per_s
    assert errors(again, table("h200", noise=0.01)).equals(found.errors)
    # A second fit replaces the first.
    path.write_text(file_text(str(path), found, "Measured again"))
    assert load(str(path)) == again


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
        ("collective,devices,bytes\n", ":1: no column seconds; name the columns collective,"),
        (HEAD + "all_gather,8,1024\n", ":2: 'all_gather,8,1024' is no collective,devices,"),
        (HEAD + "all_gather,8,x,1e-5\n", ":2: 'all_gather,8,x,1e-5' is no collective,"),
        (HEAD + "gather,8,1024,1e-5\n", ":2: unknown collective gather; known: all_gather,"),
        (HEAD + "all_gather,1,1024,1e-5\n", "devices must be at least 2, bytes and seconds"),
        (HEAD + "all_gather,8,1024,nan\n", "devices must be at least 2, bytes and seconds"),
        (HEAD + "all_gather,8,inf,1e-5\n", "devices must be at least 2, bytes and seconds"),
        (HEAD + "all_gather,8,1024,17\n", "17 s is too slow to be true; give seconds, not the"),
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
    slow = re.sub(r"(node_bandwidth_bytes_per_s = )\S+", r"\g<1>0.125e9", text)
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
