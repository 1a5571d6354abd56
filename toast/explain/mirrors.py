"""Colors that are sharded together because arguments are used alike."""

from __future__ import annotations

from toast.analysis import Analysis, Dimension
from toast.space.space import color_groups


def mirrored(analysis: Analysis, one: Dimension, other: Dimension) -> bool:
    """Whether an action on one dimension is mirrored to the other, which is not tied to it (4.4).

    So it is with the same dimension of the arguments of one group: parameters of repeated layers.
    """
    names, (group_of_color, _) = analysis.names, color_groups(analysis, ())
    colors = [
        int(analysis.color[names.def_name[names.value_dim[end.value] + end.d]])
        for end in (one, other)
    ]
    return colors[0] != colors[1] and len({int(group_of_color[color]) for color in colors}) == 1
