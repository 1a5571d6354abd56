"""Devices, meshes of devices, and the time of collectives on them."""

from toast.hardware.collective_prices import COLLECTIVES, Algorithm, Collectives, check_size
from toast.hardware.description import (
    ASYNCHRONOUS,
    Hardware,
    Interconnect,
    Measured,
    Network,
    Protocol,
)
from toast.hardware.device_files import load, names
from toast.hardware.mesh import Mesh
from toast.hardware.product_prices import ProductPrices
from toast.hardware.shapes import meshes_of

__all__ = [
    "ASYNCHRONOUS", "COLLECTIVES", "Algorithm", "Collectives", "Hardware", "Interconnect",
    "Measured", "Mesh", "Network", "ProductPrices", "Protocol", "check_size", "load", "meshes_of",
    "names",
]  # fmt: skip
