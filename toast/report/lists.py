"""Tables for ``toast rules``, ``toast models`` and ``toast query``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from toast.plan.origin import SIZES
from toast.text_tables import TextTable

if TYPE_CHECKING:
    import pandas as pd

    from toast.analysis import RuleEntry
    from toast.assurance.prove import Tally
    from toast.models.registry import Entry


def rule_list(entries: Iterable[RuleEntry], proven: Mapping[str, Mapping[str, str]]) -> TextTable:
    """A row for each rule; ``proven`` has the records of TOAST's own rules."""
    table = TextTable("kind", "file", "factors", "ops proven on")
    for entry in entries:
        group = "kernel " if entry.kernel else "custom_call " if entry.custom_call else ""
        name = f"{group}{entry.kind}"
        record = proven.get(name, {}) if entry.shipped else {}
        factors = record.get("factors", "-") if entry.shards else "need-replication"
        table.add_row(name, str(entry.file), factors, record.get("instances", "-"))
    return table


def proof_table(rows: Iterable[Tally]) -> TextTable:
    """A row for each op kind whose rule was run whole and in shards."""
    table = TextTable("kind", "instances", "factors proven", "wrong", "not run")
    for row in rows:
        table.add_row(row.kind, *map(str, (row.instances, row.proven, row.wrong, row.skipped)))
    return table


def model_list(models: Mapping[str, Entry]) -> TextTable:
    """A row for each model of the zoo."""
    table = TextTable("name", "description")
    table.add_column("parameters", justify="right")
    table.add_column("options")
    for name, entry in models.items():
        parameters = f"{entry.build().parameter_count:,}"
        sizes = [f"--{option}" for option in entry.options if option in SIZES]
        others = ", ".join(option for option in entry.options if option not in SIZES)
        options = [*sizes, f"--set {others}"] if others else sizes
        table.add_row(name, entry.summary, parameters, " ".join(options))
    return table


def audit_list(audits: Iterable[tuple[str, str, str]]) -> TextTable:
    """A row for each audit: its name, the option that it needs, and its answer."""
    return _rows(("audit", "needs", "answer"), audits)


def predicate_list(predicates: Iterable[tuple[str, str, str]]) -> TextTable:
    """A row for each predicate: an atom, the option that it needs, and its meaning."""
    return _rows(("predicate", "needs", "meaning"), predicates)


def answer_table(frame: pd.DataFrame) -> TextTable:
    """The rows of a query's answer; columns of numbers are aligned to the right."""
    from pandas.api.types import is_integer_dtype

    table = TextTable(header_style="")
    for name, kind in frame.dtypes.items():
        right = is_integer_dtype(kind)
        table.add_column(str(name), justify="right" if right else "left", overflow="fold")
    for row in frame.itertuples(index=False, name=None):
        table.add_row(*map(str, row))
    return table


def _rows(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> TextTable:
    table = TextTable(*heads)
    for row in rows:
        table.add_row(*row)
    return table
