"""The formats to which plans are exported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from toast.errors import PlanError
from toast.export.exported_text import comments
from toast.export.flax_names import flax_module
from toast.export.levanter_axes import levanter_config
from toast.export.logical_axes import logical_axes
from toast.export.maxtext_rules import maxtext_config
from toast.export.python_module import python_module
from toast.export.torch_placements import torch_module
from toast.plan import Plan, Saved
from toast.program import TracedMemory

#: The formats, and what each is.
FORMATS: Mapping[str, str] = {
    "python": "a module that needs JAX alone",
    "flax": "names of dimensions and rules for Linen and NNX",
    "maxtext": "a configuration with logical_axis_rules",
    "levanter": "a configuration with the mappings of axes",
    "torch": "a module with DTensor placements and parallel styles that needs PyTorch alone",
}


def export(
    plan: Plan,
    to: str,
    *,
    names: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> str:
    """The implementation of :meth:`toast.Plan.export`."""
    _check(to, names, rename)
    unsaid = _unsaid(plan.analysis.program.memory)
    if to == "python":
        return unsaid + python_module(plan)
    if to == "torch":
        return torch_module(plan)
    axes = logical_axes(plan, names)
    if to == "maxtext":
        return maxtext_config(axes, rename)
    return unsaid + (flax_module(axes) if to == "flax" else levanter_config(axes))


def export_file(saved: Saved, to: str) -> str:
    """The text for the contents of a plan file, without its program: ``python`` alone.

    Raises :class:`toast.errors.PlanError` for another format.
    """
    _check(to, None, None)
    if to != "python":
        lacking = "modules" if to == "torch" else "logical axes"
        raise PlanError(
            f"{saved.name}: the file has no {lacking}; add the program of the plan for {to}"
        )
    return _unsaid(saved.memory) + python_module(saved)


def _unsaid(memory: TracedMemory | None) -> str:
    """A comment on the memory policy and the microbatches, which a file of shardings lacks."""
    parts = []
    if memory is not None and memory.policy is not None and memory.policy.preset != "none":
        parts.append(f"with the memory policy {memory.policy.preset or memory.policy}")
    if memory is not None and memory.microbatches > 1:
        parts.append(f"in {memory.microbatches} microbatches")
    if not parts:
        return ""
    return comments([
        f"The plan is for a step {' and '.join(parts)}. This file has shardings alone: without the "
        "rest, the step needs more memory."
    ])  # fmt: skip


def _check(to: str, names: Mapping[str, str] | None, rename: Mapping[str, str] | None) -> None:
    """Raises :class:`toast.errors.PlanError` for an unknown format, or an option it lacks."""
    if to not in FORMATS:
        near = difflib.get_close_matches(to, FORMATS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PlanError(f"export to {to!r}: no such format; {hint}use {', '.join(FORMATS)}")
    if names and to in ("python", "torch"):
        raise PlanError(f"export to {to}: it has no logical axes to name; leave out the names")
    if rename and to != "maxtext":
        raise PlanError(
            f"export to {to}: it has the mesh axes of the plan; leave out what renames them"
        )


__all__ = ["FORMATS", "export", "export_file"]
