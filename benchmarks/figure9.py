"""Figure 9: search times on the grid of Figure 8; writes its part of docs/evaluation.md.

    python benchmarks/figure9.py [--quick] [--limit SECONDS]

Draws from the results of figure8.py where there are some.
"""

from __future__ import annotations

import statistics

from evaluation import (
    Row,
    Table,
    bars,
    grid,
    made_with,
    measured,
    options_of,
    seconds_text,
    stopped,
    time_panels,
    write_section,
)

#: What searches; the others only try what is known, or do not choose.
SEARCHES = ("toast", "automap", "alpa")


def ratio(methods: dict[str, Row], method: str) -> float:
    return float(methods[method]["search_seconds"] / methods["toast"]["search_seconds"])


def table_of(table: Table) -> str:
    lines = [
        "| model | hardware | mesh | analysis | toast | automap | alpa | automap over toast "
        "| alpa over toast |",
        "| --- | --- | --- |" + " ---: |" * 6,
    ]
    for place, methods in table.items():
        times = " | ".join(seconds_text(methods[method]) for method in SEARCHES)
        ratios = " | ".join(
            ("at least " if stopped(methods[m]) else "") + f"{ratio(methods, m):.1f}"
            for m in SEARCHES[1:]
        )
        spent = methods["toast"]["analysis_seconds"]
        lines.append(f"| {' | '.join(place)} | {spent:.2g} | {times} | {ratios} |")
    return "\n".join(lines)


def findings(table: Table) -> list[str]:
    lines = []
    for method in SEARCHES[1:]:
        ratios = {place: ratio(methods, method) for place, methods in table.items()}
        faster = [place for place, value in ratios.items() if value < 1]
        limited = sum(stopped(methods[method]) for methods in table.values())
        lines.append(
            f"* {method}: {statistics.median(ratios.values()):.1f} times TOAST's search time in "
            f"the median, {min(ratios.values()):.1f} to {max(ratios.values()):.1f}; ended by the "
            f"limit in {limited} of {len(ratios)} rows, where the true ratio is larger."
            + (
                " Faster than TOAST in " + "; ".join(", ".join(p) for p in faster) + "."
                if faster
                else ""
            )
        )
    slow = any(ratio(m, method) < 1 for m in table.values() for method in SEARCHES[1:])
    lines.append(
        "\nThe paper's figure has TOAST's search the fastest everywhere: "
        + ("missed in the rows named above." if slow else "met.")
        + " Its 25 times for AutoMap on the U-Net and GNS can be seen only where no limit ends "
        "AutoMap."
    )
    return lines


def main() -> None:
    options = options_of(__doc__)
    table = measured(grid(options.quick, options.limit), options)
    write_section(
        options.page,
        "figure 9",
        f"{made_with('figure9.py', options, table)}\n\n"
        "Search times in seconds. The analysis, on which all stand here, is not in them.\n\n"
        f"{table_of(table)}\n\n"
        + "\n".join(findings(table))
        + "\n\n![Search times](figure9.svg)\n",
    )
    (options.page.parent / "figure9.svg").write_text(bars("search in s", time_panels(table)))


if __name__ == "__main__":
    main()
