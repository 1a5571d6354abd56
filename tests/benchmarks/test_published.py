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
        ("devices = 8", "devices = [", f"validation/{CASE}/case.toml: Invalid value"),
        ("mesh = ", 'mesh = "foo"  # ', f"validation/{CASE}/case.toml: mesh 'foo': "),
        (
            "devices = 8", "devices = 0",
            f"validation/{CASE}/case.toml: in 'configuration', 'devices', 0: expected",
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
        def of(step: float, peak: float) -> object:
            return published.Predicted(
                seconds=step * cited.seconds, peak_gib=peak * cited.peak_gib, jax="1"
            )

        return published.Result(CASE, case, of(step, peak), of(0.9, 0.9))

    assert result(0.9, 0.9).grown() == []  # type: ignore[attr-defined]
    assert result(0.885, 1.1).grown() == []  # type: ignore[attr-defined]
    assert result(1.0, 1.0).grown() == []  # type: ignore[attr-defined]
    assert result(0.87, 0.9).grown() == [  # type: ignore[attr-defined]
        f"{CASE}: the error of the step has grown from 10.0% to 13.0%"
    ]
    both = result(1.2, 1.2)
    assert len(both.grown()) == 2  # type: ignore[attr-defined]
    assert dataclasses.replace(both, recorded=None).grown() == [  # type: ignore[type-var]
        f"{CASE}: no prediction is recorded; record it: --record"
    ]


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
    for folder in published.folders():
        found = published.recorded(folder)
        case = published.read_case(folder)
        row = published.line(published.Result("/".join(folder.parts[-2:]), case, found, found))
        assert row in page


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
    result = published.Result(name, case, other, first)
    assert result.grown() == []
    full = published.Result(CASE, published.read_case(published.CASES / CASE), first, first)
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
