"""What a plan's file may have opened for it: data beside it, never code and no other path."""

from __future__ import annotations

from toast.boundary.printable import shortened
from toast.boundary.regular_files import beside
from toast.errors import PlanError
from toast.hardware import Hardware, load, names
from toast.plan.files import Saved, hardware_digest


def machine_of(saved: Saved) -> Hardware:
    """The device that a plan's file was made for.

    A file may name a shipped device, or a hardware file beside itself with the figures that the
    plan was made with.  Raises :class:`toast.errors.PlanError` where the caller has to say which
    hardware it was.
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
        f"{saved.name}: its hardware {shortened(wanted)!r} is neither a shipped device nor a file "
        "in the plan's folder with the same figures; give hardware='FILE.toml'",
        shell="add --hardware FILE",
    )
