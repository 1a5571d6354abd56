"""Colors that are sharded together because arguments are used alike."""

from __future__ import annotations

from toast.analysis import Analysis, Dimension


def mirrored(analysis: Analysis, one: Dimension, other: Dimension) -> bool:
    """Whether an action on one dimension is mirrored to the other, which is not tied to it (4.4).

    So it is with the same dimension of the arguments of one group: parameters of repeated layers.
    """
    names = analysis.names
    colors = [
        int(analysis.color[names.def_name[names.value_dim[end.value] + end.d]])
        for end in (one, other)
    ]
    groups = analysis.color_group[colors]
    return colors[0] != colors[1] and bool(groups[0] == groups[1])
