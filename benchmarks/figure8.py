"""Figure 8: step times of five models on three devices; writes its part of docs/evaluation.md.

    python benchmarks/figure8.py [--quick] [--limit SECONDS]

The full grid takes hours, mostly for the baselines' searches.  An interrupted run continues where
it stopped.
"""

from __future__ import annotations

from evaluation import (
    bars,
    grid,
    measured,
    options_of,
    provenance,
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
        f"{provenance('figure8.py', options, table)}\n\n"
        "Predicted step times in ms; OOM: the plan is predicted not to fit.\n\n"
        f"{step_table(table)}\n\n"
        + "\n".join(step_findings(table))
        + "\n\nIn the paper's figure, TOAST is the fastest in all rows, or close to manual plans "
        + f"on TPUs. Here this {standing(table).verdict}.\n\n![Step times](figure8.svg)\n",
    )
    (options.page.parent / "figure8.svg").write_text(bars("step in ms", step_panels(table)))


if __name__ == "__main__":
    main()
