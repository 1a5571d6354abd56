"""Last stage: analyses and plans for people to read."""

from toast.report.devices import calibration_table, hardware_list, hardware_tables
from toast.report.explanations import (
    chain_text,
    conflict_list,
    conflict_text,
    resolution_tables,
)
from toast.report.html import comparison_html, html_text, write_html
from toast.report.tables import (
    analysis_table,
    comparison_table,
    missing_rules,
    plan_tables,
    verification_table,
)

__all__ = [
    "analysis_table",
    "calibration_table",
    "chain_text",
    "comparison_html",
    "comparison_table",
    "conflict_list",
    "conflict_text",
    "hardware_list",
    "hardware_tables",
    "html_text",
    "missing_rules",
    "plan_tables",
    "resolution_tables",
    "verification_table",
    "write_html",
]
