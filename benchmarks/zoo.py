"""Every model of the zoo by every method: steps and search times; a part of docs/evaluation.md.

    python benchmarks/zoo.py [--quick] [--limit SECONDS] [--times N] [--only MODEL]

On one mesh of one device.  With ``--times 26`` AutoMap may take 26 times as long as TOAST's search,
so that it shows whether it needs 25 times as long; an hour, or more.
"""

from __future__ import annotations

from evaluation import (
    cells,
    made_with,
    measured,
    options_of,
    standing,
    step_findings,
    step_table,
    write_section,
)
from figure9 import findings, table_of

from toast.models import ZOO

HARDWARE = "tpu-v3"
MESH = "data=8,model=4"
#: Models whose searches take no more than a second or two.
QUICK = ("t2b-tiny", "itx-scan", "mlp", "attention")


def main() -> None:
    options = options_of(__doc__)
    models = [(name, (), MESH) for name in (QUICK if options.quick else ZOO)]
    table = measured(cells(models, [HARDWARE], options.limit), options)
    write_section(
        options.page,
        "zoo",
        f"{made_with('zoo.py', options, table)}\n\n"
        "Predicted step times in ms; OOM: predicted not to fit.\n\n"
        f"{step_table(table)}\n\n"
        + "\n".join(step_findings(table))
        + f"\n\nTOAST first, or as fast as the first: {standing(table).verdict}.\n\n"
        "Search times in seconds, without the analysis.\n\n"
        f"{table_of(table)}\n\n" + "\n".join(findings(table, options.limit, options.times)) + "\n",
    )


if __name__ == "__main__":
    main()
