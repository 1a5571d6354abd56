"""MLIR modules: parsing, inlining, attributes, locations, Shardy's annotations and pass pipelines.

Only the frontends import jaxlib's MLIR bindings.  The other stages use
:class:`toast.program.Program`; backends and checks that need a module call the functions of this
package.
"""

from toast.frontend.mlir.captured_arrays import open_captured_arrays
from toast.frontend.mlir.inline import drop_dead_ops, inline_calls
from toast.frontend.mlir.manual_computation import (
    DEVICES,
    Region,
    Regions,
    collective_axes,
    drop_idle_ops,
    read_region,
)
from toast.frontend.mlir.modules import (
    attribute_texts,
    bytecode,
    clone,
    counts,
    functions_of,
    generic_text,
    has_entry,
    main_function,
    make_entry,
    module_name,
    module_of_ops,
    parse,
    portable_artifact,
    run_passes,
    set_attributes,
    text_without_locations,
    type_text,
    walk_order,
)
from toast.frontend.mlir.ops import (
    AttributeReader,
    ModuleSource,
    TypeReader,
    call_target,
    captured,
    is_location,
    is_tuple,
    kind,
    location,
    op_kinds,
    trip_count,
)
from toast.frontend.mlir.platforms import choose_platform, has_platform_argument
from toast.frontend.mlir.propagate import Propagated, Propagation
from toast.frontend.mlir.python_calls import callbacks_of, calls_python
from toast.frontend.mlir.shardy import (
    ShardyWriter,
    argument_constraint,
    constraint,
    forget_shardings_of_ops,
    keeping_names,
    take_name,
    without_shardings,
)

__all__ = [
    "DEVICES",
    "AttributeReader",
    "ModuleSource",
    "Propagated",
    "Propagation",
    "Region",
    "Regions",
    "ShardyWriter",
    "TypeReader",
    "argument_constraint",
    "attribute_texts",
    "bytecode",
    "call_target",
    "callbacks_of",
    "calls_python",
    "captured",
    "choose_platform",
    "clone",
    "collective_axes",
    "constraint",
    "counts",
    "drop_dead_ops",
    "drop_idle_ops",
    "forget_shardings_of_ops",
    "functions_of",
    "generic_text",
    "has_entry",
    "has_platform_argument",
    "inline_calls",
    "is_location",
    "is_tuple",
    "keeping_names",
    "kind",
    "location",
    "main_function",
    "make_entry",
    "module_name",
    "module_of_ops",
    "op_kinds",
    "open_captured_arrays",
    "parse",
    "portable_artifact",
    "read_region",
    "run_passes",
    "set_attributes",
    "take_name",
    "text_without_locations",
    "trip_count",
    "type_text",
    "walk_order",
    "without_shardings",
]  # fmt: skip
