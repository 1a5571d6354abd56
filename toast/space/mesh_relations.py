"""The predicates of a mesh for queries: section 2 of ``rules/queries/vocabulary.lp``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toast.facts.relations import quoted
from toast.space.space import Space

if TYPE_CHECKING:
    from toast.analysis.query import Columns, Relations


def relations(space: Space) -> Relations:
    """Every predicate of a decision space; ``space`` must have its analysis."""
    names = space.analysis.vocabulary.names
    mesh, groups = space.mesh, space.color_groups
    leaders = [names[group.colors[0]] for group in groups]

    def action() -> Columns:
        pairs = dict.fromkeys((a.color, a.axis) for a in space.actions)
        return [[leaders[g] for g, _ in pairs], [quoted(mesh.names[axis]) for _, axis in pairs]]

    return {
        ("mesh_axis", 2): lambda: [
            map(quoted, space.full_mesh.names),
            space.full_mesh.sizes,
        ],
        ("group_extent", 2): lambda: [leaders, [group.dimensions for group in groups]],
        ("least_extent", 1): lambda: [[space.min_dimensions]],
        ("action", 2): action,
    }
