"""Devices and meshes: what a program is sharded for."""

from toast.hardware.description import Hardware, Interconnect, load, names
from toast.hardware.links import Links, axis_links
from toast.hardware.mesh import Mesh

__all__ = ["Hardware", "Interconnect", "Links", "Mesh", "axis_links", "load", "names"]
