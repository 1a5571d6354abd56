"""Devices and meshes: what a program is sharded for."""

from toast.hardware.collective_prices import COLLECTIVES, Algorithm, Collectives, check_size
from toast.hardware.description import Hardware, Interconnect, Measured, load, names
from toast.hardware.mesh import Mesh
from toast.hardware.shapes import meshes_of

__all__ = [
    "COLLECTIVES", "Algorithm", "Collectives", "Hardware", "Interconnect", "Measured", "Mesh",
    "check_size", "load", "meshes_of", "names",
]  # fmt: skip
