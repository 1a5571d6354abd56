"""Tables of a plan: its arguments, and the memory of a device over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from toast import lazy
from toast.paths import folded
from toast.plan.labels import describe_value, place_of, spec_text
from toast.plan.plan import ArgumentRow, Plan
from toast.program import element_bytes

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy.module("pandas")


def argument_table(plan: Plan) -> tuple[ArgumentRow, ...]:
    """The implementation of :meth:`toast.Plan.argument_table`."""
    program, analysis = plan.analysis.program, plan.analysis
    rows: dict[Any, list[str]] = {}
    for index, (name, spec) in enumerate(plan.arguments.items()):
        type_ = program.values[program.argument_values[index]].type
        rows.setdefault((int(analysis.argument_group[index]), type_, spec), []).append(name)
    sizes = dict(plan.mesh.axes)
    table = []
    for (_, type_, spec), names in rows.items():
        shards = int(np.prod([sizes[a] for axes in spec for a in axes], dtype=np.int64))
        size = int(np.prod(type_.shape, dtype=np.int64)) * element_bytes(type_.dtype)
        patterns = tuple(dict.fromkeys(map(folded, names))) if len(names) > 1 else (names[0],)
        table.append(
            ArgumentRow(
                patterns, len(names), type_.shape, type_.dtype, spec,
                size // shards * len(names),
            )
        )  # fmt: skip
    return tuple(sorted(table, key=lambda row: -row.device_bytes))


def argument_frame(plan: Plan) -> pd.DataFrame:
    """The implementation of :meth:`toast.Plan.argument_frame`."""
    program = plan.analysis.program
    types = [program.values[v].type for v in program.argument_values]
    return pd.DataFrame(
        {
            "argument": list(plan.arguments),
            "shape": [t.shape for t in types],
            "dtype": [t.dtype for t in types],
            "spec": [spec_text(spec) for spec in plan.arguments.values()],
        }
    )


def at_peak(plan: Plan) -> pd.DataFrame:
    """The implementation of :meth:`toast.Plan.at_peak`."""
    program = plan.analysis.program
    first = max(len(program.arguments), 1)  # op that is no argument
    return pd.DataFrame([
        {
            "bytes": buffer.bytes,
            "value": describe_value(program, buffer.value),
            "what": buffer.what,
            "from": (
                place_of(program, buffer.start) if buffer.start >= first else "start of the step"
            ),
            "to": place_of(program, buffer.end),
        }
        for buffer in plan.timeline.at_peak
    ], columns=["bytes", "value", "what", "from", "to"])  # fmt: skip


def memory_data(plan: Plan) -> dict[str, Any]:
    """The implementation of :meth:`toast.Plan.memory_data`."""
    line, program = plan.timeline, plan.analysis.program
    last = np.flatnonzero(np.diff(line.op, append=len(program.ops) + 1))
    return {
        "argument_bytes": line.argument_bytes,
        "peak_bytes": line.peak_bytes,
        "peak_at": place_of(program, line.peak_op),
        "at_peak": plan.at_peak().head(50).to_dict("records"),
        "op": line.op[last].tolist(),
        "live_bytes": line.live_bytes[last].tolist(),
    }
