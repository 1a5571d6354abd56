"""Devices and meshes: what a program is sharded for."""

from toast.hardware.collectives import COLLECTIVES, Algorithm, Collectives
from toast.hardware.description import Hardware, Interconnect, Measured, load, names
from toast.hardware.mesh import Mesh

__all__ = [
    "COLLECTIVES", "Algorithm", "Collectives", "Hardware", "Interconnect", "Measured", "Mesh",
    "load", "names",
]  # fmt: skip
