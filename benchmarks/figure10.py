"""Figure 10: T2B with long sequences on 3-D meshes; writes its part of docs/evaluation.md.

    python benchmarks/figure10.py [--quick] [--limit SECONDS]

Sequences of 8k, 16k and 32k on meshes of batch x sequence x model, 32 to 128 devices.  The paper
does not tell the batch; it is 2 here, as the mesh's batch axis, with which the longest fits.
"""

from __future__ import annotations

from evaluation import (
    HARDWARE,
    QUICK_LAYERS,
    Row,
    bars,
    cells,
    made_with,
    measured,
    options_of,
    seconds_text,
    step_findings,
    step_panels,
    step_table,
    time_panels,
    write_section,
)

from toast.evaluation.compare import METHODS

#: Sequence lengths and devices along the sequence.
SEQUENCES = ((8192, 8), (16384, 16), (32768, 32))
BATCH = 2
#: Steps within this of the experts' are comparable.
COMPARABLE = 0.05


def comparable(methods: dict[str, Row]) -> bool:
    """Whether TOAST's plan is one, fits where the experts' does, and is about as fast."""
    ours, experts = methods["toast"], methods["manual"]
    if ours["error"] or experts["error"]:
        return not ours["error"]
    longest = (1 + COMPARABLE) * experts["step_seconds"]
    return bool(ours["fits"] >= experts["fits"] and ours["step_seconds"] <= longest)


def main() -> None:
    options = options_of(__doc__)
    layers = (("layers", QUICK_LAYERS),) if options.quick else ()
    models = [
        ("t2b", (*layers, ("sequence", length), ("batch", BATCH)), f"batch=2,seq={size},model=2")
        for length, size in SEQUENCES
    ]
    table = measured(cells(models, HARDWARE, options.limit), options)
    near = sum(comparable(methods) for methods in table.values())
    times = "\n".join(
        f"| {' | '.join(place)} | {' | '.join(seconds_text(methods[m]) for m in METHODS)} |"
        for place, methods in table.items()
    )
    write_section(
        options.page,
        "figure 10",
        f"{made_with('figure10.py', options, table)}\n\n"
        "Predicted step times in ms; OOM: predicted not to fit.\n\n"
        f"{step_table(table)}\n\n"
        + "\n".join(step_findings(table))
        + f"\n\nThe paper's figure has TOAST fit and be comparable to manual plans; within "
        f"{COMPARABLE:.0%} of them: {near} of {len(table)} rows, "
        + ("met" if near == len(table) else "missed")
        + ".\n\nSearch times in seconds:\n\n"
        f"| model | hardware | mesh | {' | '.join(METHODS)} |\n"
        f"| --- | --- | --- |{' ---: |' * len(METHODS)}\n{times}\n\n"
        "![Step times](figure10-step.svg)\n\n![Search times](figure10-search.svg)\n",
    )
    (options.page.parent / "figure10-step.svg").write_text(bars("step in ms", step_panels(table)))
    (options.page.parent / "figure10-search.svg").write_text(
        bars("search in s", time_panels(table))
    )


if __name__ == "__main__":
    main()
