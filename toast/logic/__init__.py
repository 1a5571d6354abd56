"""The boundary to clingo: nothing else in TOAST imports it."""

from toast.logic.engine import (
    Declaration,
    Predicate,
    Term,
    check_rules,
    derivations,
    input_predicates,
    kind_line,
    read_facts,
    rule_line,
    schema,
    show_term,
    solve,
)

__all__ = [
    "Declaration",
    "Predicate",
    "Term",
    "check_rules",
    "derivations",
    "input_predicates",
    "kind_line",
    "read_facts",
    "rule_line",
    "schema",
    "show_term",
    "solve",
]
