"""The rows of the paper's grid where no sharding fits, with recomputation and offload as well.

    python benchmarks/grid_memory.py [--only MODEL] [--hardware DEVICE] [--write]

The rows are the models, devices and meshes of Figures 8 and 9, and the models of the zoo of which
no sharding fits 32 TPU v3, on all of these devices.  The script plans shardings alone.  Where that
plan does not fit, it plans again with ``remat="auto"``.  Where that does not fit either, the row
has the memory that every plan needs at least; if that is above the limit, none fits.

A row of benchmarks/grid_memory.csv has one place; rows that are there already are not planned again
(``--again`` does).  ``--write`` puts the whole table into docs/memory-accuracy.md, whatever was
planned.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from evaluation import HARDWARE, MESHES, MODELS, ROOT, versions, write_section

import toast
from toast.cli.elapsed import steps
from toast.models import build
from toast.plan import least_memory
from toast.units import size_text, time_text

PAGE = ROOT / "docs" / "memory-accuracy.md"
TABLE = pathlib.Path(__file__).resolve().parent / "grid_memory.csv"
COLUMNS = (
    "model", "hardware", "mesh", "limit_gib", "sharding_fits", "sharding_ms", "sharding_gib",
    "fits", "step_ms", "peak_gib", "microbatches", "policy", "least_gib", "seconds",
)  # fmt: skip

#: Models of the zoo beside those of Figures 8 and 9, on the larger mesh.
OTHERS = ("moe-scan", "moe", "llama3-8b-scan", "llama3-8b", "t7b-scan")


class Place(NamedTuple):
    """A model on a mesh of a device."""

    model: str
    hardware: str
    mesh: str


def places() -> list[Place]:
    """All rows of the grid."""
    figures = [Place(model, device, mesh) for model in MODELS for device in HARDWARE
               for mesh in MESHES]  # fmt: skip
    return figures + [Place(model, device, MESHES[1]) for model in OTHERS for device in HARDWARE]


def measure(place: Place) -> dict[str, Any]:
    """The row of a place: the plan of shardings, and the joint plan if that does not fit."""
    target = build(place.model)
    plan = toast.plan(target, mesh=place.mesh, hardware=place.hardware)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {
        **place._asdict(),
        "limit_gib": _gib(plan.memory_bytes),
        "sharding_fits": plan.fits,
        "sharding_ms": round(plan.after.step_seconds * 1e3, 2),
        "sharding_gib": _gib(plan.after.peak_bytes),
    }
    if plan.fits:
        return row
    begin = time.perf_counter()
    plan = toast.plan(target, mesh=place.mesh, hardware=place.hardware, remat="auto")
    policy = plan.policy and (plan.policy.preset or "by name")
    return row | {
        "fits": plan.fits,
        "step_ms": round(plan.after.step_seconds * 1e3, 2),
        "peak_gib": _gib(plan.after.peak_bytes),
        "microbatches": plan.microbatches,
        "policy": policy or "",
        "least_gib": _gib(least_memory(plan)),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def verdict(row: Mapping[str, Any]) -> str:
    """Whether the plan with a policy fits, or the proof that none does."""
    if str(row["fits"]) == "True":
        return "fits"
    least, limit = _size(row["least_gib"]), _size(row["limit_gib"])
    if float(row["least_gib"]) > float(row["limit_gib"]):
        return f"no plan fits: at least {least} of {limit}"
    return f"no plan found; the bound is {least} of {limit}"


def line(row: Mapping[str, Any]) -> str:
    """The line of a row in the table of the page."""
    cells = (
        row["model"], row["hardware"], row["mesh"], _time(row["sharding_ms"]),
        _size(row["sharding_gib"]), _time(row["step_ms"]), _size(row["peak_gib"]),
        row["policy"] or "-", row["microbatches"], _size(row["limit_gib"]), verdict(row),
        time_text(float(row["seconds"])),
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def page_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The section of the page."""
    unfit = [row for row in rows if str(row["sharding_fits"]) != "True"]
    joint = [row for row in unfit if str(row["fits"]) == "True"]
    proof = ""
    if len(joint) < len(unfit):
        none = [row for row in unfit if verdict(row).startswith("no plan fits")]
        proof = f", and that no plan fits is proved in {len(none)}"
    return (
        f"Written by `benchmarks/grid_memory.py --write` with {versions()}. Shardings alone fit in "
        f"{len(rows) - len(unfit)} of {len(rows)} rows of {', '.join(models_of(rows))}. Of the "
        f"other {len(unfit)}, a plan with a policy fits in {len(joint)}{proof}. The machine was "
        "busy with other work: planning took longer than alone.\n\n"
        "| model | hardware | mesh | shardings alone | peak | with a policy | peak | policy "
        "| microbatches | limit | verdict | planning |\n"
        "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: |\n"
        + "\n".join(map(line, unfit))
    )  # fmt: skip


def models_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The models of rows, each once."""
    return list(dict.fromkeys(row["model"] for row in rows))


def read_rows() -> dict[Place, dict[str, Any]]:
    """The rows of the table."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {Place(row["model"], row["hardware"], row["mesh"]): row for row in rows}


def write_rows(rows: Mapping[Place, Mapping[str, Any]]) -> None:
    """Writes the table, in the order of the grid."""
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[place] for place in places() if place in rows)


def planned(wanted: Sequence[Place], *, again: bool) -> Iterator[dict[str, Any]]:
    """The rows of places; each new one is in the table before the next is planned."""
    rows = read_rows()
    missing = [place for place in wanted if again or place not in rows]
    for place in steps(missing, " ".join):
        row = measure(place)
        # Another run may have added rows.
        write_rows({**read_rows(), place: row})
    rows = read_rows()
    yield from (rows[place] for place in wanted)


def _gib(size: float) -> float:
    return round(size / 2**30, 3)


def _size(gib: Any) -> str:
    return size_text(float(gib) * 2**30)


def _time(ms: Any) -> str:
    return time_text(float(ms) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=(*MODELS, *OTHERS), action="append", help="repeatable")
    parser.add_argument("--hardware", choices=HARDWARE, action="append", help="repeatable")
    parser.add_argument("--again", action="store_true", help="plan rows of the table again")
    parser.add_argument("--write", action="store_true", help="write docs/memory-accuracy.md")
    options = parser.parse_args()
    wanted = [
        place for place in places()
        if place.model in (options.only or place.model)
        and place.hardware in (options.hardware or place.hardware)
    ]  # fmt: skip
    rows = list(planned(wanted, again=options.again))
    text = page_text(rows)
    print(text)
    if options.write:
        table = read_rows()
        write_section(PAGE, "grid", page_text([table[p] for p in places() if p in table]))


if __name__ == "__main__":
    main()
