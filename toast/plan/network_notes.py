"""A note on mesh axes that are named after a network which the hardware file does not have."""

from __future__ import annotations

from toast.hardware import Hardware, Mesh
from toast.hardware.network_axes import is_network_name, network_of


def network_notes(hardware: Hardware, mesh: Mesh) -> list[str]:
    """A line on axes such as ``dcn`` that are priced as links between chips; none without them.

    An axis that goes over whole nodes of GPUs has the price of the network between these.
    """
    axes = mesh.real
    linked: list[str] = []
    inner = 1
    for number in reversed(axes.placed):
        name, size = axes.axes[number]
        nodes = hardware.interconnect.devices_per_node
        between_nodes = nodes > 0 and inner % nodes == 0
        inner *= size
        if (
            size > 1 and is_network_name(name) and network_of(hardware, name) is None
            and not between_nodes
        ):  # fmt: skip
            linked.insert(0, name)
    if not linked:
        return []
    one = len(linked) == 1
    named = f"{'axis' if one else 'axes'} {', '.join(linked)} {'has' if one else 'have'}"
    link = hardware.interconnect
    if link.topology == "torus":
        priced = "the price of links between chips"
    else:
        priced = f"the price of links in nodes of {link.devices_per_node} devices, at least in part"
    return [
        f"{hardware.name} has no [[network]] of this name, so {named} {priced}; "
        "describe the network in a hardware file (--hardware)"
    ]


__all__ = ["network_notes"]
