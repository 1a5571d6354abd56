"""The kinds of entities that the terms of a price count."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
#: Dimensions of tensors; -1 for none.
Dims = npt.NDArray[np.int8]


class Entity(enum.Enum):
    """Kinds of entities: each has a table in :class:`toast.cost.tables.Tables`."""

    OP_CLASS = "op class"
    PRODUCT = "class of products"
    VALUE_CLASS = "value class"
    USE_CLASS = "use class"
    COPY_PAIR = "pair of use classes"


#: Scopes of costs that depend on one op class alone.
OP_SCOPES = frozenset({Entity.OP_CLASS, Entity.PRODUCT})
