"""Published steps: cases without their configuration are refused, errors that grow are reported."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import pytest

import toast
from tests.benchmarks.test_evaluation import loaded
from toast.errors import PlanError
from toast.evaluation.baselines import manual

published = loaded("published")
CASE = "torchtitan/llama3.1-8b-h100-8"


def recorded_of(result: object, predicted: object) -> object:
    """What is recorded if a prediction is the first one."""
    first = dataclasses.replace(result, predicted=predicted, recorded=None)  # type: ignore[type-var]
    return first.to_record()  # type: ignore[attr-defined]


def copied(tmp_path: pathlib.Path, old: str = "", new: str = "") -> pathlib.Path:
    folder = tmp_path / "validation" / CASE
    shutil.copytree(published.CASES / CASE, folder)
    text = (folder / "case.toml").read_text()
    assert old in text
    (folder / "case.toml").write_text(text.replace(old, new))
    return folder


def test_every_case_can_be_read_and_has_a_recorded_prediction() -> None:
    folders = published.folders()
    assert len(folders) >= 73
    for folder in folders:
        case = published.read_case(folder)
        assert published.recorded(folder), folder
        assert case.cited.url in (published.TOP / "docs" / "fidelity.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "sequence = 8192\n", "",
            f"validation/{CASE}/case.toml: the source's [configuration] sequence is missing",
        ),
        (
            "[cited]", "[quoted]",
            f"validation/{CASE}/case.toml: the source's [cited] seconds, [cited] url are missing",
        ),
        (
            'mesh = "fsdp=8"', 'mesh = "fsdp=4"',
            f"validation/{CASE}/case.toml: mesh fsdp=4 has 4 devices, the configuration 8",
        ),
        (
            'model = "llama3.1-8b"\n', "",
            f"validation/{CASE}: [program] has no model, and there is no program.py",
        ),
        (
            "sequences_per_device = 2", "sequences_per_device = 1.3",
            f"validation/{CASE}/case.toml: 10.4 sequences on 8 devices; write a number of sequences",
        ),
        (
            'model = "llama3.1-8b"\n', 'model = "llama3.1-8b"\ncode = "other.py"\n',
            f"validation/{CASE}/case.toml: [program] has a model and code; remove one of them",
        ),
        (
            'hardware = "h100-96gb-500w"', 'hardware = ""',
            f'validation/{CASE}/case.toml: [configuration] hardware = "": expected a printable text',
        ),
        (
            'hardware = "h100-96gb-500w"', 'hardware = "tpu-v7"',
            f"validation/{CASE}/case.toml: no hardware named tpu-v7; did you mean tpu-v4?",
        ),
        (
            "https://", "http://",
            f'validation/{CASE}/case.toml: [cited] url = "http://',
        ),
        ("devices = 8", "devices = [", f"validation/{CASE}/case.toml: Invalid value"),
        ("mesh = ", 'mesh = "foo"  # ', f"validation/{CASE}/case.toml: mesh 'foo': "),
        (
            "devices = 8", "devices = 0",
            f"validation/{CASE}/case.toml: [configuration] devices = 0: expected",
        ),
    ],
)  # fmt: skip
def test_a_case_without_its_configuration_is_refused_in_one_line(
    tmp_path: pathlib.Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(PlanError) as raised:
        published.read_case(copied(tmp_path, old, new))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_case_is_refused(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "validation" / "page" / "case"
    folder.mkdir(parents=True)
    with pytest.raises(PlanError, match="validation/page/case: no configuration"):
        published.read_case(folder)


def test_only_an_error_that_grows_by_more_than_two_points_is_reported() -> None:
    case = published.read_case(published.CASES / CASE)
    cited = case.cited

    def result(step: float, peak: float) -> object:
        predicted = published.Predicted(
            seconds=step * cited.seconds, peak_gib=peak * cited.peak_gib, jax="1"
        )
        # What was recorded last is worse than the best.
        last = published.Recorded(seconds=2.0, peak_gib=90.0, jax="1", best_step=0.1, best_peak=0.1)
        return published.Result(CASE, case, predicted, last)

    assert result(0.9, 0.9).grown() == []  # type: ignore[attr-defined]
    assert result(0.885, 1.1).grown() == []  # type: ignore[attr-defined]
    assert result(1.0, 1.0).grown() == []  # type: ignore[attr-defined]
    assert result(0.87, 0.9).grown() == [  # type: ignore[attr-defined]
        f"{CASE}: the error of the step has grown from 10.0%, the smallest one recorded, to 13.0%"
    ]
    both = result(1.2, 1.2)
    assert len(both.grown()) == 2  # type: ignore[attr-defined]
    assert dataclasses.replace(both, recorded=None).grown() == [  # type: ignore[type-var]
        f"{CASE}: no prediction is recorded; record it: --record"
    ]


def test_errors_do_not_creep_up_over_several_records(tmp_path: pathlib.Path) -> None:
    """Each record may be worse than the one before, but not than the best by over two points."""
    folder = copied(tmp_path, "devices = 8", "devices = 8")
    (folder / "predicted.toml").unlink()
    case = published.read_case(folder)
    seconds = case.cited.seconds

    def result(step: float) -> object:
        predicted = published.Predicted(seconds=step * seconds, peak_gib=73.1, jax="1")
        return published.Result(CASE, case, predicted, published.recorded(folder))

    assert published.recorded(folder) is None
    for step, best in ((0.90, 0.1), (0.95, 0.05), (0.935, 0.05)):
        published.record(folder, result(step).to_record())  # type: ignore[attr-defined]
        assert published.recorded(folder).best_step == pytest.approx(best)
    worse = result(0.92)
    assert worse.grown() == [  # type: ignore[attr-defined]
        f"{CASE}: the error of the step has grown from 5.0%, the smallest one recorded, to 8.0%"
    ]
    published.record(folder, worse.to_record("the source states another clock"))  # type: ignore[attr-defined]
    found = published.recorded(folder)
    assert found.accepted == "the source states another clock"
    assert found.best_step == pytest.approx(0.08)
    published.record(folder, result(0.925).to_record())  # type: ignore[attr-defined]
    assert published.recorded(folder).accepted == found.accepted


def run(
    monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, seconds: float, *options: str
) -> int:
    """The exit code of the script for one case with a prediction of some seconds."""
    predicted = published.Predicted(seconds=seconds, peak_gib=73.1, jax="1")
    monkeypatch.setattr(published, "CASES", folder.parent.parent)
    monkeypatch.setattr(published, "predict", lambda *_: predicted)
    monkeypatch.setattr(published.sys, "argv", ["published.py", "--only", "h100-8", *options])
    return int(published.main())


def test_a_record_with_a_larger_error_needs_a_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(tmp_path, "devices = 8", "devices = 8")
    before = (folder / "predicted.toml").read_text()
    assert run(monkeypatch, folder, 2.46, "--record") == 0
    assert published.recorded(folder).best_step == pytest.approx(0.0, abs=2e-3)
    written = (folder / "predicted.toml").read_text()
    assert written != before
    assert run(monkeypatch, folder, 2.0) == 1
    assert run(monkeypatch, folder, 2.0, "--record") == 1
    assert (folder / "predicted.toml").read_text() == written
    error = capsys.readouterr().err
    assert "the error of the step has grown from 0." in error
    assert "nothing is recorded; say why they grow: --accept CASE REASON" in error
    assert run(monkeypatch, folder, 2.0, "--record", "--accept", CASE, "a test") == 0
    assert published.recorded(folder).accepted == "a test"
    assert run(monkeypatch, folder, 2.0) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", ""), "--only is empty; write a part of the name of a case"),
        (("--only", " "), "--only is empty"),
        (("--only", "nothing"), "no case in validation/ has 'nothing' in its name"),
        (("--accept", CASE, "why"), "--accept is for --record"),
        (("--record", "--accept", "", "why"), "--accept '': no such case; write its whole name"),
        (("--record", "--accept", CASE, " "), f"--accept {CASE}: write a reason in one line"),
        (("--record", "--accept", CASE, 'a "b"'), f"--accept {CASE}: write a reason in one line"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(published.sys, "argv", ["published.py", *options])
    assert published.main() == 2
    error = capsys.readouterr().err
    assert error.startswith(f"published.py: {message}")
    assert error.count("\n") == 1


def test_runs_that_are_predicted_not_to_fit_are_counted() -> None:
    def result(name: str, peak: float) -> object:
        predicted = published.Predicted(seconds=1.0, peak_gib=peak, jax="1")
        return published.Result(name, published.read_case(published.CASES / name), predicted, None)

    tpu, gpu = "tpu-recipes/llama3.1-70b-v6e-32", "gpu-recipes/llama3.1-70b-h200-256"
    # 31.24 GiB of v6e; H200 has 141 GiB, of which JAX takes 105.75 if nothing else is set.
    assert published.memory([result(tpu, 31.5), result(gpu, 120.0)]) == (
        "All of them ran. Predicted peak over the memory of the device: 1 of 2: "
        f"{tpu} (31.5 of 31.2 GiB)."
    )
    assert published.memory([result(tpu, 31.2)]).endswith(": 0 of 1.")


@pytest.mark.parametrize("text", ['seconds = "x"', "seconds = "])
def test_a_broken_record_is_refused_in_one_line(tmp_path: pathlib.Path, text: str) -> None:
    folder = copied(tmp_path, "devices = 8", "devices = 8")
    (folder / "predicted.toml").write_text(text)
    with pytest.raises(PlanError) as raised:
        published.recorded(folder)
    assert str(raised.value).startswith(f"validation/{CASE}/predicted.toml: ")
    assert str(raised.value).endswith("; predict it again: --record")


def test_the_page_has_the_recorded_predictions() -> None:
    page = (published.TOP / "docs" / "fidelity.md").read_text()
    rows = []
    for folder in published.folders():
        found = published.recorded(folder)
        case = published.read_case(folder)
        rows.append(published.Result("/".join(folder.parts[-2:]), case, found, found))
        assert published.line(rows[-1]) in page
    for of_table in published.by_table(rows).values():
        assert published.memory(of_table) in page
    assert published.summary(published.by_table(rows)[published.FULL]) in page


def test_cases_of_a_source_share_a_program(tmp_path: pathlib.Path) -> None:
    source = published.CASES / "maxtext"
    folder = tmp_path / "validation" / "maxtext" / "16b-v5e-2x256"
    shutil.copytree(source / "16b-v5e-2x256", folder)
    missing = "there is no default_layers.py"
    with pytest.raises(PlanError, match=missing):
        published.read_case(folder)
    shutil.copy(source / "default_layers.py", folder.parent)
    case = published.read_case(folder)
    model, strategies = published.program_of(folder, case)
    assert model.arguments[0]["layers"]["up"].shape == (32, 5120, 32768)
    assert case.program.strategy in strategies


def test_a_strategy_must_use_all_axes() -> None:
    folder = published.CASES / "maxtext" / "32b-v5p-64"
    case = published.read_case(folder)
    program = published.structs.replace(case.program, mesh="data=16,tensor=4")
    with pytest.raises(PlanError, match="strategy FSDP shards nothing over data"):
        published.predict(folder, published.structs.replace(case, program=program))
    program = published.structs.replace(case.program, strategy="FSPD")
    with pytest.raises(PlanError, match="no strategy FSPD; use one of FSDP"):
        published.predict(folder, published.structs.replace(case, program=program))


def test_the_strategy_itself_is_predicted() -> None:
    """On a mesh of several axes, the best combination of its parts is another plan."""
    folder = published.CASES / "maxtext" / "32b-v5p-64"
    case = published.read_case(folder)
    model, strategies = published.program_of(folder, case)
    analysis = toast.analyze(model, platform="tpu")
    best = manual(
        analysis, case.program.mesh, "tpu-v5p", strategies, memory_bytes=2.0**50,
        overlap=case.program.overlap,
    )  # fmt: skip
    assert published.predict(folder, case).seconds > 1.02 * best.after.step_seconds


def test_an_assumed_case_is_listed_apart_and_does_not_fail() -> None:
    name = "gshard/512e-12l-v3-512"
    case = published.read_case(published.CASES / name)
    assert case.configuration.assumed
    first, other = (published.Predicted(seconds=s, peak_gib=1.0, jax="1") for s in (0.4, 0.5))
    result = published.Result(name, case, other, None)
    result = dataclasses.replace(result, recorded=recorded_of(result, first))
    assert result.grown() == []
    full = published.Result(CASE, published.read_case(published.CASES / CASE), first, None)
    tables = published.by_table([result, full])
    assert tables == {published.FULL: [full], published.ASSUMED: [result]}
    assert published.by_table([full]) == {published.FULL: [full]}


def test_a_strategy_may_be_constraints() -> None:
    """GShard's annotations and whole parameters, by which the experts' tokens are sent."""
    folder = published.CASES / "gshard" / "512e-12l-v3-512"
    case = published.read_case(folder)
    model, strategies = published.program_of(folder, case)
    plan = toast.plan(
        model, mesh="expert=512", hardware="tpu-v3", constraints=strategies["annotated"]
    )
    counts = {c.kind: c.count for c in plan.after.collectives}
    assert counts["all_to_all"] >= 6 * 4  # each layer of experts sends and returns, also gradients
    split = {name for name, spec in plan.arguments.items() if "params" in name and any(spec)}
    assert split == {
        f"params['{stack}']['experts']['{weight}']"
        for stack in ("encoder", "decoder")
        for weight in ("up", "down")
    }
    assert published.predict(folder, case) == published.of_prediction(plan.after)
