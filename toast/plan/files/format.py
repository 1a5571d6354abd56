"""The JSON of plans: every key with its type, its bounds and what it means.

Files are checked against these types, and ``docs/plan.schema.json`` is made from them::

    python -m toast.plan.files.schema_file docs/plan.schema.json
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, UnsetType, field

#: The largest number that is finite.
_FINITE = sys.float_info.max

Amount = Annotated[float, Meta(ge=0, le=_FINITE)]
Count = Annotated[int, Meta(ge=0)]
Several = Annotated[int, Meta(ge=1)]
Axis = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
Axes = tuple[Axis, ...]
Sharding = Annotated[
    tuple[Axes, ...], Meta(description="Mesh axes of each dimension, major to minor.")
]
SpecText = Annotated[str, Meta(pattern=r"^P\(.*\)$")]
CollectiveKind = Literal[
    "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute"
]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object with these keys and no others."""


class OriginEntry(_Entry, frozen=True, kw_only=True):
    """What toast plan made it from."""

    target: Annotated[str, Meta(description="TARGET of the command line.")]
    sizes: Annotated[
        dict[str, int], Meta(description="Options that changed a model's size: layers, batch ...")
    ]
    shapes: Annotated[tuple[str, ...], Meta(description="--arg: example arguments of a function.")]
    rules: Annotated[tuple[str, ...], Meta(description="--rules: further rule files.")]
    hardware: Annotated[str, Meta(description="--hardware: a name or a file.")]
    donate: Annotated[
        tuple[Count, ...], Meta(description="--donate: positions of donated arguments.")
    ] = ()


class ConstraintsEntry(_Entry, frozen=True, kw_only=True):
    """What the user fixed."""

    pin: Annotated[
        dict[str, tuple[Axes | None, ...]],
        Meta(description="Shardings of arguments and named values, by pattern; null is a "
             "dimension that is left open."),
    ]  # fmt: skip
    forbid: Annotated[
        dict[str, Axes],
        Meta(description="Axes that arguments must not be sharded along, by pattern."),
    ]
    fix: Annotated[dict[str, Axes], Meta(description="Axes that dimensions (tokens:0) take first.")]
    keep: Annotated[bool, Meta(description="Whether the program's own constraints hold.")]


class ArgumentEntry(_Entry, frozen=True, kw_only=True):
    """An argument and its sharding."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, Meta(description="StableHLO element type: bf16.")]
    sharding: Sharding
    spec: Annotated[SpecText, Meta(description="The same as JAX writes it.")]


class RunEntry(_Entry, frozen=True, kw_only=True):
    """Ops in a row that are sharded alike."""

    count: Annotated[Several, Meta(description="Ops in a row that are sharded alike.")]
    axes: Annotated[
        dict[Axis, str],
        Meta(description="The factor of the op that holds each axis, in the words of its rule: "
             "lhs(0), contracting(0), or the number of a dimension."),
    ]  # fmt: skip
    specs: Annotated[tuple[SpecText, ...], Meta(description="Shardings of its results.")]


class _KeyedEntry(_Entry, frozen=True, kw_only=True):
    """What an op is known by."""

    kind: Annotated[str, Meta(description="Kind of the op: dot_general.")]
    path: Annotated[
        str,
        Meta(description="JAX primitives that it comes from: jit(step)/jvp()/dot_general; empty "
             "where unknown."),
    ]  # fmt: skip
    file: Annotated[
        str, Meta(description="Source file of the user's innermost line; empty where unknown.")
    ]
    line: Count
    function: str
    label: Annotated[
        str,
        Meta(description="What checkpoint_name, or a fact base, calls its value; of arguments in "
             "refinements, the path."),
    ]  # fmt: skip


class ValueEntry(_KeyedEntry, frozen=True, kw_only=True):
    """The ops with one key, and how each is sharded."""

    shardings: Annotated[
        tuple[RunEntry, ...], Meta(description="Of the ops with this key, in program order.")
    ]


class PartEntry(_KeyedEntry, frozen=True, kw_only=True):
    """An op class of a refinement."""

    place: Annotated[Count, Meta(description="Which of the op classes with this key, and")]
    of: Annotated[Count, Meta(description="of how many.")]
    factor: Annotated[
        str, Meta(description="The factor that takes the axis; empty to let go of it.")
    ]
    numbers: Annotated[
        tuple[int, int], Meta(description="Op class and factor in the plan's own space.")
    ]


class CollectivesEntry(_Entry, frozen=True, kw_only=True):
    """All collectives of one kind in a step."""

    kind: CollectiveKind
    count: Count
    bytes: Annotated[Amount, Meta(description="Of results.")]
    seconds: Annotated[Amount, Meta(description="Of all of them.")]


class PredictionEntry(_Entry, frozen=True, kw_only=True):
    """What the cost model says, per device."""

    step_seconds: Annotated[Amount, Meta(description="Time of a step.")]
    matmul_seconds: Annotated[Amount, Meta(description="Matrix products.")]
    memory_seconds: Annotated[Amount, Meta(description="Memory-bound kernels.")]
    peak_bytes: Annotated[
        Amount, Meta(description="The most that is alive at once, arguments included.")
    ]
    argument_bytes: Annotated[Amount, Meta(description="Arguments.")]
    collectives: Annotated[tuple[CollectivesEntry, ...], Meta(description="By kind.")]
    hidden_seconds: Annotated[
        Amount, Meta(description="Of the collectives, what products run beside.")
    ] = 0.0
    sent_bytes: Annotated[Amount, Meta(description="What a device sends.")] = 0.0
    output_bytes: Annotated[
        Amount, Meta(description="Results, those in donated arguments included.")
    ] = 0.0


class ActionEntry(_Entry, frozen=True, kw_only=True):
    """An action, and what it did."""

    dimensions: Annotated[
        tuple[str, ...],
        Meta(description="Dimensions of arguments that it shards, positions in lists folded: "
             "params['layers'][*]['gate']:1. Of a pin, patterns; of a refinement, factors of ops."),
    ]  # fmt: skip
    factors: Annotated[
        tuple[str, ...],
        Meta(description="Where it shards no argument, factors that it shards: dot_general:lhs(0) "
             "at model.py:12."),
    ] = ()  # fmt: skip
    axis: Annotated[str, Meta(description="Mesh axis; empty for pins.")]
    resolution: Annotated[
        tuple[Literal[0, 1], ...], Meta(description="A bit per resolution group of its color.")
    ]
    color: Annotated[
        int,
        Meta(ge=-1, description="Its color by number, which tells actions on alike dimensions of "
             "one program apart; -1 for pins, refinements and where no actions lead to the "
             "shardings."),
    ] = -1  # fmt: skip
    part: Annotated[
        tuple[PartEntry, ...], Meta(description="Of a refinement, the ops that it reaches.")
    ]
    fixed: Annotated[bool, Meta(description="Whether the user fixed it.")] = False
    reason: Annotated[str, Meta(description="What it gained and what it paid.")]
    after: PredictionEntry


class TransferEntry(_Entry, frozen=True, kw_only=True):
    """Collectives that are alike."""

    kind: CollectiveKind
    axes: Axes
    bytes: Annotated[Amount, Meta(description="Of each, in the program's element type.")]
    count: Annotated[Amount, Meta(description="In a step.")]
    algorithm: Annotated[str, Meta(description="The cheapest that the links allow.")]
    seconds: Annotated[Amount, Meta(description="One takes.")]
    edges: Annotated[bool, Meta(description="Whether shards exchange their edges.")] = False


class BufferEntry(_Entry, frozen=True, kw_only=True):
    """What is alive at the peak."""

    bytes: Amount
    value: str
    what: str
    start: str = field(name="from")
    end: str = field(name="to")


class MemoryEntry(_Entry, frozen=True, kw_only=True):
    """Memory of a device in program order."""

    argument_bytes: Amount
    peak_bytes: Amount
    peak_at: Annotated[str, Meta(description="The op at the peak.")]
    at_peak: Annotated[
        tuple[BufferEntry, ...], Meta(description="The largest that are alive then.")
    ]
    op: tuple[int, ...]
    live_bytes: Annotated[tuple[float, ...], Meta(description="Bytes before each op of op.")]


class SearchEntry(_Entry, frozen=True, kw_only=True):
    """How the search went."""

    states: Annotated[Count, Meta(description="States priced.")]
    rounds: tuple[dict[str, Any], ...]


class PlanFile(_Entry, frozen=True, kw_only=True):
    """A sharding of a program on a mesh, as toast plan --json writes it.

    Bytes and seconds are per device and step.
    """

    version: Annotated[
        Literal[2],
        Meta(description="Version of this format. TOAST reads all versions up to its own."),
    ]
    program: Annotated[str, Meta(description="Name of the program.")]
    program_hash: Annotated[
        str,
        Meta(pattern="^[0-9a-f]{64}$", description="Hash of its ops, types and paths; source "
             "lines and the name do not count."),
    ]  # fmt: skip
    origin: Annotated[
        OriginEntry | None,
        Meta(description="What toast plan made it from; null for a plan made in Python."),
    ] = None
    method: Annotated[str, Meta(description="toast, or the baseline that made it.")]
    note: Annotated[str, Meta(description="How its search ended, and the like.")]
    mesh: Annotated[
        dict[Axis, Several],
        Meta(min_length=1, description="Axes in order, major to minor, with their sizes."),
    ]
    device_order: Annotated[
        Axes, Meta(description="The axes as they lie on the devices, the last one innermost.")
    ]
    hardware: Annotated[str, Meta(description="Name of the device.")]
    hardware_hash: Annotated[str, Meta(description="Hash of the device's figures.")] = ""
    memory_bytes: Annotated[float, Meta(gt=0, le=_FINITE, description="Limit per device.")]
    overlap: Annotated[
        Literal["none", "partial", "full"],
        Meta(description="Which collectives run beside products."),
    ]
    resolution: Annotated[
        Literal["compatible", "independent"],
        Meta(description="Whether compatible conflicts are resolved alike."),
    ]
    constraints: ConstraintsEntry
    op_classes: Annotated[
        Literal["alike", "single"],
        Meta(description="Whether ops that no action tells apart share a state."),
    ]
    arguments: Annotated[
        dict[str, ArgumentEntry], Meta(description="By path: params['layers'][0]['wq'].")
    ]
    results: Annotated[dict[str, Sharding], Meta(description="By path: result[0]['wq'].")]
    values: Annotated[
        tuple[ValueEntry, ...],
        Meta(description="Every value but arguments, by the ops that make them."),
    ]
    replayed: Annotated[
        bool, Meta(description="Whether the actions lead to the shardings by themselves.")
    ]
    actions: Annotated[tuple[ActionEntry, ...], Meta(description="In order.")]
    collectives: Annotated[tuple[TransferEntry, ...], Meta(description="Those that are alike.")]
    cost: Annotated[
        Amount, Meta(description="C of section 4.5, relative to the unsharded program.")
    ]
    seed: Count
    before: PredictionEntry
    after: PredictionEntry
    # What follows is for people and other tools; TOAST itself reads files without it.
    fits: Annotated[bool, Meta(description="Whether the peak is within the limit.")] = False
    reshards: Annotated[
        Count, Meta(description="Uses that see a value otherwise than it is defined.")
    ] = 0
    memory: MemoryEntry | UnsetType = msgspec.UNSET
    bound_seconds: Annotated[
        Amount, Meta(description="What the step of every plan on this mesh takes at least.")
    ] = 0.0
    analysis: Annotated[
        dict[str, Count], Meta(description="Counts of names, colors, conflicts ...")
    ] = {}
    search: SearchEntry | UnsetType = msgspec.UNSET
    meshes: Annotated[
        tuple[dict[str, Any], ...],
        Meta(description="How other meshes did, where a number of devices was given."),
    ] = ()
    seconds: Annotated[dict[str, float], Meta(description="How long each stage took.")] = {}
    applied: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="Of toast apply: what matched, and what did not."),
    ] = msgspec.UNSET


def schema() -> dict[str, Any]:
    """The JSON Schema of plans, as ``docs/plan.schema.json`` has it."""
    found = msgspec.json.schema(PlanFile)
    definitions = found["$defs"]
    whole = definitions.pop(PlanFile.__name__)
    text = json.dumps({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **whole,
        "title": "A TOAST plan",
        "description": " ".join(whole["description"].split()),
        "$defs": definitions,
    })  # fmt: skip
    plain: dict[str, Any] = json.loads(text)  # with lists in place of tuples
    return plain


def schema_text() -> str:
    """:func:`schema` as the file's text."""
    return json.dumps(schema(), indent=2) + "\n"
