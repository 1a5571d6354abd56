"""The relations of an analysis as DataFrames: methods of :class:`toast.Analysis`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from toast import lazy
from toast.analysis.analysis import Analysis

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy.module("pandas")


def name(analysis: Analysis) -> pd.DataFrame:
    """See :attr:`toast.Analysis.name`."""
    rules, names = analysis.rules, analysis.names
    factors = [factor for op in analysis.program.ops for factor in rules[op.signature].factors]
    return pd.DataFrame(
        {
            "name": np.arange(names.count),
            "op": names.name_op,
            "factor": [f.label for f in factors],
            "size": [f.size for f in factors],
            "combiner": [f.combiner for f in factors],
            "shardable": names.shardable,
            "color": analysis.color,
        }
    )


def annotates(analysis: Analysis) -> pd.DataFrame:
    """See :attr:`toast.Analysis.annotates`."""
    names = analysis.names
    values = np.repeat(np.arange(len(names.value_op)), np.diff(names.value_dim))
    uses = np.repeat(np.arange(len(names.use_op)), np.diff(names.use_dim))
    d_of_value = np.arange(len(values)) - names.value_dim[values]
    d_of_use = np.arange(len(uses)) - names.use_dim[uses]
    return pd.DataFrame(
        {
            "site": ["def"] * len(values) + ["use"] * len(uses),
            "number": np.concatenate([values, uses]),
            "d": np.concatenate([d_of_value, d_of_use]),
            "name": np.concatenate([names.def_name, names.use_name]),
        }
    )


def def_use(analysis: Analysis) -> pd.DataFrame:
    """See :attr:`toast.Analysis.def_use`."""
    return pd.DataFrame(analysis.names.edges, columns=["name", "use_name"])


def conflict(analysis: Analysis) -> pd.DataFrame:
    """See :attr:`toast.Analysis.conflict`."""
    rows = [(*r.names, r.set, r.group) for r in analysis.resolutions]
    return pd.DataFrame(rows, columns=["name", "other", "set", "group"], dtype=np.int64)


def box(analysis: Analysis) -> pd.DataFrame:
    """See :attr:`toast.Analysis.box`."""
    columns = ["name", "other", "left", "right", "crossed"]
    return pd.DataFrame(list(analysis.boxes), columns=columns)


def arguments(analysis: Analysis) -> pd.DataFrame:
    """See :attr:`toast.Analysis.arguments`."""
    return analysis.facts.argument.assign(group=analysis.argument_group)
