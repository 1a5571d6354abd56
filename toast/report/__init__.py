"""The last stage: views of analyses and plans for the terminal, notebooks and HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast import lazy

if TYPE_CHECKING:
    from toast.report.devices import (
        calibration_table,
        hardware_list,
        hardware_tables,
        product_calibration_table,
    )
    from toast.report.dimension_names import parse_names
    from toast.report.explanations import (
        chain_text,
        conflict_list,
        conflict_text,
        resolution_tables,
    )
    from toast.report.fit_tables import fit_tables, remedy_tables
    from toast.report.html import (
        PageOrigin,
        best_plan,
        comparison_html,
        html_text,
        write_html,
    )
    from toast.report.lists import (
        answer_table,
        audit_list,
        model_list,
        predicate_list,
        proof_table,
        rule_list,
    )
    from toast.report.lowering_tables import lowering_tables
    from toast.report.plan_tables import (
        annotations_table,
        applied_tables,
        argument_explanation,
        collective_explanation,
        collectives_table,
        difference_tables,
        why_not_tables,
    )
    from toast.report.summaries import (
        analysis_table,
        comparison_table,
        missing_rules,
        plan_tables,
        verdict_line,
        verification_table,
    )
    from toast.report.verdict import PlanVerdict, verdict_of

__all__ = [
    "PageOrigin",
    "PlanVerdict",
    "analysis_table",
    "annotations_table",
    "answer_table",
    "applied_tables",
    "argument_explanation",
    "audit_list",
    "best_plan",
    "calibration_table",
    "chain_text",
    "collective_explanation",
    "collectives_table",
    "comparison_html",
    "comparison_table",
    "conflict_list",
    "conflict_text",
    "difference_tables",
    "fit_tables",
    "hardware_list",
    "hardware_tables",
    "html_text",
    "lowering_tables",
    "missing_rules",
    "model_list",
    "parse_names",
    "plan_tables",
    "predicate_list",
    "product_calibration_table",
    "proof_table",
    "remedy_tables",
    "resolution_tables",
    "rule_list",
    "verdict_line",
    "verdict_of",
    "verification_table",
    "why_not_tables",
    "write_html",
]

lazy.package(
    __name__,
    {
        "summaries": (
            "analysis_table",
            "comparison_table",
            "missing_rules",
            "plan_tables",
            "verdict_line",
            "verification_table",
        ),
        "dimension_names": ("parse_names",),
        "verdict": ("PlanVerdict", "verdict_of"),
        "lists": (
            "answer_table",
            "audit_list",
            "model_list",
            "predicate_list",
            "proof_table",
            "rule_list",
        ),
        "plan_tables": (
            "annotations_table",
            "applied_tables",
            "argument_explanation",
            "collective_explanation",
            "collectives_table",
            "difference_tables",
            "why_not_tables",
        ),
        "lowering_tables": ("lowering_tables",),
        "devices": (
            "calibration_table",
            "product_calibration_table",
            "hardware_list",
            "hardware_tables",
        ),
        "explanations": (
            "chain_text",
            "conflict_list",
            "conflict_text",
            "resolution_tables",
        ),
        "fit_tables": (
            "fit_tables",
            "remedy_tables",
        ),
        "html": (
            "PageOrigin",
            "best_plan",
            "comparison_html",
            "html_text",
            "write_html",
        ),
    },
)
