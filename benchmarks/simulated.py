"""Prices of memory policies as estimated from a survey, against those of the traced programs.

    python benchmarks/simulated.py [--models vit-l,unet] [--page]

A joint search prices policies without tracing them: from a survey, the program that recomputes
everything.  For train steps of the zoo, this traces some presets and the best policy that the
survey finds, on 16 TPU v5e, and prints the ratio of the estimate to the traced price, of the step
and of the peak.  Both have the shardings of the survey's plan: the traced program is not searched.
``--page`` writes the table into docs/memory-accuracy.md.

It needs no TPU, and takes about a minute for a model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from evaluation import ROOT, write_section

sys.path.insert(0, str(ROOT))

import toast
from toast.cli.elapsed import steps
from toast.models import build
from toast.plan.survey_policies import SurveyPolicies
from toast.program import survey

PAGE = ROOT / "docs" / "memory-accuracy.md"
MESH, HARDWARE = "data=4,model=4", "tpu-v5e"

#: Names of policies beside the best one.
PRESETS = ("none", "full", "minimal", "save_qkv_proj", "minimal_offloaded")

#: Train steps with few layers: policies decide alike for all layers.
MODELS: Mapping[str, dict[str, Any]] = {
    "t2b": {"layers": 3}, "llama3-8b": {"layers": 2}, "llama3-8b-scan": {"layers": 4},
    "llama3.1-8b": {"layers": 4}, "qwen3-30b-a3b": {"layers": 2}, "gemma3-4b": {"layers": 6},
    "moe": {"layers": 2}, "vit-l": {"layers": 3}, "dit-xl": {"layers": 3}, "unet": {},
}  # fmt: skip


class Pair(NamedTuple):
    """A policy of a model: estimates over traced prices."""

    model: str
    policy: str
    step: float
    peak: float


def pairs(model: str) -> Iterator[Pair]:
    """The policies of a model."""
    target, place = build(model, **MODELS[model]), dict[str, Any](mesh=MESH, hardware=HARDWARE)
    searched, as_it_is = toast.Settings(rounds=1), toast.Settings(rounds=0)
    surveyed = toast.plan(target, remat=survey(), settings=searched, **place)
    policies = SurveyPolicies(surveyed)
    known = policies.presets()
    choices = {name: policies.written(known[name]) for name in PRESETS if name in known}
    for name, choice in {**choices, "best": policies.best()}.items():
        traced = toast.plan(target, remat=choice.policy, start=surveyed, settings=as_it_is, **place)
        yield Pair(
            model, name, choice.step_seconds / traced.after.step_seconds,
            choice.peak_bytes / traced.after.peak_bytes,
        )  # fmt: skip


def table(found: Sequence[Pair]) -> Iterator[str]:
    """The lines of the table, and a summary."""
    yield "| model | policies | step: median error | worst | peak: median error | worst |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for model in (*dict.fromkeys(pair.model for pair in found), "all"):
        mine = [pair for pair in found if model in (pair.model, "all")]
        cells = [f"`{model}`" if model != "all" else "all", str(len(mine))]
        for errors in (
            [pair.step - 1 for pair in mine], [pair.peak - 1 for pair in mine]
        ):  # fmt: skip
            median = statistics.median(map(abs, errors))
            cells += [f"{median:.1%}", f"{max(errors, key=abs):+.1%}"]
        yield f"| {' | '.join(cells)} |"
    close = sum(abs(pair.step - 1) <= 0.03 and abs(pair.peak - 1) <= 0.03 for pair in found)
    yield f"\nOf {len(found)} policies, {close} are within 3 % in both."


def main() -> None:
    """Prints the table, and writes it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument(
        "--page", action="store_true", help="write the table into docs/memory-accuracy.md"
    )
    options = parser.parse_args()
    models = options.models.split(",")
    if unknown := [model for model in models if model not in MODELS]:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    found: list[Pair] = []
    for model in steps(models, str):
        for pair in pairs(model):
            print(
                f"  {pair.model} {pair.policy}: step {pair.step:.3f}, peak {pair.peak:.3f}",
                flush=True,
            )
            found.append(pair)
    lines = "\n".join(table(found))
    print(lines)
    if options.page:
        write_section(PAGE, "simulated", lines)


if __name__ == "__main__":
    main()
