"""Third stage: factors, names, colors, conflicts and groups (paper, section 3)."""

from toast.analysis.analysis import Analysis, Resolution, analyze_program
from toast.analysis.names import Names
from toast.analysis.rules import Factor, RuleEntry, SignatureRule, rule_entries

__all__ = [
    "Analysis",
    "Factor",
    "Names",
    "Resolution",
    "RuleEntry",
    "SignatureRule",
    "analyze_program",
    "rule_entries",
]
