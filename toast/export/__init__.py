"""Stage after plans: writes them as other trainers have them.

``python``, ``flax`` and ``torch`` are Python modules, ``maxtext`` and ``levanter`` are YAML.
"""

from toast.export.exports import FORMATS, export, export_file
from toast.export.logical_axes import LogicalAxes, logical_axes

__all__ = ["FORMATS", "LogicalAxes", "export", "export_file", "logical_axes"]
