"""Queries: columns, rows and order; the vocabulary; audits with known answers; bad input."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import pytest

import toast
from tests.helpers import analyzed, f32, mlp
from toast.analysis import query
from toast.analysis.query import SCHEMA_PREDICATES, facts
from toast.analysis.vocabulary import kib, turned
from toast.errors import QueryError
from toast.hardware import Mesh
from toast.logic import Term, show_term, solve
from toast.models import build
from toast.plan import Plan
from toast.resources import directory
from toast.space import Space
from toast.space.mesh_relations import relations as on_mesh

FACTS = directory("facts")
BASES = sorted(p for p in FACTS.glob("*.lp") if p.name != "schema.lp")
AUDITS = query.audits()
RULES = [
    FACTS / "schema.lp",
    *sorted(directory("rules").glob("*.lp")),
    *sorted((directory("rules") / "ops").glob("*.lp")),
    directory("rules") / "queries" / "vocabulary.lp",
]


@functools.cache
def figure(name: str) -> toast.Analysis:
    return toast.analyze(FACTS / f"{name}.lp")


@functools.cache
def planned() -> Plan:
    return toast.plan(
        mlp, f32(4096, 512), f32(512, 2048), f32(2048, 512), mesh="data=4,model=2",
        hardware="tpu-v5e",
    )  # fmt: skip


def rows(analysis: toast.Analysis | Plan, body: str) -> list[tuple[object, ...]]:
    return list(analysis.query(body).itertuples(index=False, name=None))


# -- columns, rows and order ----------------------------------------------------------------------


def test_the_example() -> None:
    frame = analyzed("t2b", layers=1).query("color(D,C), dim(D,V,_,Size), Size > 4096")
    assert list(frame.columns) == ["D", "C", "V", "Size"]
    assert frame.Size.min() > 4096
    assert frame.D.iloc[0] == "params['embedding']:0"
    assert frame.V.dtype == "int64"
    assert set(frame.Size) == {16384, 256128}
    color = dict(zip(frame.D, frame.C, strict=True))
    assert color["params['layers'][0]['gate']:1"] == color["params['layers'][0]['down']:0"]


def test_columns_are_the_variables_as_they_appear() -> None:
    analysis = figure("mlp")
    body = "dim(V,D,S), S > 32, not dim(_,D,16), rank(V,_Rank)"
    assert list(analysis.query(body).columns) == ["V", "D", "S"]
    assert list(analysis.query("N = #count { V : dim(V,_,S), S > 32 }").columns) == ["N"]
    assert list(analysis.query("op(O,_), 1 { operand(O,I,V) } 1").columns) == ["O"]
    named = analysis.query("pair(Size, D+1, Size) :- dim(_,D,Size).")
    assert list(named.columns) == ["Size", "(D+1)", "Size_2"]


def test_rows_are_distinct_and_sorted_numbers_first() -> None:
    assert rows(figure("mlp"), "dim(_,0,S)") == [(32,), (64,), (256,)]
    assert rows(figure("mlp"), "x(X) :- X = (2; b; 10; a; \"c d\"), op(_,_).") == [
        (2,), (10,), ("a",), ("b",), ("c d",)
    ]  # fmt: skip


def test_terms_are_decoded() -> None:
    analysis = figure("x_xt")
    text = 't(X,-3,"a\\"b\\\\c\\nd,(e") :- color(name(Op,F),_), X = def(Op), Op = 0.'
    assert rows(analysis, text) == [("def(0)", -3, 'a"b\\c\nd,(e')]
    assert rows(analysis, "X = (name(0,1),f(g(h(i(j(k(l))))))), op(0,_)") == [
        ("(x:1,f(g(h(i(j(k(l)))))))",)
    ]
    (label,) = rows(analysis, 'label(D,"x:1"), X = D')[0][:1]
    assert label == "x:1"


def test_a_body_without_variables_is_a_yes_or_no() -> None:
    assert len(figure("attention").query("conflict(_,_,_)")) == 1
    assert len(figure("mlp").query("conflict(_,_,_)")) == 0


def test_aggregates_and_several_rules() -> None:
    analysis = figure("attention")
    assert rows(analysis, "N = #count { A,B : conflict(A,B,_) }") == [(5,)]
    text = """% the matrix products, by how many conflicts they have
        at_op(Op,A,B) :- conflict(A,B,S), at(S,Op), op(Op,dot_general).
        many(Op,N) :- op(Op,dot_general), N = #count { A,B : at_op(Op,A,B) }."""
    found = dict(rows(analysis, text))
    assert sorted(found.values()) == [0, 0, 0, 1, 1]


def test_definitions_of_ones_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.lp"
    path.write_text(
        "%! wide(Value): it has a dimension of 100 or more.\nwide(V) :- dim(V,_,S), S >= 100.\n"
    )
    frame = figure("mlp").query("wide(V), argument(V,P)", rules=[path])
    assert frame.P.tolist() == ["x"]


def test_an_audit_of_ones_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "wide.lp"
    path.write_text(
        "%%% Wide arguments.\n% Sorted by: -Size.\n"
        "%! wide(Path, Size): it has a dimension of so many.\n"
        "wide(P,S) :- argument(V,P), dim(V,_,S), S > 32.\n"
    )
    assert rows(figure("mlp"), str(path)) == [("x", 256), ("w1", 64), ("w2", 64)]


# -- the vocabulary -------------------------------------------------------------------------------


def test_every_predicate_is_declared_and_given() -> None:
    given = figure("mlp").vocabulary.relations.keys()
    space = on_mesh(Space(figure("mlp"), Mesh.parse("d=2"))).keys()
    plan = planned().vocabulary.keys()
    sections = {n: {p for p, (_, m) in query.vocabulary().items() if m <= n} for n in (1, 2, 3)}
    assert given == SCHEMA_PREDICATES | sections[1]
    assert space == sections[2] - sections[1]
    assert plan == SCHEMA_PREDICATES | sections[3]
    assert all(declared.text for declared, _ in query.meanings())
    assert len(query.meanings()) == len(plan)


#: Named after members that logic and arrays may choose otherwise.
REPRESENTED = {
    ("color", 2), ("compatibility_set", 3), ("isomorphic", 2), ("argument_group", 2),
    ("color_group", 2),
}  # fmt: skip


@pytest.mark.parametrize("base", BASES, ids=lambda p: p.stem)
def test_what_queries_are_given_is_what_the_logic_says(base: pathlib.Path) -> None:
    analysis = figure(base.stem)
    in_logic = {("dim", 4), ("donated", 1), ("at", 2), ("crossed", 4), ("extent", 3)}
    asked = sorted(SCHEMA_PREDICATES | in_logic)
    show = [f"{name}/{arity}" for name, arity in asked]
    logic = solve(RULES, analysis.facts.to_lp(), show)
    given = facts(analysis.vocabulary.relations, asked)
    text = "".join(f"{name}{row}.\n" for (name, _), rows in given.items() for row in rows)
    ours = solve([], text, show)
    for predicate in asked:
        shown = f"{predicate[0]}/{predicate[1]}"
        said, given = set(logic[shown]), set(ours[shown])
        if predicate == ("extent", 3):
            assert sorted(row[1:] for row in said) == sorted(row[1:] for row in given)
        elif predicate in REPRESENTED:
            assert classes(said) == classes(given), shown
        elif predicate == ("factor_size", 3):
            assert said >= given  # a rule may know of factors that no dimension has
        else:
            assert said == given, shown


def classes(pairs: set[tuple[Term, ...]]) -> set[frozenset[str]]:
    found: dict[str, set[str]] = {}
    for *members, group in pairs:
        pair = frozenset(map(show_term, members))  # whichever way a conflict is turned
        found.setdefault(show_term(group), set()).add(str(sorted(pair)))
    return {frozenset(members) for members in found.values()}


def test_lowered_programs_have_sources() -> None:
    analysis = analyzed("t2b-tiny")
    frame = analysis.query("op(O,dot_general), source(O,F,L), primitive(O,P)")
    assert len(frame) > 5
    assert frame.F.str.endswith(".py").all()
    assert (frame.L > 0).all()
    assert frame.P.str.contains("dot_general").all()
    donated = analysis.query("donated(V), argument(V,P)")
    assert len(donated) == len(analysis.program.donated)


def test_relations_of_a_plan() -> None:
    plan = planned()
    spec: dict[str, list[list[str]]] = {p: [[] for _ in dims] for p, dims in plan.arguments.items()}
    for path, d, _position, axis in rows(
        plan, "a(Path,D,Position,Axis) :- argument(V,Path), sharding(V,D,Axis,Position)."
    ):
        spec[str(path)][int(str(d))].append(str(axis))
    assert {p: tuple(map(tuple, dims)) for p, dims in spec.items()} == plan.arguments
    assert dict(rows(plan, "mesh_axis(A,N)")) == {"data": 4, "model": 2}
    steps = plan.query("step(N,Axis,Why)")
    assert steps.Axis.tolist() == [step.axis for step in plan.steps]
    assert len(plan.query("resharded(O,I)")) == len(plan.shardings.uses)
    sums = plan.query("collective(Op,I,Kind,Axes,N,K,T), T > 0")
    nanos = 1e9 * plan.after.collective_seconds
    assert nanos <= sums["T"].sum() <= nanos + len(sums)


# -- audits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_says_what_it_answers(name: str) -> None:
    assert len(query.purpose(AUDITS[name])) > 30
    assert query.prepare(name).columns


@functools.cache
def small(name: str) -> toast.Analysis:
    return toast.analyze(build(name, small=True))


@pytest.mark.parametrize("name", AUDITS)
@pytest.mark.parametrize("model", ["mlp", "t2b", "moe", "unet", "gns-scan"])
def test_audits_of_models(name: str, model: str) -> None:
    """Those of a plan are tried on one."""
    asked, analysis = query.prepare(name), small(model)
    relations = analysis.vocabulary.relations
    if query.needs(asked) == 2:
        relations = {**relations, **on_mesh(Space(analysis, Mesh.parse("data=2,model=2")))}
    if query.needs(asked) == 3:
        analysis, relations = planned().analysis, planned().vocabulary
    frame = query.evaluate(asked, relations, analysis.label)
    assert tuple(frame.columns) == asked.columns
    json.dumps(frame.to_numpy(dtype=object).tolist())
    if name in ("largest_colors", "argument_groups"):
        assert len(frame)


def test_audits_of_figure_5() -> None:
    attention = figure("attention")
    assert rows(attention, "largest_colors") == [
        ("x:0", 29, 1, 128), ("x:1", 10, 4, 32), ("wq:1", 10, 2, 64), ("wv:1", 5, 1, 16),
    ]  # fmt: skip
    assert rows(attention, "conflicts_by_line") == [
        ("-", 0, "dot_general", 2), ("-", 0, "broadcast_in_dim", 1), ("-", 0, "divide", 1),
        ("-", 0, "reduce", 1),
    ]  # fmt: skip
    assert rows(attention, "shared_colors") == [
        ("x:1", "wk", 0, 32), ("x:1", "wq", 0, 32), ("x:1", "wv", 0, 32), ("x:1", "x", 1, 32),
        ("wq:1", "wk", 1, 64), ("wq:1", "wq", 1, 64),
    ]  # fmt: skip
    assert [row[1] for row in rows(attention, "argument_groups")] == [1, 1, 1, 1]


def test_audits_of_the_other_figures() -> None:
    assert rows(figure("mlp"), "largest_colors") == [
        ("w1:1", 8, 2, 64), ("x:0", 7, 1, 256), ("x:1", 4, 2, 32), ("w2:1", 3, 1, 16),
    ]  # fmt: skip
    assert rows(figure("mlp"), "conflicts_by_line") == []
    assert rows(figure("x_xt"), "conflicts_by_line") == [("-", 0, "dot_general", 1)]
    assert [row[2:] for row in rows(figure("box_crossed_n_r"), "conflicts_by_line")] == [
        ("add", 1), ("broadcast_in_dim", 1), ("dot_general", 1), ("reduce", 1),
    ]  # fmt: skip
    assert rows(figure("box_crossed_n_r"), "shared_colors") == []


def test_argument_groups_of_layers() -> None:
    frame = analyzed("t2b", layers=2).query("argument_groups")
    assert frame.Arguments.sum() == len(analyzed("t2b", layers=2).program.arguments)
    assert frame.Arguments.is_monotonic_decreasing


def test_blocking_ops_name_the_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.mlir"
    path.write_text("""func.func public @main(%a: tensor<64x32xf32>) -> tensor<64x32xf32> {
  %0 = stablehlo.custom_call @mystery(%a) : (tensor<64x32xf32>) -> tensor<64x32xf32>
  return %0 : tensor<64x32xf32>
}
""")
    found = rows(toast.analyze(path), "blocking_ops")
    assert [(row[0], row[2], row[3], row[4]) for row in found] == [("custom_call", 2, 1, 64)]


def test_colors_without_an_action() -> None:
    analysis = toast.analyze(lambda x, w: x @ w, f32(6, 35), f32(35, 8))
    space = Space(analysis, Mesh.parse("data=4"))
    relations = {**analysis.vocabulary.relations, **on_mesh(space)}

    def ask(name: str) -> list[tuple[object, ...]]:
        frame = query.evaluate(query.prepare(name), relations, analysis.label)
        return list(frame.itertuples(index=False, name=None))

    assert ask("idle_colors") == [
        ("x:0", 4, 1, "no axis of the mesh divides it"),
        ("x:1", 4, 1, "no axis of the mesh divides it"),
    ]
    assert ask("undivided") == [("x:0", 6, 2, "x:0"), ("x:1", 35, 2, "x:1")]


def test_colors_that_cannot_be_sharded(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.mlir"
    path.write_text("""func.func public @main(%a: tensor<64x1xf32>) -> tensor<64x1xf32> {
  %0 = stablehlo.custom_call @mystery(%a) : (tensor<64x1xf32>) -> tensor<64x1xf32>
  %1 = stablehlo.custom_call @mystery(%0) : (tensor<64x1xf32>) -> tensor<64x1xf32>
  return %1 : tensor<64x1xf32>
}
""")
    analysis = toast.analyze(path)
    relations = {**analysis.vocabulary.relations, **on_mesh(Space(analysis, Mesh.parse("data=2")))}
    frame = query.evaluate(query.prepare("idle_colors"), relations, analysis.label)
    assert dict(zip(frame.Color, frame.Why, strict=True)) == {
        "custom_call#1:own(result(0),0)": "ops need all of it whole",
    }


def test_reshards_by_cost() -> None:
    plan = toast.plan(
        analyzed("t2b", layers=1), mesh="data=2,model=2", hardware="tpu-v5e"
    )  # fmt: skip
    frame = plan.query("reshards")
    assert frame.Nanoseconds.is_monotonic_decreasing
    by_line = plan.query("collectives_by_line")
    counted = {c.kind: c.count for c in plan.after.collectives if c.count}
    assert by_line.groupby("Collective").Count.sum().to_dict() == counted
    counts = plan.query("collective(Op,I,Kind,Axes,N,K,T)").groupby("Kind").N.sum().to_dict()
    assert counts == counted
    nanos = 1e9 * plan.after.collective_seconds
    assert nanos <= by_line.Nanoseconds.sum() <= 1.01 * nanos


def test_collectives_that_take_seconds_do_not_wrap() -> None:
    moved = [
        (op, i, '"all_gather"', '"data"', 1, 1, 900_000_000) for op, i in ((1, 0), (2, 0), (2, 1))
    ]

    def by_line(sources: list[tuple[object, ...]]) -> dict[str, int]:
        relations = {
            ("collective", 7): lambda: turned(moved, 7),
            ("source", 3): lambda: turned(sources, 3),
        }
        asked = query.prepare("collectives_by_line")
        frame = query.evaluate(asked, relations, lambda op, factor: factor)
        return dict(zip(frame.File, frame.Nanoseconds, strict=True))

    assert by_line([(1, '"a.py"', 7)]) == {"a.py": 900_000_000, "-": 1_800_000_000}
    assert by_line([(1, '"a.py"', 7), (2, '"a.py"', 7)]) == {"a.py": 2**31 - 1}


# -- bad input ------------------------------------------------------------------------------------

BAD = {
    "color(D,C), dim(D V,_,Size)": r"^query, column 19: syntax error, .* at 'V,_,Size\)'$",
    "color(D,C),": r"^query, column 12: syntax error at its end$",
    "color(D,C),\n dim(D V)": r"^query, line 2, column 8: syntax error",
    "color(D,C), dmi(D,V,_,Size)": r"^query, column 13: there is no predicate dmi/4; did you mean dim/3 or dim/4\?$",
    "zzzz(X)": r"column 1: there is no predicate zzzz/1; rules/queries/vocabulary.lp lists all$",
    "color(D,C,X)": r"column 1: there is no color/3; color has .* number of arguments: color/2$",
    "color(D,_), X > 4": r"^query, column 13: unsafe variables X: no positive atom",
    "color(D,_), K = \"Sizé\", % Size\n  K > Size, Zeal < Size": r"^query, line 2, column 7: unsafe variables Size, Zeal: ",
    "b(X) :- op(X,_). a(X) :- op(X,_), Y < X.": r"^query, column 35: unsafe variables Y: ",
    "not color(D,C)": r"^query, column 11: unsafe variables D, C: ",
    "": r"^query: is empty",
    "color(D,@f(C))": r"column 9: @f is not allowed",
    "{ a(X) } :- color(X,_).": r"column 1: a head must be one atom",
    "a(X) :- color(X,_), not b(X). b(X) :- color(X,_), not a(X).": r"depend on their own negation",
    "color(X,X) :- op(X,_).": r"column 1: color/2 already exists; use another name$",
    'a :- op(_,_). #include "/etc/passwd".': r"#include is not allowed",
    "a :- op(_,_). #show a/0.": r"column 15: #show is not allowed",
    "#script (python)\n#end. a :- b.": r"#script",
    "op(_,_). op(_,_)": r"write one rule body",
    "-a(X) :- op(X,_).": r"column 1: a head must be one atom",
    "a(X;X) :- op(X,_).": r"column 1: a head must be one atom",
    ":- op(_,_).": r"no rule has a head",
    "largest_colrs": r"^no audit named largest_colrs; did you mean largest_colors\?$",
    "nosuch.lp": r"^nosuch.lp: no such file; check the path$",
    "sharding(V,D,A,_)": r"^query: only a plan has sharding/4; use Plan.query$",
    "mesh_axis(A,N)": r"^query: only a mesh has mesh_axis/2; use Plan.query$",
    "reshards": r"^query: only a plan has collective/7",
    "dim(_,_,S), S > 4294967296": r"^query, column 17: 4294967296 is beyond 2147483647: numbers have 32 bits; ask",
    "dim(_,_,S), S > 3000000000": r"column 17: 3000000000 is beyond",
    "dim(_,_,S),\n S > 0xffffffff": r"^query, line 2, column 6: 0xffffffff is beyond",
    "dim(_,_,S), S > 2147483648": r"column 17: 2147483648 is beyond",
    "dim(_,_,S), S > -2147483649": r"column 18: 2147483649 is beyond",
    "dim(_,_,S), S > 2**40": r"column 17: \(2\*\*40\) is beyond",
    "a(S) :- dim(_,_,S), S > 9999999999.": r"^query, column 25: 9999999999 is beyond",
    f"dim(_,_,{'9' * 5000})": r"column 9: 9{24}\.\.\. is beyond",
}  # fmt: skip


@pytest.mark.parametrize("body", BAD)
def test_bad_queries(body: str) -> None:
    with pytest.raises(QueryError, match=BAD[body]) as caught:
        figure("mlp").query(body)
    assert "\n" not in str(caught.value)


BAD_FILES = {
    "script": ("#script (python)\n#end.\n", r"q.lp:1:1: #script is not allowed"),
    "unknown": ("%! q(X): x.\nq(X) :-\n colour(X,_).\n", r"q.lp:3:2: there is no predicate colour/2; did you mean color/2"),
    "undocumented": ("q(X) :- op(X,_).\n", r"q.lp:1:1: q/1 is not documented; add a line '%! q\(A\): meaning.'"),
    "no answer": ("%! p(X): x.\np(X) :- op(X,_).\n", r"q.lp: has no answer predicate; define q\(...\)"),
    "order": ("% Sorted by: Y.\n%! q(X): x.\nq(X) :- op(X,_).\n", r"q.lp: sorted by Y, which is not one of its columns X"),
    "syntax": ("%! q(X): x.\nq(X) :- op(X,_)\n", r"q.lp:3:1: syntax error"),
    "unsafe": ("%! q(X): x.\nq(X) :- op(_,_).\n", r"q.lp:2:3: unsafe variables X"),
    "choice": ("%! q(X): x.\n{ q(X) } :- op(X,_).\n", r"q.lp:2:1: a head must be one atom"),
    "given": ("%! op(X,Y): x.\nop(X,X) :- rank(X,_).\n", r"q.lp:2:1: op/2 already exists"),
    "number": ("%! q(X): x.\nq(X) :- dim(_,_,X), X < 4294967296.\n", r"q.lp:2:25: 4294967296 is beyond"),
    "code": ("%! q(X): x.\nq(@f(X)) :- op(X,_).\n", r"q.lp:2:3: @f is not allowed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case: str, tmp_path: pathlib.Path) -> None:
    text, message = BAD_FILES[case]
    (tmp_path / "q.lp").write_text(text)
    with pytest.raises(QueryError, match=message) as caught:
        figure("mlp").query(tmp_path / "q.lp")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [None, 3, b"op(O,_)", ["op(O,_)"]], ids=repr)
def test_what_is_no_text(body: Any) -> None:
    with pytest.raises(QueryError, match=rf"^query: {type(body).__name__} is not a query; use a"):
        figure("mlp").query(body)


@pytest.mark.parametrize("rules", [None, "mine.lp", [None], 3], ids=repr)
def test_rules_that_are_no_paths(rules: Any) -> None:
    with pytest.raises(QueryError, match=r"^query: rules must be a list of paths"):
        figure("mlp").query("op(O,_)", rules=rules)


def test_numbers_of_32_bits() -> None:
    mlp = figure("mlp")
    assert rows(mlp, "dim(_,_,S), S > 2147483647") == []
    assert len(rows(mlp, "dim(_,0,S), S > -2147483648, S = S-0")) == 3
    assert rows(mlp, 'X = "3000000000", op(0,_) % or 4000000000') == [("3000000000",)]
    assert rows(mlp, "X = a3000000000, op(0,_)") == [("a3000000000",)]


def test_facts_are_never_wrapped() -> None:
    name = ("repeats", 2)
    assert facts({name: lambda: [[0], [2**31 - 1]]}, [name]) == {name: ["(0,2147483647)"]}
    for number in (2**31, -(2**31) - 1):
        with pytest.raises(QueryError, match=r"^query: repeats/2 has numbers beyond 2147483647"):
            facts({name: lambda n=number: [[0, 1], [1, n]]}, [name])  # type: ignore[misc]
    assert kib(1) == 1
    assert kib(2**60) == 2**31 - 1


def test_grounding_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toast.logic.engine.GROUND_ATOMS", 20_000)
    monkeypatch.setattr("toast.logic.engine.GROUND_SECONDS", 60.0)  # where others use the machine
    with pytest.raises(QueryError, match="makes more than 20000 atoms; join fewer"):
        figure("mlp").query("n(0) :- op(_,_). n(X+1) :- n(X).")
    monkeypatch.setattr("toast.logic.engine.GROUND_SECONDS", 1.0)
    with pytest.raises(QueryError, match="takes more than 1 seconds; join fewer"):
        analyzed("t2b-tiny").query(
            "label(A,_), label(B,_), label(C,_), label(D,_), label(E,_), A < B, B < C, C < D, E < A, D < E"
        )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("color(D,C), é", "query, column 13: 'é' outside of strings; write plain ASCII"),
        ("op(O,“dot_general”)", "query, column 6: '“' outside of strings; write plain ASCII"),
        ('op(O,K), K != "éé", dim(V V,_,_)', "query, column 27: .* at 'V,_,_\\)'"),
    ],
)
def test_what_is_not_ascii_is_no_crash(body: str, message: str) -> None:
    """clingo's messages tear characters of several bytes apart, which would end the process."""
    with pytest.raises(QueryError, match=message):
        analyzed("attention").query(body)
    assert analyzed("attention").query('op(O,K), K != "é"').shape[0]
