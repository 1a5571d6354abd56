"""Golden tests: the answers of the paper's figures (sections 3.2 to 3.6)."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

import toast
from toast.models import build, transformer
from toast.resources import directory

FACTS = directory("facts")


def fact_base(name: str) -> toast.Analysis:
    return toast.analyze(FACTS / f"{name}.lp")


def colored(analysis: toast.Analysis) -> dict[str, list[int]]:
    """Color of each dimension of each labelled value."""
    names = analysis.names
    found = defaultdict(list)
    for value, label in analysis.program.labels.items():
        for row in range(names.value_dim[value], names.value_dim[value + 1]):
            found[label].append(int(analysis.color[names.def_name[row]]))
    return found


def test_figure_4_names_and_colors() -> None:
    analysis = fact_base("mlp")
    counts = analysis.counts()
    # B X T U V W, then A1 A2 X1, C1 C2, E1 E2 V1 (Figure 4b).
    assert counts["names"] == 14
    assert counts["colors"] == 4
    assert counts["conflicts"] == 0
    colors = colored(analysis)
    b, x = colors["x"]
    u, w = colors["w1"][1], colors["w2"][1]
    assert len({b, x, u, w}) == 4
    # Figure 4c: x : [B, X], w1 : [X, U], w2 : [U, W], y, z : [B, U], w : [B, W].
    assert colors == {
        "x": [b, x], "w1": [x, u], "w2": [u, w], "y": [b, u], "z": [b, u], "w": [b, w],
    }  # fmt: skip


def test_figure_4_definition_to_use_map() -> None:
    """M of Figure 4b: ten edges, one per dimension of each use."""
    analysis = fact_base("mlp")
    labels = {
        (analysis.name_label(a).split(":")[0].split("#")[0], analysis.name_label(b).split("#")[0])
        for a, b in analysis.names.edges.tolist()
    }
    assert len(analysis.names.edges) == 10
    assert ("x", "dot_general") in labels
    assert ("maximum", "dot_general") in labels


def test_conflict_of_section_3_3() -> None:
    analysis = fact_base("x_xt")
    assert analysis.counts()["conflicts"] == 1
    (name, other, kind, site) = analysis.sites[0]
    assert (kind, analysis.program.labels[site]) == ("def", "z")
    assert {analysis.name_label(name), analysis.name_label(other)} == {
        "dot_general#2:lhs(0)", "dot_general#2:rhs(1)",
    }  # fmt: skip


def test_figure_5_attention() -> None:
    analysis = fact_base("attention")
    counts = analysis.counts()
    assert counts["conflicts"] == 5
    assert counts["compatibility_sets"] == 1
    assert counts["resolution_groups"] == 1  # one bit: two resolutions
    assert counts["inconsistent_conflicts"] == 0
    # The conflicts stand at a, c, d and at the uses of c and d (3.4); the use of b's operand is
    # that of a.
    values = {analysis.program.labels[n] for _, _, kind, n in analysis.sites if kind == "def"}
    assert values == {"a", "c", "d"}


@pytest.mark.parametrize(
    ("base", "together"),
    [("box_compatible", True), ("box_crossed_n_r", False), ("box_crossed_o_l", False)],
)
def test_figure_6_boxes(base: str, together: bool) -> None:
    analysis = fact_base(base)
    assert any(crossed for *_, crossed in analysis.boxes) is not together
    sets = {
        analysis.program.kind(int(analysis.names.name_op[r.names[0]])): r.set
        for r in analysis.resolutions
    }
    other = "tanh" if together else "add"
    assert (sets["dot_general"] == sets[other]) is together


def test_jax_functions_have_the_figures_answers() -> None:
    x = jax.ShapeDtypeStruct((32, 4), jnp.float32)
    assert toast.analyze(lambda x: x @ x.T, x).counts()["resolution_groups"] == 1
    counts = toast.analyze(build("attention")).counts()
    assert counts["compatibility_sets"] == 1
    assert counts["inconsistent_conflicts"] == 0


def test_repeated_layers_add_no_resolutions() -> None:
    """Section 3.6: the number of resolutions does not depend on the number of layers."""
    groups = {}
    for layers in (1, 2, 4, 18):
        config = dataclasses.replace(transformer.TINY, layers=layers)
        counts = toast.analyze(transformer.model(config, "t")).counts()
        assert counts["inconsistent_conflicts"] == 0
        assert counts["conflicts"] > 25 * layers
        groups[layers] = (counts["resolution_groups"], counts["argument_groups"])
    assert len(set(groups.values())) == 1, groups
    assert groups[18][0] <= 4
