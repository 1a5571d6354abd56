"""A plan as one HTML file that opens offline.

Templates, styles and scripts are files in this folder; the page contains copies of them.  The page
needs no network, and its Content-Security-Policy forbids all requests.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from toast.errors import PlanError
from toast.evaluation.compare import MethodResult
from toast.files import write_all
from toast.plan import Plan
from toast.report.html import drawing
from toast.report.html.data import gather
from toast.report.html.page_origin import PageOrigin
from toast.report.verdict import baseline_text, multiple, rounded
from toast.units import size_text, time_text

#: Files of ``scripts``, in the order of execution.
_SCRIPTS = (
    "page",
    "program",
    "lanes",
    "mesh",
    "plans",
    "timeline",
    "conflicts",
    "listing",
    "search",
)

__all__ = ["PageOrigin", "best_plan", "comparison_html", "gather", "html_text", "write_html"]


def html_text(
    plan: Plan,
    compared: Sequence[MethodResult] = (),
    sources: pathlib.Path | None = None,
    policies: Sequence[Plan] = (),
    *,
    origin: PageOrigin | None = None,
    names: Mapping[str, str] | None = None,
) -> str:
    """The report of a plan as HTML text in ASCII.

    ``compared`` has the results of other methods (the section "Methods" is missing without them).
    ``policies`` are plans of the same step with other memory policies, such as ``remat="none"`` and
    ``"full"``, whose memory is drawn beside that of the plan.
    The report shows source lines of programs that were traced in this process, and of files below
    the folder ``sources``: a StableHLO file can name any file as the place of an op.
    ``origin`` has the command and the date on the page; by default, the command of the plan, and
    today.  ``names`` are names of dimensions, such as ``{"tokens:0": "batch"}``, beside those that
    follow from the arguments; ``*`` matches any text.  Raises :class:`toast.errors.PlanError` if a
    name matches no dimension.

    The element with the id ``data`` contains the result of :func:`gather` as JSON.
    """
    data = gather(plan, compared, sources, policies, origin=origin, names=names)
    style, script = _file("report.css"), _script()
    text = _environment().get_template("report.html.jinja").render(
        data=data,
        json=_json(data),
        style=Markup(style),
        script=Markup(script),
        policy=(
            f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
            "base-uri 'none'; form-action 'none'"
        ),
    )  # fmt: skip
    return text.encode("ascii", "xmlcharrefreplace").decode()


def comparison_html(
    rows: Sequence[MethodResult],
    sources: pathlib.Path | None = None,
    policies: Callable[[Plan], Sequence[Plan]] = lambda _: (),
    *,
    origin: PageOrigin | None = None,
    names: Mapping[str, str] | None = None,
) -> str:
    """The report of TOAST's plan, or of the best plan of another method, with all ``rows``.

    ``rows`` are the results of :func:`toast.evaluation.compare.compare`; ``sources`` is as for
    :func:`html_text`, and so are the plans that ``policies`` makes of the best plan,
    ``origin`` and ``names``.  Raises :class:`toast.errors.PlanError` if no method has a plan.
    """
    plan = best_plan(rows)
    compared = rows if len(rows) > 1 else ()
    return html_text(plan, compared, sources, policies(plan), origin=origin, names=names)


def best_plan(rows: Sequence[MethodResult]) -> Plan:
    """TOAST's plan, or the best of another method.

    Raises :class:`toast.errors.PlanError` if no method has a plan.
    """
    plans = [row.plan for row in rows if row.plan is not None]
    if not plans:
        names = ", ".join(row.method for row in rows)
        raise PlanError(
            rows[0].error if len(rows) == 1
            else f"no report: {names} found no plan; {rows[0].method}: {rows[0].error}"
        )  # fmt: skip
    return min(plans, key=lambda plan: (plan.method != "toast", plan.cost))


def write_html(
    plan: Plan,
    path: str | pathlib.Path,
    compared: Sequence[MethodResult] = (),
    policies: Sequence[Plan] = (),
    **options: Any,
) -> None:
    """Write :func:`html_text` of ``plan``, ``compared`` and ``policies`` to the file ``path``.

    ``options`` are its ``origin`` and ``names``.

    Raises :class:`toast.errors.PlanError` if the file cannot be written; no partial file remains.
    """
    write_all({path: html_text(plan, compared, policies=policies, **options)}, PlanError)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("toast.report.html", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(size=size_text, time=time_text, multiple=multiple, rounded=rounded)
    environment.globals.update(drawing=drawing, baseline_text=baseline_text)
    return environment


@functools.cache
def _file(name: str) -> str:
    return importlib.resources.files(__name__).joinpath(name).read_text(encoding="ascii")


@functools.cache
def _script() -> str:
    """All scripts in one function; each can use the declarations of earlier ones."""
    parts = "\n".join(_file(f"scripts/{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _json(data: dict[str, Any]) -> Markup:
    """JSON without ``<``, ``>`` and ``&``, so that no name can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("ascii")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
