"""Colors that are sharded together because their arguments are used alike."""

from __future__ import annotations

from toast.analysis import Analysis, Dimension


def mirrored(analysis: Analysis, one: Dimension, other: Dimension) -> bool:
    """Whether an action on one dimension is mirrored to another one of a different color (4.4).

    This holds for the same dimension of two arguments of one group, such as the parameters of
    repeated layers.
    """
    names = analysis.names
    colors = [
        int(analysis.color[names.def_name[names.value_dim[end.value] + end.d]])
        for end in (one, other)
    ]
    groups = analysis.color_group[colors]
    return colors[0] != colors[1] and bool(groups[0] == groups[1])
