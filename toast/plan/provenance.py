"""The hardware of a plan file: a plan file may only open data in its own folder."""

from __future__ import annotations

from toast.boundary.printable import shortened
from toast.boundary.regular_files import beside
from toast.errors import PlanError
from toast.hardware import Hardware, load, names
from toast.plan.files import Saved, hardware_digest


def machine_of(saved: Saved) -> Hardware:
    """The device of a plan file.

    A plan file may name an included device, or a hardware file in its own folder with the figures
    of the plan.  Raises :class:`toast.errors.PlanError` otherwise; the caller must then name the
    hardware.
    """
    wanted = (saved.origin.hardware if saved.origin else "") or saved.hardware
    if wanted in names():
        return load(wanted)
    if saved.path is not None and wanted.endswith(".toml"):
        near = beside(saved.path, wanted)
        machine = None if near is None else load(near)
        if machine and hardware_digest(machine) == saved.hardware_digest:
            return machine
    raise PlanError(
        f"{saved.name}: its hardware {shortened(wanted)!r} is neither an included device nor a "
        "file in the plan's folder with the same figures; use hardware='FILE.toml'",
        shell="add --hardware FILE",
    )
