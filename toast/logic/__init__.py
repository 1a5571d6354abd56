"""The interface to clingo; no other package of TOAST imports clingo."""

from toast.logic.closures import Edges
from toast.logic.engine import (
    Declaration,
    Predicate,
    Term,
    check_ends,
    check_heads,
    check_rules,
    declarations,
    derivations,
    input_predicates,
    kind_line,
    kinds_of_heads,
    read_facts,
    read_files,
    rule_line,
    schema,
    show_term,
    solve,
)
from toast.logic.overflow import LARGEST
from toast.logic.queries import Query, as_term, ask, read_audit, read_query
from toast.logic.strata import LogicModel
from toast.logic.texts import LogicText

__all__ = [
    "LARGEST",
    "Declaration",
    "Edges",
    "LogicModel",
    "LogicText",
    "Predicate",
    "Query",
    "Term",
    "as_term",
    "ask",
    "check_ends",
    "check_heads",
    "check_rules",
    "declarations",
    "derivations",
    "input_predicates",
    "kind_line",
    "kinds_of_heads",
    "read_audit",
    "read_facts",
    "read_files",
    "read_query",
    "rule_line",
    "schema",
    "show_term",
    "solve",
]
