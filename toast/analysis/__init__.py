"""Third stage: factors, names, colors, conflicts and groups (paper, section 3)."""

from toast.analysis.analysis import Analysis, Resolution, analyze_program
from toast.analysis.names import Names
from toast.analysis.rules import Factor, SignatureRule

__all__ = ["Analysis", "Factor", "Names", "Resolution", "SignatureRule", "analyze_program"]
