"""Both ways to resolve a conflict, priced."""

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
    """A color sharded along one mesh axis, with a conflict resolved one way."""

    axis: str
    #: 0 or 1: which of the conflict's two sides takes the axis.
    resolution: int
    #: That side, as :meth:`toast.Analysis.name_label` writes it.
    picks: str
    #: How :attr:`Priced.tensor` is sharded then.
    sharding: str
    prediction: Prediction


@dataclasses.dataclass(frozen=True)
class Priced:
    """What the resolutions of a conflict cost on a mesh of some hardware."""

    conflict: int
    #: The tensor of the conflict's first site: ``%12``.
    tensor: str
    mesh: str
    hardware: str
    unsharded: Prediction
    #: By axis, then resolution.
    resolutions: tuple[PricedResolution, ...]
    #: Mesh axes that do not divide the color's dimensions, or have one device.
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
    """Step time, peak memory and collectives under either resolution of a conflict (4.2).

    Nothing but the conflict's color, and what is mirrored to it, is sharded, along ``axis`` (or
    along each of the mesh's in turn); its other conflicts are at resolution 0.  ``conflict`` is a
    row of :attr:`toast.Analysis.conflict`; ``cache`` says whether cost tables are kept.

    Raises :class:`toast.errors.ExplainError` for a conflict or an axis that does not exist,
    ``MeshError`` and ``HardwareError`` for meshes and hardware that do not.
    """
    explained = analysis.explain_conflict(conflict)
    on, machine = system_of(mesh, hardware)
    if axis is not None and axis not in on.names:
        raise ExplainError(f"axis {axis}: not in mesh {on}; use {', '.join(on.names)}")
    # Small colors too: they are asked about here, if not searched.
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
    """The action on the conflict's color with this resolution, if the axis divides any of it."""
    resolution = space.analysis.resolutions[conflict]
    group = int(space.color_group_of(resolution.names[0]))
    place = space.color_groups[group].bits.index(resolution.group)
    offered = [
        action for action in space.actions
        if action.color == group and space.mesh.names[action.axis] == axis
        and action.resolution[place] == bit
    ]  # fmt: skip
    return sorted(offered, key=lambda a: (sum(a.resolution), a.resolution))[:1]
