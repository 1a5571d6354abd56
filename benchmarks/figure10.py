"""Figure 10: T2B with long sequences on 3-D meshes; writes its part of docs/evaluation.md.

    python benchmarks/figure10.py [--quick] [--limit SECONDS]

Sequences of 8k, 16k and 32k on meshes of batch x sequence x model, 32 to 128 devices.  The paper
does not state the batch size.  It is 2 here, the size of the batch axis: the longest sequence fits.
"""

from __future__ import annotations

from evaluation import (
    HARDWARE,
    QUICK_LAYERS,
    Row,
    bars,
    cells,
    measured,
    options_of,
    provenance,
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
#: Steps that are at most this much longer than the experts' are comparable.
COMPARABLE = 0.05


def comparable(methods: dict[str, Row]) -> bool:
    """Whether TOAST has a plan that fits if the experts' plan fits, and is about as fast."""
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
        f"{provenance('figure10.py', options, table)}\n\n"
        "Predicted step times in ms; OOM: the plan is predicted not to fit.\n\n"
        f"{step_table(table)}\n\n"
        + "\n".join(step_findings(table))
        + "\n\nIn the paper's figure, TOAST's plans fit and are comparable to manual plans. Here "
        "TOAST's plan fits if the manual plan does, and its step is at most "
        f"{COMPARABLE:.0%} longer, in {near} of {len(table)} rows.\n\nSearch times in seconds:\n\n"
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
