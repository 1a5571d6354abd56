"""The prices of both resolutions of a conflict."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from toast.analysis import Analysis, value_label
from toast.cost import CostModel
from toast.errors import ExplainError
from toast.inputs import AnyHardware, AnyMesh, system_of
from toast.plan import Prediction, spec_text
from toast.plan.shard import shardings_of
from toast.space import Action, Space


@dataclasses.dataclass(frozen=True)
class PricedResolution:
    """The price of sharding a color along one mesh axis with one resolution of a conflict."""

    #: The mesh axis.
    axis: str
    #: 0 or 1: the side of the conflict that gets the axis.
    resolution: int
    #: The label of that side, as in :meth:`toast.Analysis.name_label`.
    picks: str
    #: The resulting sharding of :attr:`Priced.tensor`.
    sharding: str
    #: The prediction with that sharding alone.
    prediction: Prediction


@dataclasses.dataclass(frozen=True)
class Priced:
    """The prices of the resolutions of a conflict on a mesh of a device."""

    #: The number of the conflict.
    conflict: int
    #: The tensor of the conflict's first site: ``%12``.
    tensor: str
    #: The mesh, as text.
    mesh: str
    #: The name of the hardware.
    hardware: str
    #: The prediction of the unsharded program.
    unsharded: Prediction
    #: Ordered by axis, then by resolution.
    resolutions: tuple[PricedResolution, ...]
    #: Mesh axes that divide no dimension of the color, or have size 1.
    useless_axes: tuple[str, ...]


def resolutions(
    analysis: Analysis,
    conflict: int,
    *,
    mesh: AnyMesh,
    hardware: AnyHardware,
    axis: str | None = None,
    cache: bool = True,
) -> Priced:
    """Step time, peak memory and collectives under both resolutions of a conflict (4.2).

    Only the color of the conflict, and the colors mirrored to it, are sharded, along ``axis`` or
    along each axis of the mesh in turn; other conflicts of the color have resolution 0.
    ``conflict`` is a row of :attr:`toast.Analysis.conflict`.  ``cache`` enables the cache of cost
    tables.

    Raises :class:`toast.errors.ExplainError` if the conflict or the axis does not exist,
    ``MeshError`` for an invalid mesh and ``HardwareError`` for invalid hardware.
    """
    explained = analysis.explain_conflict(conflict)
    on, machine = system_of(mesh, hardware)
    if axis is not None and axis not in on.names:
        raise ExplainError(f"axis {axis}: not in mesh {on}; use {', '.join(on.names)}")
    # Colors that are too small for the search have conflicts, too.
    model = CostModel(Space(analysis, on, min_dimensions=0), machine, keep=cache)
    wanted = [name for name in on.names if axis in (None, name)]
    chosen = {
        (name, bit): action
        for name, bit in itertools.product(wanted, (0, 1))
        for action in _action(model.space, conflict, name, bit)
    }
    initial = model.space.unsharded
    states = [initial, *(model.space.apply(initial, action) for action in chosen.values())]
    prices = model.price(np.stack(states))
    value = explained.sites[0].dimensions[0].value
    return Priced(
        conflict=conflict,
        tensor=value_label(analysis.program, value),
        mesh=str(on),
        hardware=machine.name,
        unsharded=Prediction.of(prices),
        resolutions=tuple(
            PricedResolution(
                axis=name,
                resolution=bit,
                picks=explained.sides[bit].label,
                sharding=spec_text(shardings_of(model, states[i]).of(analysis.program, value)),
                prediction=Prediction.of(prices, i),
            )
            for i, (name, bit) in enumerate(chosen, 1)
        ),
        useless_axes=tuple(name for name in wanted if (name, 0) not in chosen),
    )


def _action(space: Space, conflict: int, axis: str, bit: int) -> list[Action]:
    """The action on the conflict's color with this resolution; empty if no dimension divides."""
    resolution = space.analysis.resolutions[conflict]
    group = int(space.color_group_of(resolution.names[0]))
    place = space.color_groups[group].bits.index(resolution.group)
    offered = [
        action for action in space.actions
        if action.color == group and space.mesh.names[action.axis] == axis
        and action.resolution[place] == bit
    ]  # fmt: skip
    return sorted(offered, key=lambda a: (sum(a.resolution), a.resolution))[:1]
