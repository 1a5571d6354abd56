"""Figure 9: search times on the grid of Figure 8; writes its part of docs/evaluation.md.

    python benchmarks/figure9.py [--quick] [--limit SECONDS] [--times N]

Uses the results of figure8.py if they exist.
"""

from __future__ import annotations

import statistics

from evaluation import (
    SAME,
    Row,
    Table,
    bars,
    grid,
    measured,
    options_of,
    provenance,
    seconds_text,
    stopped,
    time_panels,
    write_section,
)

#: Methods that search; the others try known plans or make no choices.
SEARCHES = ("toast", "automap", "alpa")


#: The paper's ratio of AutoMap's search time to TOAST's, on the U-Net and GNS.
PAPER = 25


def ratio(methods: dict[str, Row], method: str) -> float | None:
    """A method's search time over TOAST's; None if one of them has no plan."""
    rows = methods[method], methods["toast"]
    if any(row["error"] for row in rows):
        return None
    return float(rows[0]["search_seconds"] / rows[1]["search_seconds"])


def ratio_text(methods: dict[str, Row], method: str) -> str:
    value = ratio(methods, method)
    if value is None:
        return "-"
    return ("at least " if stopped(methods[method]) else "") + f"{value:.1f}"


def table_of(table: Table) -> str:
    lines = [
        "| model | hardware | mesh | analysis | toast | automap | alpa | automap over toast "
        "| alpa over toast |",
        "| --- | --- | --- |" + " ---: |" * 6,
    ]
    for place, methods in table.items():
        times = " | ".join(seconds_text(methods[method]) for method in SEARCHES)
        ratios = " | ".join(ratio_text(methods, method) for method in SEARCHES[1:])
        spent = methods["toast"]["analysis_seconds"]
        lines.append(f"| {' | '.join(place)} | {spent:.2g} | {times} | {ratios} |")
    return "\n".join(lines)


def findings(table: Table, limit: float, times: float = 0.0) -> list[str]:
    """Sentences about the ratios, and about what the limit hides.

    ``limit`` is in seconds.  AutoMap's limit was ``times`` TOAST's search time if that is longer.
    """
    lines, verdict = [], "holds"
    for method in SEARCHES[1:]:
        ratios = {
            place: value
            for place, methods in table.items()
            if (value := ratio(methods, method)) is not None
        }
        failed = len(table) - len(ratios)
        without = f" No ratio in {failed} of {len(table)} rows, because a method has no plan."
        if not ratios:
            lines.append(f"* {method}:{without}")
            continue
        limited = [place for place in ratios if stopped(table[place][method])]
        below = [place for place, value in ratios.items() if value < 1]
        # If the limit ended a search, its true ratio is larger and may be above 1.
        faster = [place for place in below if place not in limited]
        unknown = [place for place in below if place in limited]
        lines.append(
            f"* {method}: {statistics.median(ratios.values()):.1f} times TOAST's search time "
            f"(median; {min(ratios.values()):.1f} to {max(ratios.values()):.1f}). The limit ended "
            f"the search in {len(limited)} of {len(ratios)} rows, where the true ratio is larger."
            + _named(" Faster than TOAST in ", faster)
            + _named(" The limit ended it before TOAST's search in ", unknown)
            + (without if failed else "")
        )
        if faster:
            verdict = "does not hold in the rows listed above"
        elif unknown and verdict == "holds":
            verdict = "is undecided where the limit ended a search before TOAST's"
    if any(methods["toast"]["error"] for methods in table.values()):
        verdict = "does not hold where TOAST has no plan"
    lines.append(
        f"\nIn the paper's figure, TOAST's search is the fastest in all rows. Here this {verdict}."
    )
    return [*lines, *(automap_findings(table) if times >= PAPER else seen_under(limit, table))]


def automap_findings(table: Table) -> list[str]:
    """The number of rows where AutoMap needs the paper's ratio and finds no better plan."""
    far = list[tuple[str, ...]]()
    near = list[tuple[str, ...]]()
    for place, methods in table.items():
        value, rows = ratio(methods, "automap"), (methods["toast"], methods["automap"])
        if value is not None:
            good = value >= PAPER and rows[0]["cost"] <= (1 + SAME) * rows[1]["cost"]
            (far if good else near).append(place)
    return [
        f"\nAutoMap takes at least {PAPER} times as long as TOAST and finds no better plan in "
        f"{len(far)} of {len(far) + len(near)} rows." + _named(" Exceptions: ", near)
    ]


def seen_under(limit: float, table: Table) -> list[str]:
    """The ratios that can be measured under AutoMap's limit, in seconds."""
    ours = [m["toast"]["search_seconds"] for m in table.values() if not m["toast"]["error"]]
    if not ours:
        return []
    enough = sum(limit / seconds >= PAPER for seconds in ours)
    return [
        "\nIf the limit ended a search, its ratio is a lower bound. AutoMap's limit of "
        f"{limit:g} s is {limit / max(ours):.1f} to {limit / min(ours):.1f} times TOAST's search "
        f"time here, so larger ratios cannot be measured: the paper's ratio of {PAPER}, on the "
        f"U-Net and GNS, could be measured in {enough} of {len(ours)} rows."
    ]


def _named(what: str, places: list[tuple[str, ...]]) -> str:
    return f"{what}{'; '.join(', '.join(place) for place in places)}." if places else ""


def main() -> None:
    options = options_of(__doc__)
    table = measured(grid(options.quick, options.limit), options)
    write_section(
        options.page,
        "figure 9",
        f"{provenance('figure9.py', options, table)}\n\n"
        "Search times in seconds, without the analysis, which all three methods use.\n\n"
        f"{table_of(table)}\n\n"
        + "\n".join(findings(table, options.limit, options.times))
        + "\n\n![Search times](figure9.svg)\n",
    )
    (options.page.parent / "figure9.svg").write_text(bars("search in s", time_panels(table)))


if __name__ == "__main__":
    main()
