"""``toast query``: tables, files, and one line for what is wrong."""

from __future__ import annotations

import csv
import json
import pathlib

import pytest
from typer.testing import CliRunner, Result

from toast.analysis import query
from toast.cli import app
from toast.resources import directory

ATTENTION = directory("facts") / "attention.lp"
EXAMPLE = "color(D,C), dim(D,V,_,Size), Size > 4096"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_example(tmp_path: pathlib.Path) -> None:
    table, data = tmp_path / "q.csv", tmp_path / "q.json"
    result = run(
        "query", "t2b", EXAMPLE, "--layers", 1, "--csv", table, "--json", data, "--rows", 3
    )
    assert result.exit_code == 0, result.output
    assert "params['embedding']:0" in result.stdout
    with table.open() as stream:
        header, *rows = csv.reader(stream)
    assert header == ["D", "C", "V", "Size"]
    assert rows[0] == ["params['embedding']:0", "params['embedding']:0", "0", "256128"]
    told = json.loads(data.read_text())
    assert told["columns"] == header
    assert told["rows"][0] == ["params['embedding']:0", "params['embedding']:0", 0, 256128]
    assert len(told["rows"]) == len(rows)
    assert f"{len(rows)} rows" in result.stdout
    assert f"{len(rows) - 3} more rows: --rows 0 prints them" in result.stderr


def test_a_file_called_minus_is_the_standard_output(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("query", ATTENTION, "color(D,C)")
    printed = run(*asked, "--csv", "-", "--json", "other.json")
    assert printed.exit_code == 0, printed.output
    header, *rows = csv.reader(printed.stdout.splitlines())
    assert header == ["D", "C"]
    assert len(rows) == len(json.loads(pathlib.Path("other.json").read_text())["rows"])
    assert f"{len(rows)} rows" in printed.stderr
    twice = run(*asked, "--csv", "-", "--json", "-")
    assert twice.exit_code == 2
    assert "two outputs are '-'" in twice.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_audits_are_listed_with_what_they_answer() -> None:
    result = run("query", "--list")
    assert result.exit_code == 0
    for name in query.audits():
        assert name in result.stdout
    assert "Conflicts (3.4) by the source line" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--list", "nosuch"], "--list takes no other arguments; remove 'nosuch'; see"),
        (["--list", "--predicates"], "--list takes no other arguments; remove '--predicates'; see"),
        (["t2b", "--predicates"], "--predicates takes no other arguments; remove 't2b'; see"),
    ],
)
def test_lists_go_alone(arguments: list[str], message: str) -> None:
    result = run("query", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"toast: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


def test_predicates_are_listed_with_their_meaning() -> None:
    result = run("query", "--predicates")
    assert result.exit_code == 0
    for part in (
        "color(Name, Color)", "dim(Name, Value, D, Size)", "collective(Op,", "--mesh",
        "32 bits",
    ):  # fmt: skip
        assert part in result.stdout


def test_an_audit_and_a_file(tmp_path: pathlib.Path) -> None:
    result = run("query", ATTENTION, "largest_colors")
    assert "4 rows" in result.stdout
    (tmp_path / "mine.lp").write_text("%! mine(Op): a product.\nmine(Op) :- op(Op,dot_general).\n")
    assert "5 rows" in run("query", ATTENTION, tmp_path / "mine.lp").stdout
    shared = run("query", ATTENTION, "N = #count { Op : mine(Op) }", "--with", tmp_path / "mine.lp")
    assert "│ 5 │" in shared.stdout


def test_yes_and_no() -> None:
    assert run("query", ATTENTION, "conflict(_,_,_)").stdout == "yes\n"
    assert run("query", ATTENTION, "without_rule(_)").stdout == "no\n"


def test_of_a_mesh_and_of_a_plan() -> None:
    mesh = run("query", ATTENTION, "idle_colors", "--mesh", "data=128")
    assert mesh.exit_code == 0, mesh.output
    assert "no axis of the mesh divides it" in mesh.stdout
    plan = run("query", "mlp", "sharding(V,D,Axis,_), argument(V,Path)", "--mesh", "data=4")
    assert plan.exit_code == 0, plan.output
    assert "data" in plan.stdout


def test_of_a_plan_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan.json"
    question = "argument(V,Path), sharding(V,D,Axis,_)"
    made = run("plan", "t2b-tiny", "--mesh", "data=2,model=2", "--json", path)
    assert made.exit_code == 0, made.output
    direct = run("query", "t2b-tiny", question, "--mesh", "data=2,model=2")
    assert run("query", path, question).stdout == direct.stdout
    assert run("query", path, question, "t2b-tiny").stdout == direct.stdout
    assert run("query", path, "mesh_axis(Axis,2)").exit_code == 0
    pin = "params['layers'][*]['gate']=P(None, 'model')"
    made = run("plan", "t2b-tiny", "--mesh", "data=2,model=2", "--pin", pin, "--json", path)
    assert made.exit_code == 0, made.output
    told = json.loads(path.read_text())
    nanos = sum(c["seconds"] for c in told["after"]["collectives"]) * 1e9
    result = run("query", path, "collectives_by_line", "--csv", tmp_path / "a.csv")
    assert result.exit_code == 0, result.output
    with (tmp_path / "a.csv").open() as stream:
        found = sum(int(row["Nanoseconds"]) for row in csv.DictReader(stream))
    assert 0 < nanos * 0.999 <= found <= nanos * 1.01
    for option, value in (("--mesh", "data=2"), ("--seed", 1)):
        refused = run("query", path, "reshards", option, value)
        assert refused.exit_code == 2
        assert f"toast: {option}: {path} is a plan with its own" in refused.stderr
    assert "No such file" in run("query", tmp_path / "none.json", "reshards").stderr


def test_cells_are_text_not_markup(tmp_path: pathlib.Path) -> None:
    assert "[bold]x[/bold]" in run("query", ATTENTION, 'X = "[bold]x[/bold]", op(0,_)').stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["color(D C)"], "query, column 9: syntax error"),
        (
            ["color(D,C), dmi(D,V,_,S)"],
            "column 13: there is no predicate dmi/4; did you mean dim/3",
        ),
        (["color(D,_), X > 1"], "unsafe variables X"),
        (["largest_colour"], "no audit named largest_colour; did you mean largest_colors?"),
        (["none.lp"], "none.lp: no such file"),
        (
            ["reshards"],
            "only a plan has collective/7; add --mesh, or use a plan file as TARGET",
        ),
        (["op(O,_)", "mlp"], "mlp: PROGRAM is only for plans; run one query"),
        (["idle_colors"], "only a mesh has"),
        (["idle_colors", "--mesh", "data=5"], "mesh axis data=5 divides no dimension"),
        (["color(D,C)", "--with", "none.lp"], "none.lp: no such file"),
        (["color(D,C)", "--hardware", "nosuch"], "--hardware: has no effect without a mesh; add"),
        (["color(D,C)", "--seed", "1"], "--seed: has no effect without a mesh; add --mesh"),
        (["color(D,C)", "--mesh", "data=2", "--hardware", "nosuch"], "nosuch"),
        (["color(D,C)", "--csv", "a", "--json", "./a"], "a: two outputs have this name"),
        (["--list"], "--list takes no other arguments; remove"),
        (["color(D,C)", "--csv", "no/such/folder.csv"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = run("query", ATTENTION, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_the_cache_can_be_turned_off(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TOAST_CACHE", "")
    assert run("query", ATTENTION, "conflict(_,_,_)", "--no-cache").exit_code == 0
    assert not list(tmp_path.iterdir())
    assert run("query", ATTENTION, "conflict(_,_,_)").exit_code == 0
    assert len(list((tmp_path / "toast" / "analysis").iterdir())) == 1
