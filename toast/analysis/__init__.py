"""Third stage: factors, names, colors, conflicts and groups (paper, section 3)."""

from toast.analysis.analysis import Analysis, analyze_program
from toast.analysis.analysis_cache import analyzed
from toast.analysis.decomposition import Decomposition
from toast.analysis.derivation import Orders, Resolution
from toast.analysis.dimensions import Dimension, find_dimension, find_value, value_label
from toast.analysis.evidence import Chain, ChainStep, Conflict, Neighbour, Place, Side, Site
from toast.analysis.names import Names
from toast.analysis.rules import (
    Factor,
    Lowering,
    RuleEntry,
    RuleLine,
    SignatureRule,
    lowering_of,
    rule_entries,
)

__all__ = [
    "Analysis",
    "Chain",
    "ChainStep",
    "Conflict",
    "Decomposition",
    "Dimension",
    "Factor",
    "Lowering",
    "Names",
    "Neighbour",
    "Orders",
    "Place",
    "Resolution",
    "RuleEntry",
    "RuleLine",
    "Side",
    "SignatureRule",
    "Site",
    "analyze_program",
    "analyzed",
    "find_dimension",
    "find_value",
    "lowering_of",
    "rule_entries",
    "value_label",
]
