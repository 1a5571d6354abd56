"""What the prices of a device stand on, and the energy of a step, in lines below a plan."""

from __future__ import annotations

from toast.boundary.printable import printable
from toast.hardware import Hardware
from toast.plan import Plan


def price_basis(hardware: Hardware) -> list[str]:
    """Lines on the prices of products and of collectives, if the hardware file says it."""
    stated = {"products": hardware.products_basis, "collectives": hardware.collectives_basis}
    return [f"Prices of {what}: {printable(text)}" for what, text in stated.items() if text]


def most_joules(plan: Plan) -> float | None:
    """The most energy of a step: all devices take the power of the datasheet all the time.

    Hosts, switches and cooling come on top.  ``None`` if the hardware file has no power.
    """
    if plan.hardware.power_w is None:
        return None
    return plan.hardware.power_w * plan.mesh.devices * plan.after.step_seconds


def energy_text(plan: Plan) -> str:
    """The most energy of a step, such as ``Energy of a step: at most 2.8 kJ (8 x 700 W)``."""
    joules = most_joules(plan)
    if joules is None:
        return ""
    unit, size = next(
        ((unit, size) for unit, size in (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)) if joules >= size),
        ("mJ", 1e-3),
    )
    number = joules / size
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return (
        f"Energy of a step: at most {digits} {unit} ({plan.mesh.devices} x "
        f"{plan.hardware.power_w:g} W by the datasheet), without hosts and switches"
    )


def basis_lines(plan: Plan) -> list[str]:
    """All lines on a plan; none for devices whose files say nothing."""
    return [*price_basis(plan.hardware), *filter(None, [energy_text(plan)])]


__all__ = ["basis_lines", "energy_text", "most_joules", "price_basis"]
