"""``toast diff``, ``apply`` and ``explain`` of plans: real output, clear errors, exit codes."""

from __future__ import annotations

import json
import pathlib

import jsonschema
import pytest

from tests.cli.test_cli import run
from toast.plan import schema


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Plans of two sizes of one model, and one with a pin."""
    path = tmp_path_factory.mktemp("plans")
    for name, options in {
        "a": (), "b": ("--pin", "params['layers'][*]['wq']=P('model', None)"),
    }.items():  # fmt: skip
        done = run(
            "plan", "t2b", "--layers", 1, "--mesh", "data=4,model=4", *options,
            "--json", path / f"{name}.json",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
    return path


def test_plans_say_what_they_were_made_from(folder: pathlib.Path) -> None:
    data = json.loads((folder / "a.json").read_text())
    jsonschema.validate(data, schema())
    assert data["origin"] == {
        "target": "t2b", "sizes": {"layers": 1}, "shapes": [], "rules": [], "hardware": "tpu-v5e",
        "donate": [], "platform": "", "trip_counts": {},
    }  # fmt: skip


def test_sources_without_a_report_are_an_error(folder: pathlib.Path) -> None:
    done = run("apply", folder / "a.json", "t2b", "--layers", 1, "--sources", folder)
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "toast: --sources quotes source lines in a report; add --report FILE"
    ]


def test_diff(folder: pathlib.Path) -> None:
    same = run("diff", folder / "a.json", folder / "a.json")
    assert same.exit_code == 0, same.output
    assert "are the same" in " ".join(same.stdout.split())
    target = folder / "diff.json"
    found = run("diff", folder / "a.json", folder / "b.json", "--json", target)
    assert found.exit_code == 1
    for part in ("Settings", "pin params['layers'][*]['wq']", "Arguments", "Predicted"):
        assert part in found.stdout
    data = json.loads(target.read_text())
    assert data["same"] is False
    assert {c["what"] for c in data["settings"]} == {"pin params['layers'][*]['wq']"}


def test_apply_to_the_same_and_to_more_layers(folder: pathlib.Path) -> None:
    target, annotated = folder / "again.json", folder / "again.mlir"
    same = run("apply", folder / "b.json", "t2b", "--layers", 1, "--json", target, "-o", annotated)
    assert same.exit_code == 0, same.output
    assert "note" not in same.stderr
    first, again = (json.loads((folder / f).read_text()) for f in ("b.json", "again.json"))
    jsonschema.validate(again, schema())
    assert again["after"] == first["after"]
    assert again["arguments"] == first["arguments"]
    assert again["applied"]["same_program"] is True
    assert "sdy.mesh" in annotated.read_text()
    more = run("apply", folder / "a.json", "t2b", "--layers", 2)
    assert more.exit_code == 0, more.output
    assert "note: the plan is for another program " in more.stderr
    for part in ("by group", "in the plan", "step time", "peak memory"):
        assert part in more.stdout
    other = run("apply", folder / "a.json", "t2b", "--layers", 1, "--mesh", "data=2,model=2")
    assert other.exit_code == 0, other.output
    assert "note: the plan is for mesh data=4,model=4" in other.stderr


def test_reports_of_plans_that_do_not_say_what_they_were_made_from(folder: pathlib.Path) -> None:
    data = json.loads((folder / "a.json").read_text())
    plan, page = folder / "python.json", folder / "python.html"
    plan.write_text(json.dumps({**data, "origin": None}))
    bare = run("report", plan, "-o", page)
    assert bare.exit_code == 2
    assert "the file does not record its TARGET; add TARGET after the file name" in bare.stderr
    assert not page.exists()
    named = run("report", plan, "t2b", "--layers", 1, "-o", page)
    assert named.exit_code == 0, named.output
    assert "note" not in named.stderr
    assert page.exists()
    wrong = run("report", "t2b", "mlp", "--mesh", "data=4", "-o", page)
    assert wrong.exit_code == 2
    assert "mlp: PROGRAM is only for plans; report on one TARGET at a time" in wrong.stderr


def test_explain_a_plan(folder: pathlib.Path) -> None:
    target = folder / "explained.json"
    shown = run(
        "explain", folder / "a.json", "--argument", "tokens", "--collective", 1, "--json", target
    )
    assert shown.exit_code == 0, shown.output
    for part in ("Mesh axes of tokens", "action of", "Collective 1:", "to sharding", "why"):
        assert part in shown.stdout, part
    argument, collective = json.loads(target.read_text())["explained"]
    assert argument["argument"] == "tokens"
    assert collective["number"] == 1
    (folder / "a.plan").write_text((folder / "a.json").read_text())
    listed = run("explain", folder / "a.plan", "--collective", "all")
    assert "Collectives, by decreasing time" in listed.stdout
    why = run("explain", folder / "a.json", "--why-not", "tokens=P(None, 'data')", "--budget", 1)
    assert why.exit_code == 0, why.output
    for part in ("tokens = P(None, 'data') instead of P(", "Pinned, rest of the plan"):
        assert part in why.stdout
    kept = run(
        "explain", folder / "a.json", "--why-not", "tokens=P(None, 'data')", "--budget", 0,
        "-o", folder / "kept.json",
    )  # fmt: skip
    assert kept.exit_code == 0, kept.output
    data = json.loads((folder / "kept.json").read_text())
    jsonschema.validate(data, schema())
    assert data["arguments"]["tokens"]["sharding"] == [[], ["data"]]
    assert data["origin"]["target"] == "t2b"
    lonely = run("explain", folder / "a.json", "--argument", "tokens", "-o", folder / "no.json")
    assert lonely.exit_code == 2
    assert "add --why-not" in lonely.stderr
    several = run("explain", folder / "a.json", "--why-not", "params.*.wq=P('data')", "--budget", 0)
    assert several.exit_code == 0, several.output
    assert "params.*.wq = P('data') instead of" in " ".join(several.stdout.split())
    group = run("explain", folder / "b.json", "--argument", "params['layers'][*]['wq']")
    assert group.exit_code == 0, group.output
    cannot = run("explain", folder / "a.json", "--why-not", "tokens=P('data', 'data')")
    assert cannot.exit_code == 0
    assert "impossible: pin tokens=P('data', 'data')" in " ".join(cannot.stdout.split())


def test_a_plan_that_costs_something_else_now(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As with other rules, or another version: said on the terminal, and in the page."""
    data = json.loads((folder / "a.json").read_text())
    data["after"]["step_seconds"] *= 2
    plan, page = tmp_path / "old.json", tmp_path / "old.html"
    plan.write_text(json.dumps(data))
    said = "the prices of the plan have changed: step"
    asked = run("explain", plan, "--collective", 1)
    assert asked.exit_code == 0, asked.output
    assert said in asked.stderr
    shown = run("report", plan, "-o", page)
    assert shown.exit_code == 0, shown.output
    assert said in shown.stderr
    assert said in page.read_text()
    both = run("explain", plan, "--argument", "params['embedding']", "--collective", "all")
    assert both.exit_code == 0, both.output


def test_another_target_for_a_plan(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    data = json.loads((folder / "a.json").read_text())
    (tmp_path / "none.json").write_text(json.dumps({**data, "origin": None}))
    failed = run("explain", tmp_path / "none.json", "--argument", "tokens")
    assert failed.exit_code == 2
    assert "the file does not record its TARGET; add TARGET after the file name" in failed.stderr
    shown = run("explain", tmp_path / "none.json", "t2b", "--layers", 2, "--argument", "tokens")
    assert shown.exit_code == 0, shown.output
    assert "the plan is for another program" in shown.stderr


def test_bad_input_is_one_line(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    newer = json.loads((folder / "a.json").read_text())
    newer["version"] = 99
    (tmp_path / "newer.json").write_text(json.dumps(newer))
    (tmp_path / "bad.json").write_text("{")
    plan = folder / "a.json"
    for arguments, message in (
        (("diff", plan, tmp_path / "newer.json"), "was written by a newer TOAST; this one reads"),
        (
            ("diff", plan, tmp_path / "bad.json"),
            "bad.json is not a plan: invalid JSON at line 1, column 2",
        ),
        (
            ("diff", plan, tmp_path / "gone.json"),
            "gone.json: cannot read: No such file or directory; check",
        ),
        (("diff", plan, plan, "--json", tmp_path), "cannot write"),
        (("apply", tmp_path / "newer.json", "t2b"), "plan version 99 was"),
        (("apply", plan, "mlp"), "does not match mlp"),
        (("apply", plan, "nonsense"), "nonsense"),
        (
            ("apply", plan, "t2b", "--layers", 1, "--memory", 0.01, "--json", tmp_path / "no.json"),
            "memory limit of 10.2 MiB per device: ",
        ),
        (("apply", plan, "mlp", "--mesh", "a=3,b"), "is not axis=size"),
        (("explain", plan), "is a plan; use --argument, --collective, --annotations or --why-not"),
        (("explain", plan, "--conflict", 0, "--argument", "x"), "or a TARGET that is not a plan"),
        (("explain", "t2b", "--argument", "x"), "plan; use a JSON file written by"),
        (("explain", plan, "--argument", "tokns"), "tokns: no such argument; did you mean tokens"),
        (
            ("explain", plan, "--argument", "tokens", "--hardware", "h100"),
            "--hardware h100: a plan is explained on its own hardware; use toast apply",
        ),
        (
            ("explain", plan, "--argument", "tokens", "--budget", 3),
            "--budget 3: needs --why-not; add --why-not",
        ),
        (("explain", plan, "--collective", "first"), "--collective first: use a number, or all"),
        (("explain", plan, "--collective", 10_000), "no collective 10000 in the plan of t2b"),
        (("explain", plan, "--why-not", "tokens"), "write params['wq']=P('model', None)"),
        (
            ("explain", plan, "--why-not", "tokens=P('x')"),
            "tokens=P('x'): no axis x in mesh data=4,model=4; use data, model",
        ),
        (
            ("explain", plan, "--why-not", "tokens=P(None, None, 'data')"),
            "and has 2 dimensions, not 3",
        ),
        (("explain", plan, "--why-not", "tokens=P(3)"), "is not a sharding; write P('data', None)"),
    ):
        failed = run(*arguments)
        assert failed.exit_code == 2, arguments
        assert message in failed.stderr, failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1, failed.stderr
    assert not (tmp_path / "no.json").exists()
