"""Step and search times of all methods on all models of the zoo; a part of docs/evaluation.md.

    python benchmarks/zoo.py [--quick] [--limit SECONDS] [--times N] [--only MODEL]

The grid has one mesh and one device.  With ``--times 26``, AutoMap may take 26 times as long as
TOAST's search, which is enough to see a ratio of 25.  This takes an hour or more.
"""

from __future__ import annotations

from evaluation import (
    cells,
    measured,
    options_of,
    provenance,
    standing,
    step_findings,
    step_table,
    write_section,
)
from figure9 import findings, table_of

from toast.models import ZOO

HARDWARE = "tpu-v3"
MESH = "data=8,model=4"
#: Models whose searches take at most two seconds.
QUICK = ("t2b-tiny", "itx-scan", "mlp", "attention")


def main() -> None:
    options = options_of(__doc__)
    models = [(name, (), MESH) for name in (QUICK if options.quick else ZOO)]
    table = measured(cells(models, [HARDWARE], options.limit), options)
    write_section(
        options.page,
        "zoo",
        f"{provenance('zoo.py', options, table)}\n\n"
        "Predicted step times in ms; OOM: the plan is predicted not to fit.\n\n"
        f"{step_table(table)}\n\n"
        + "\n".join(step_findings(table))
        + "\n\nTOAST is the fastest, or as fast as the fastest: this "
        + f"{standing(table).verdict}.\n\n"
        "Search times in seconds, without the analysis.\n\n"
        f"{table_of(table)}\n\n" + "\n".join(findings(table, options.limit, options.times)) + "\n",
    )


if __name__ == "__main__":
    main()
