"""The plans of a report's switch, and the plan as Python for people to copy."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from toast.evaluation.compare import MethodResult
from toast.paths import folded
from toast.plan import Plan, spec_text
from toast.report.memory_groups import memory_groups
from toast.report.verdict import verdict_of

#: The plan as Python: its mesh, and the shardings of arguments by path.
_PYTHON = '''\
import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

# {program} on mesh {mesh} of {hardware}
mesh = jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {count})
SPECS = {{
{specs}}}


def sharded(argument, tree):
    """The shardings of an argument of the step, for jax.device_put and jax.jit."""

    def sharding(path, _):
        name = argument + jax.tree_util.keystr(path)
        spec = SPECS.get(name) or SPECS.get(re.sub(r"\\[\\d+\\]", "[*]", name))
        return NamedSharding(mesh, P() if spec is None else spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)
'''


def plan_rows(plan: Plan, compared: Sequence[MethodResult]) -> list[dict[str, Any]]:
    """The plans to choose from, that of the page first; empty if there are no others.

    Each has its ``name``, ``verdict``, ``numbers`` (name and seconds or bytes), ``memory`` by group
    at the peak, ``arguments`` (sharding by path, with ``*`` for layers) and ``collectives`` (count,
    bytes and seconds by kind and axes).
    """
    others = [row for row in compared if row.plan is not None and row.plan is not plan]
    if not others:
        return []
    own = next((row.method for row in compared if row.plan is plan), plan.method)
    rows = [_row(own, plan)]
    return rows + [_row(row.method, row.plan) for row in others if row.plan is not None]


def _row(name: str, plan: Plan) -> dict[str, Any]:
    line, after = plan.timeline, plan.after
    of = memory_groups(plan, line)
    at = min(line.peak_op, of.live.shape[1] - 1)
    moves: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for c in plan.breakdown.collectives:
        row = moves[f"{c.kind} over {' x '.join(c.axes)}"]
        row[0] += c.count
        row[1] += c.count * c.bytes
        row[2] += c.seconds
    waited = after.collective_seconds - after.hidden_seconds
    return {
        "name": name,
        "verdict": verdict_of(plan).to_dict(),
        "numbers": [
            ["step", "time", after.step_seconds],
            ["matrix products", "time", after.matmul_seconds],
            ["memory traffic", "time", after.memory_seconds],
            ["collectives", "time", after.collective_seconds],
            ["  not overlapped", "time", max(waited, 0.0)],
            ["peak memory", "size", line.peak_bytes],
        ],
        "memory": {group: float(row[at]) for group, row in zip(of.groups, of.live, strict=True)},
        "arguments": {
            path: ", ".join(specs) for path, specs in specs_by_path(plan).items()
        },
        "collectives": dict(moves),
    }  # fmt: skip


def specs_by_path(plan: Plan) -> dict[str, dict[str, None]]:
    """The shardings of arguments as text, by path with ``*`` for positions in lists."""
    specs: dict[str, dict[str, None]] = {}
    for path, spec in plan.arguments.items():
        specs.setdefault(folded(path), {})[spec_text(spec)] = None
    return specs


def python_text(plan: Plan) -> str:
    """The plan as Python: its mesh, and the shardings of its arguments."""
    # As the code folds: positions of lists alone.
    paths = {name: re.sub(r"\[\d+\]", "[*]", name) for name in plan.arguments}
    texts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, spec in plan.arguments.items():
        texts[paths[name]][spec_text(spec)] += 1
    lines = {path: counts.most_common(1)[0][0] for path, counts in texts.items()}
    for name, spec in plan.arguments.items():
        if spec_text(spec) != lines[paths[name]]:
            lines[name] = spec_text(spec)
    return _PYTHON.format(
        program=" ".join(plan.analysis.program.name.split()),
        mesh=plan.mesh,
        hardware=plan.hardware.name,
        sizes=tuple(size for _, size in plan.mesh.axes),
        names=tuple(name for name, _ in plan.mesh.axes),
        count=len(plan.mesh.axes),
        specs="".join(f"    {path!r}: {text},\n" for path, text in lines.items()),
    )


__all__ = ["plan_rows", "python_text", "specs_by_path"]
