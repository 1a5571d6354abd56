"""Third stage: factors, names, colors, conflicts and groups (paper, section 3)."""

from toast.analysis.analysis import Analysis, Resolution, analyze_program
from toast.analysis.chains import Chain, Place, Step
from toast.analysis.collisions import Conflict, Neighbour, Side, Site
from toast.analysis.dimensions import Dimension, find_dimension, find_value, value_label
from toast.analysis.names import Names
from toast.analysis.rules import Factor, RuleEntry, RuleLine, SignatureRule, rule_entries

__all__ = [
    "Analysis",
    "Chain",
    "Conflict",
    "Dimension",
    "Factor",
    "Names",
    "Neighbour",
    "Place",
    "Resolution",
    "RuleEntry",
    "RuleLine",
    "Side",
    "SignatureRule",
    "Site",
    "Step",
    "analyze_program",
    "find_dimension",
    "find_value",
    "rule_entries",
    "value_label",
]
