"""Figure 8: step times of five models on three devices; writes its part of docs/evaluation.md.

    python benchmarks/figure8.py [--quick] [--limit SECONDS]

The full grid takes hours, most of them the baselines' searches; it goes on where it was broken off.
"""

from __future__ import annotations

from evaluation import (
    bars,
    grid,
    made_with,
    measured,
    options_of,
    standing,
    step_findings,
    step_panels,
    step_table,
    write_section,
)


def main() -> None:
    options = options_of(__doc__)
    table = measured(grid(options.quick, options.limit), options)
    write_section(
        options.page,
        "figure 8",
        f"{made_with('figure8.py', options, table)}\n\n"
        "Predicted step times in ms; OOM: predicted not to fit.\n\n"
        f"{step_table(table)}\n\n"
        + "\n".join(step_findings(table))
        + "\n\nThe paper's figure has TOAST first, or close to manual plans on TPUs, everywhere: "
        + standing(table).verdict
        + ".\n\n![Step times](figure8.svg)\n",
    )
    (options.page.parent / "figure8.svg").write_text(bars("step in ms", step_panels(table)))


if __name__ == "__main__":
    main()
