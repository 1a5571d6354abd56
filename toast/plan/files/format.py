"""The JSON format of plans: every key with its type, its bounds and its meaning.

Files are checked against these types, and ``docs/plan.schema.json`` is generated from them::

    python -m toast.plan.files.schema_file docs/plan.schema.json
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, UnsetType, field

#: The largest finite number.
_FINITE = sys.float_info.max

Amount = Annotated[float, Meta(ge=0, le=_FINITE)]
Count = Annotated[int, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0, le=1)]
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
    """An object without additional keys."""


class OriginEntry(_Entry, frozen=True, kw_only=True):
    """The TARGET and options of toast plan."""

    target: Annotated[str, Meta(description="TARGET of the command line.")]
    sizes: Annotated[
        dict[str, int | str], Meta(description="Options of a model: layers, batch, step ...")
    ]
    shapes: Annotated[tuple[str, ...], Meta(description="--arg: example arguments of a function.")]
    rules: Annotated[tuple[str, ...], Meta(description="--rules: additional rule files.")]
    hardware: Annotated[str, Meta(description="--hardware: a name or a file.")]
    donate: Annotated[
        tuple[Count, ...], Meta(description="--donate: positions of donated arguments.")
    ] = ()
    platform: Annotated[
        str, Meta(description="--platform: that it was lowered for; empty for the default.")
    ] = ""
    trip_counts: Annotated[
        dict[str, Count],
        Meta(description="--trip-count: iterations of loops, by source location or number."),
    ] = {}
    remat: Annotated[
        str, Meta(description="--remat: a preset or a policy; empty for the program's own.")
    ] = ""
    microbatches: Annotated[Count, Meta(description="--microbatches; 0 for the program's own.")] = 0


class ResidualEntry(_Entry, frozen=True, kw_only=True):
    """A residual of a block: one value, or several with one name."""

    name: str
    kind: Annotated[
        Literal["product", "batched_product", "kernel", "other", "input"],
        Meta(description="How it is computed; an input is an argument of the block."),
    ]
    types: Annotated[tuple[str, ...], Meta(description="Types of its values: bf16[16,128].")]
    size_bytes: Annotated[Count, Meta(description="Bytes in one run, without sharding.")]
    source: Annotated[str, Meta(description="Where it is computed: model.py:12 (attention).")] = ""
    own: Annotated[bool, Meta(description="Whether the program itself names it.")] = False


class BlockEntry(_Entry, frozen=True, kw_only=True):
    """A block of the program whose residuals the policy decides about."""

    name: str
    residuals: tuple[ResidualEntry, ...]
    runs: Annotated[Several, Meta(description="How often it runs in a step.")]
    origin: Annotated[
        str, Meta(description="toast.checkpoint, toast.checkpoint(policy=), scan or repeated.")
    ]


class DecisionEntry(_Entry, frozen=True, kw_only=True):
    """Residuals of a block by name."""

    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()


class RematEntry(_Entry, frozen=True, kw_only=True):
    """The memory policy and the microbatches that the program was traced with."""

    preset: Annotated[str, Meta(description="Name of the preset; empty for another policy.")] = ""
    policy: Annotated[
        dict[str, DecisionEntry] | None,
        Meta(description="Residuals by block; null if the program's own recomputation stays."),
    ] = None
    microbatches: Annotated[
        Several, Meta(description="Number of microbatches of toast.accumulate.")
    ] = 1
    blocks: tuple[BlockEntry, ...] = ()
    own: Annotated[
        tuple[str, ...], Meta(description="Recomputation in the program that stays as it is.")
    ] = ()
    accumulates: Annotated[
        bool, Meta(description="Whether it accumulates gradients, so that the batch may be cut.")
    ] = False


class PaddingEntry(_Entry, frozen=True, kw_only=True):
    """Dimensions of one color and size that are padded together."""

    dimension: Annotated[str, Meta(description="The first of them: params['embed']:0.")]
    elements: Annotated[Several, Meta(description="Their elements in the program.")]
    padded: Annotated[Several, Meta(description="Their elements in the plan.")]


class ConstraintsEntry(_Entry, frozen=True, kw_only=True):
    """The constraints of the user."""

    pin: Annotated[
        dict[str, tuple[Axes | None, ...]],
        Meta(description="Shardings of arguments and named values, by pattern; null leaves a "
             "dimension open."),
    ]  # fmt: skip
    forbid: Annotated[
        dict[str, Axes],
        Meta(description="Axes that must not shard arguments, by pattern."),
    ]
    fix: Annotated[
        dict[str, Axes], Meta(description="Axes that shard dimensions (tokens:0) first.")
    ]
    keep: Annotated[bool, Meta(description="Whether the constraints in the program hold.")]


class ArgumentEntry(_Entry, frozen=True, kw_only=True):
    """An argument and its sharding."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, Meta(description="StableHLO element type: bf16.")]
    sharding: Sharding
    spec: Annotated[SpecText, Meta(description="The sharding as a PartitionSpec.")]


class RunEntry(_Entry, frozen=True, kw_only=True):
    """Consecutive ops with equal shardings."""

    count: Annotated[Several, Meta(description="The number of ops.")]
    axes: Annotated[
        dict[Axis, str],
        Meta(description="The factor of the op that holds each axis, by its label in the rule: "
             "lhs(0), contracting(0), or the number of a dimension."),
    ]  # fmt: skip
    specs: Annotated[tuple[SpecText, ...], Meta(description="Shardings of the results of each op.")]


class _KeyedEntry(_Entry, frozen=True, kw_only=True):
    """The key of an op."""

    kind: Annotated[str, Meta(description="Kind of the op: dot_general.")]
    path: Annotated[
        str,
        Meta(description="JAX primitives of the op: jit(step)/jvp()/dot_general; empty if "
             "unknown."),
    ]  # fmt: skip
    file: Annotated[
        str, Meta(description="Source file of the user's innermost line; empty if unknown.")
    ]
    line: Count
    function: str
    label: Annotated[
        str,
        Meta(description="Name of the value by checkpoint_name or a fact base; for arguments in "
             "refinements, the path."),
    ]  # fmt: skip


class ValueEntry(_KeyedEntry, frozen=True, kw_only=True):
    """The ops with one key, and their shardings."""

    shardings: Annotated[
        tuple[RunEntry, ...],
        Meta(description="Shardings of the ops with this key, in program order."),
    ]


class PartEntry(_KeyedEntry, frozen=True, kw_only=True):
    """An op class of a refinement."""

    place: Annotated[Count, Meta(description="Number of the op class among those with this key.")]
    of: Annotated[Count, Meta(description="Number of op classes with this key.")]
    factor: Annotated[
        str, Meta(description="The factor that gets the axis; empty to remove the axis.")
    ]
    numbers: Annotated[
        tuple[int, int], Meta(description="Op class and factor by number, for the same program.")
    ]


class CollectivesEntry(_Entry, frozen=True, kw_only=True):
    """All collectives of one kind in a step."""

    kind: CollectiveKind
    count: Count
    bytes: Annotated[Amount, Meta(description="Bytes of the results.")]
    seconds: Annotated[Amount, Meta(description="Seconds of all of them.")]


class PredictionEntry(_Entry, frozen=True, kw_only=True):
    """Predictions of the cost model, per device."""

    step_seconds: Annotated[Amount, Meta(description="Time of a step.")]
    matmul_seconds: Annotated[Amount, Meta(description="Time of matrix products.")]
    memory_seconds: Annotated[Amount, Meta(description="Time of memory-bound kernels.")]
    peak_bytes: Annotated[Amount, Meta(description="Maximum of live bytes, including arguments.")]
    argument_bytes: Annotated[Amount, Meta(description="Bytes of arguments.")]
    collectives: Annotated[tuple[CollectivesEntry, ...], Meta(description="Collectives by kind.")]
    hidden_seconds: Annotated[
        Amount, Meta(description="Time of collectives that overlaps with matrix products.")
    ] = 0.0
    sent_bytes: Annotated[Amount, Meta(description="Bytes that a device sends.")] = 0.0
    output_bytes: Annotated[
        Amount, Meta(description="Bytes of results, including those in donated arguments.")
    ] = 0.0
    constant_bytes: Annotated[
        Amount, Meta(description="Bytes that XLA may need besides the peak, for random bits.")
    ] = 0.0
    step_interval: Annotated[
        tuple[Amount, Amount] | None, Meta(description="Range of XLA's step, with odds of 80 %.")
    ] = None
    peak_interval: Annotated[
        tuple[Amount, Amount] | None, Meta(description="Range of XLA's peak, with odds of 80 %.")
    ] = None
    fit_probability: Annotated[
        Probability | None, Meta(description="Odds that XLA's peak is within the limit.")
    ] = None


class ActionEntry(_Entry, frozen=True, kw_only=True):
    """An action, and its effect."""

    dimensions: Annotated[
        tuple[str, ...],
        Meta(description="Dimensions of arguments that it shards, with * for list positions: "
             "params['layers'][*]['gate']:1. For pins: patterns; for refinements: factors of ops."),
    ]  # fmt: skip
    factors: Annotated[
        tuple[str, ...],
        Meta(description="Factors that it shards, if it shards no argument: dot_general:lhs(0) "
             "at model.py:12."),
    ] = ()  # fmt: skip
    axis: Annotated[str, Meta(description="Mesh axis; empty for pins.")]
    resolution: Annotated[
        tuple[Literal[0, 1], ...], Meta(description="One bit per resolution group of the color.")
    ]
    color: Annotated[
        int,
        Meta(ge=-1, description="Number of the color, which distinguishes actions on similar "
             "dimensions of one program; -1 for pins, refinements and plans without actions."),
    ] = -1  # fmt: skip
    part: Annotated[
        tuple[PartEntry, ...], Meta(description="For refinements: the ops that it changes.")
    ]
    fixed: Annotated[bool, Meta(description="Whether a constraint of the user fixes it.")] = False
    reason: Annotated[str, Meta(description="Its gain and its price.")]
    after: PredictionEntry


class TransferEntry(_Entry, frozen=True, kw_only=True):
    """A group of equal collectives."""

    kind: CollectiveKind
    axes: Axes
    bytes: Annotated[Amount, Meta(description="Bytes of each, in the element type of the program.")]
    count: Annotated[Amount, Meta(description="Number in a step.")]
    algorithm: Annotated[str, Meta(description="The cheapest algorithm for the links.")]
    seconds: Annotated[Amount, Meta(description="Time of each.")]
    edges: Annotated[bool, Meta(description="Whether shards exchange their edges.")] = False


class BufferEntry(_Entry, frozen=True, kw_only=True):
    """A live value at the peak."""

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
        tuple[BufferEntry, ...], Meta(description="The largest live values at the peak.")
    ]
    op: tuple[int, ...]
    live_bytes: Annotated[tuple[float, ...], Meta(description="Bytes before each op of op.")]


class RoundEntry(_Entry, frozen=True, kw_only=True):
    """Progress after one round of the search."""

    number: Count
    states: Annotated[Count, Meta(description="Number of states priced so far.")]
    cost: Amount
    seconds: Amount


class SearchEntry(_Entry, frozen=True, kw_only=True):
    """The course of the search."""

    states: Annotated[Count, Meta(description="Number of priced states.")]
    rounds: tuple[RoundEntry, ...]


class PlanFile(_Entry, frozen=True, kw_only=True):
    """A sharding of a program on a mesh, as written by toast plan --json.

    Bytes and seconds are per device and step.
    """

    version: Annotated[
        Literal[2],
        Meta(description="Version of this format. TOAST reads all versions up to its own."),
    ]
    program: Annotated[str, Meta(description="Name of the program.")]
    program_hash: Annotated[
        str,
        Meta(pattern="^[0-9a-f]{64}$", description="Hash of the ops, types and paths, without "
             "padding, source lines and the name."),
    ]  # fmt: skip
    origin: Annotated[
        OriginEntry | None,
        Meta(description="TARGET and options of toast plan; null for plans from Python."),
    ] = None
    method: Annotated[str, Meta(description="toast, or the name of a baseline.")]
    note: Annotated[str, Meta(description="Notes, for example on the end of the search.")]
    mesh: Annotated[
        dict[Axis, Several],
        Meta(min_length=1, description="Axes in order, major to minor, with their sizes."),
    ]
    device_order: Annotated[
        Axes, Meta(description="The axes in device order, the last one innermost.")
    ]
    hardware: Annotated[str, Meta(description="Name of the device.")]
    hardware_hash: Annotated[str, Meta(description="Hash of the device's figures.")] = ""
    memory_bytes: Annotated[float, Meta(gt=0, le=_FINITE, description="Limit per device.")]
    safety: Annotated[
        Probability | None,
        Meta(description="Odds with which the plan had to fit; null if its peak had to."),
    ] = None
    overlap: Annotated[
        Literal["none", "partial", "gathers", "asynchronous", "full"],
        Meta(description="The collectives that overlap with matrix products."),
    ]
    resolution: Annotated[
        Literal["compatible", "independent"],
        Meta(description="Whether compatible conflicts are resolved together."),
    ]
    lowering: Annotated[
        Literal["xla", "local"],
        Meta(description="What partitions the program: XLA, or TOAST into device-local code."),
    ] = "xla"
    padding: Annotated[
        tuple[PaddingEntry, ...],
        Meta(description="Dimensions that are padded because the axes do not divide them."),
    ] = ()
    remat: Annotated[
        RematEntry | None,
        Meta(description="What is recomputed, offloaded and accumulated; null without --remat and "
             "--microbatches."),
    ] = None  # fmt: skip
    constraints: ConstraintsEntry
    op_classes: Annotated[
        Literal["alike", "single"],
        Meta(description="Whether ops that no action distinguishes share a state."),
    ]
    arguments: Annotated[
        dict[str, ArgumentEntry], Meta(description="Arguments by path: params['layers'][0]['wq'].")
    ]
    results: Annotated[dict[str, Sharding], Meta(description="Results by path: result[0]['wq'].")]
    values: Annotated[
        tuple[ValueEntry, ...],
        Meta(description="All values except arguments, by their ops."),
    ]
    replayed: Annotated[bool, Meta(description="Whether the actions alone lead to the shardings.")]
    actions: Annotated[tuple[ActionEntry, ...], Meta(description="Actions in order.")]
    collectives: Annotated[tuple[TransferEntry, ...], Meta(description="Collectives, grouped.")]
    cost: Annotated[
        Amount, Meta(description="The cost C of section 4.5, relative to the unsharded program.")
    ]
    seed: Count
    before: PredictionEntry
    after: PredictionEntry
    # The following keys are for people and other tools; TOAST also reads files without them.
    fits: Annotated[
        bool, Meta(description="Whether the peak is within the limit, with the odds of safety.")
    ] = False
    error_bars: Annotated[str, Meta(description="What intervals and odds stand on.")] = ""
    reshards: Annotated[
        Count, Meta(description="Number of uses whose sharding differs from the definition.")
    ] = 0
    memory: MemoryEntry | UnsetType = msgspec.UNSET
    bound_seconds: Annotated[
        Amount, Meta(description="Lower bound of the step time of every plan on this mesh.")
    ] = 0.0
    policies_bound_seconds: Annotated[
        Amount, Meta(description="The same for every memory policy, if TOAST chose one.")
    ] = 0.0
    analysis: Annotated[
        dict[str, Count], Meta(description="Counts of names, colors, conflicts ...")
    ] = {}
    search: SearchEntry | UnsetType = msgspec.UNSET
    meshes: Annotated[
        tuple[dict[str, Any], ...],
        Meta(description="Results of all meshes, if the number of devices was given."),
    ] = ()
    seconds: Annotated[dict[str, float], Meta(description="Time of each stage.")] = {}
    applied: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="For toast apply: what matched, and what did not."),
    ] = msgspec.UNSET


def schema() -> dict[str, Any]:
    """The JSON Schema of plans, as in ``docs/plan.schema.json``."""
    definitions = msgspec.json.schema(PlanFile)["$defs"]
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
    """:func:`schema` as JSON text."""
    return json.dumps(schema(), indent=2) + "\n"
