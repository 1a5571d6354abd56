"""Which mesh axes go over the networks that join slices, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toast.hardware.description import Hardware, Network

#: Names of axes over the data-centre network (DCN), such as ``dcn``, MaxText's ``dcn_data`` and
#: Levanter's ``replica_dcn``.
_DATA_CENTRE = re.compile(r"(\w+_)?dcn(_\w+)?")
#: The name of the axis over slices in the hardware files that ship with TOAST.
_SLICES = "slice"


def is_network_name(axis: str) -> bool:
    """Whether an axis goes over slices by its name: ``slice``, or one with the word ``dcn``."""
    return axis == _SLICES or _DATA_CENTRE.fullmatch(axis) is not None


def network_of(hardware: Hardware, axis: str) -> Network | None:
    """The network that the mesh axis of this name goes over; ``None`` for the links of a slice.

    It is the network with this name, or the outermost one if the name has the word ``dcn``.
    """
    for network in hardware.networks:
        if network.axis == axis:
            return network
    return hardware.networks[-1] if hardware.networks and _DATA_CENTRE.fullmatch(axis) else None


def network_axes(
    hardware: Hardware, axes: Sequence[str]
) -> tuple[tuple[Network, tuple[str, ...]], ...]:
    """The networks that some of ``axes`` go over, each with these, from the innermost one."""
    over = {axis: network_of(hardware, axis) for axis in axes}
    found = (
        (network, tuple(axis for axis in axes if over[axis] is network))
        for network in hardware.networks
    )
    return tuple(entry for entry in found if entry[1])


__all__ = ["is_network_name", "network_axes", "network_of"]
