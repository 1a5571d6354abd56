"""Explanations of the annotations in a program (``toast.split`` and others)."""

from __future__ import annotations

import numpy as np

from toast.cost.entities import Entity
from toast.explain.collective_causes import CollectiveRow, in_order, values_of
from toast.plan import AnnotationExplanation, Plan, describe_value, place_of
from toast.space.annotated import annotation_call


def explain_annotations(plan: Plan) -> tuple[AnnotationExplanation, ...]:
    """Every annotation of a plan's program; see :meth:`toast.Plan.explain_annotations`."""
    program, shardings = plan.analysis.program, plan.shardings
    rows = in_order(plan)
    explained = []
    for op, text in sorted(program.annotations.items()):
        (operand,), (result,) = program.ops[op].operands, program.ops[op].results
        explained.append(
            AnnotationExplanation(
                call=annotation_call(text),
                place=place_of(program, op),
                value=describe_value(program, operand),
                spec=shardings.of(program, result),
                before=shardings.of(program, operand),
                moved_by=tuple(
                    number for number, row in enumerate(rows, 1) if _moves(plan, row, op, result)
                ),
            )
        )
    return tuple(explained)


def _moves(plan: Plan, row: CollectiveRow, op: int, result: int) -> bool:
    """Whether a collective reshards the operand of an annotation or its result."""
    if row.traffic.term.scope is not Entity.USE_CLASS:
        return result in values_of(plan, row)
    names = plan.analysis.names
    uses = np.flatnonzero(plan.model.tables.use_class == row.x)
    return bool(((names.use_op[uses] == op) | (names.use_value[uses] == result)).any())
