"""What a custom call states about its kernel: name, cost, mask, blocks, and its sharding rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from toast.boundary.printable import printable
from toast.program import Attribute

#: The most elements of a constant operand whose nonzero elements are counted.
_MOST_COUNTED = 2**20

#: Numbers up to this one are read; prices are doubles.
_LARGEST = 2**53

#: The fields of a TPU kernel's ``cost_estimate``.
_ESTIMATE = ("flops", "transcendentals", "bytes_accessed")

#: The dimensions of a product of cuBLAS, as in a ``dot_general``.
_PRODUCT = (
    "lhs_batch_dimensions", "rhs_batch_dimensions",
    "lhs_contracting_dimensions", "rhs_contracting_dimensions",
)  # fmt: skip

#: What the configuration of a call of TransformerEngine states of dimensions and masks.
_STATED = frozenset({
    "lhs_axis_boundary", "rhs_axis_boundary", "lhs_transposed", "rhs_transposed", "rhs_is_trans",
    "mask_type", "window_size_left",
})  # fmt: skip

#: The name of the function of a Mosaic kernel for GPUs in its code (MLIR bytecode).
_MOSAIC_NAME = re.compile(rb"\0(\w+)_mosaic_gpu(?=\0)")

#: Not the name of a function: that of a dialect, and that of functions without a name.
_UNNAMED = frozenset({b"stable", b"anonymous"})

#: Instructions of GPUs that multiply matrices.
_MULTIPLIES = re.compile(rb"wgmma|tcgen05")

#: In the configuration of cuDNN's attention: the product whose batch dimensions are those of the
#: query, forwards and backwards.
_QUERY_PRODUCTS = ("bmm1_dot_dimension_numbers", "bmm2_grad_gemm2_dot_dimension_numbers")


def configured(attribute: Any) -> Iterator[tuple[str, Attribute]]:
    """What the ``backend_config`` of a custom call states: a dictionary, or JSON in a string.

    ``kernel_name``; of a Pallas kernel the fields of its cost estimate; of a Mosaic kernel for GPUs
    ``multiplies``; of cuDNN's attention ``mask_type``, ``sliding_window_length`` and
    ``query_batch_dimensions``; of a product of cuBLAS the dimension numbers of a ``dot_general``;
    of TransformerEngine's calls dimensions and masks.
    """
    if isinstance(attribute, ir.DictAttr):
        yield from _entries(attribute)
        return
    config = _json(attribute)
    yield from _estimate(_field(_field(config, "custom_call_config"), "cost_estimate"))
    attention = _field(config, "cudnn_fmha_backend_config")
    if isinstance(mask := _field(attention, "mask_type"), str):
        yield "mask_type", printable(mask, breaks=False)
    if window := _number(_field(attention, "sliding_window_length")):
        yield "sliding_window_length", window
    for product in _QUERY_PRODUCTS:
        if dimensions := _numbers(_field(_field(attention, product), "lhs_batch_dimensions")):
            yield "query_batch_dimensions", dimensions
    numbers = _field(_field(config, "gemm_backend_config"), "dot_dimension_numbers")
    for name in _PRODUCT:
        if dimensions := _numbers(_field(numbers, name)):
            yield name.replace("batch", "batching"), dimensions


def _entries(config: Any) -> Iterator[tuple[str, Attribute]]:
    """What a dictionary states."""
    for entry in config:
        name, value = entry.name, entry.attr
        if name == "name" and isinstance(value, ir.StringAttr):
            yield "kernel_name", printable(value.value, breaks=False)
        elif name == "module" and isinstance(value, ir.StringAttr):
            yield from _mosaic(value.value_bytes)
        elif name == "cost_estimate_json":
            yield from _estimate(_json(value))
        elif name == "config" and isinstance(value, ir.DictAttr):
            yield from _entries(value)
        elif name in _STATED and isinstance(value, ir.BoolAttr | ir.IntegerAttr):
            yield name, int(value.value)


def _mosaic(code: bytes) -> Iterator[tuple[str, Attribute]]:
    """The name of a Mosaic kernel for GPUs, and whether its code has matrix products."""
    names = [name for name in _MOSAIC_NAME.findall(code) if name not in _UNNAMED]
    if names:
        yield "kernel_name", printable(names[-1].decode("ascii", "replace"), breaks=False)
    if _MULTIPLIES.search(code):
        yield "multiplies", 1


def _estimate(estimate: Any) -> Iterator[tuple[str, Attribute]]:
    for name in _ESTIMATE:
        if (number := _number(_field(estimate, name))) is not None:
            yield name, number


def stem(name: object) -> Iterator[tuple[str, Attribute]]:
    """``kernel_stem``: the part of a name before its first number, such as the size of a block."""
    if isinstance(name, str) and (number := re.search(r"_?\d", name)) and number.start():
        yield "kernel_stem", name[: number.start()]


def blocks(attribute: Any) -> Iterator[tuple[str, Attribute]]:
    """The sizes of blocks (``block_q``, ...) in the metadata of a Pallas kernel, in JSON."""
    sizes = _json(_field(_json(attribute), "xprof_metadata"))
    for name, size in sizes.items() if isinstance(sizes, dict) else ():
        number = _number(size)
        if name.startswith("block_") and number is not None:
            yield printable(name, breaks=False), number


def nonzero(operation: Any) -> Iterator[tuple[str, Attribute]]:
    """The number of nonzero elements of each operand, -1 unless it is a constant of integers."""
    counts = tuple(_nonzero(operand) for operand in operation.operands)
    if max(counts, default=-1) >= 0:
        yield "nonzero", counts


def first_operands(operation: Any) -> Iterator[tuple[str, Attribute]]:
    """For each operand the number of the first one with the same value, if a value is repeated."""
    operands = list(operation.operands)
    firsts = tuple(operands.index(operand) for operand in operands)
    if len({*firsts}) < len(firsts):
        yield "first_operands", firsts


def _nonzero(value: Any) -> int:
    constant = _origin(value)
    if constant is None or constant.name != "stablehlo.constant":
        return -1
    elements = constant.attributes["value"]
    type_ = ir.RankedTensorType(value.type)
    if not isinstance(type_.element_type, ir.IntegerType) or type_.element_type.width < 8:
        return -1
    if type_.rank < 2 or np.prod(type_.shape, dtype=np.float64) > _MOST_COUNTED:
        return -1
    if not isinstance(elements, ir.DenseIntElementsAttr):
        return -1
    return int(np.count_nonzero(np.asarray(elements)))


def _origin(value: Any) -> Any:
    """The op that defines a value; outside a loop, if the loop does not change the value."""
    while isinstance(value, ir.BlockArgument):
        loop = value.owner.owner
        loop = getattr(loop, "operation", loop)
        if loop is None or loop.name != "stablehlo.while":
            return None
        end = list(loop.regions[1].blocks[0].operations)[-1].operation
        body = loop.regions[1].blocks[0].arguments
        if end.operands[value.arg_number] != body[value.arg_number]:
            return None
        value = loop.operands[value.arg_number]
    return getattr(value.owner, "operation", value.owner)


def stated_rule(attribute: Any) -> Iterator[tuple[str, Attribute]]:
    """An ``sdy.sharding_rule`` as arrays; see ``rules/ops/sharding_rule.lp``.

    ``rule_sizes`` has the size of each factor.  Row K of ``rule_tensors``, ``rule_dims``,
    ``rule_positions`` and ``rule_factors`` is one factor of a dimension; results are numbered -1,
    -2 and so on.  ``rule_reduction``, ``rule_replicated`` and ``rule_permutation`` list factors.
    """
    rule = sdy.OpShardingRuleAttr(attribute)
    rows: list[tuple[int, int, int, int]] = []
    for side, tensors in enumerate((rule.operand_mappings, rule.result_mappings)):
        for index, tensor in enumerate(tensors):
            number = -1 - index if side else index
            for d, dimension in enumerate(sdy.TensorMappingAttr(tensor).dim_mappings):
                factors = sdy.DimMappingAttr(dimension).factor_indices
                rows += [(number, d, position, factor) for position, factor in enumerate(factors)]
    yield "rule_sizes", tuple(rule.factor_sizes)
    names = ("rule_tensors", "rule_dims", "rule_positions", "rule_factors")
    for name, column in zip(names, zip(*rows, strict=True), strict=bool(rows)):
        yield name, column
    for name, factors in (
        ("rule_reduction", rule.reduction_factors),
        ("rule_replicated", rule.need_replication_factors),
        ("rule_permutation", rule.permutation_factors),
    ):
        if numbers := tuple(factors):
            yield name, numbers


def _json(content: Any) -> Any:
    """The content of JSON in a string (attribute); None if there is none, or it is damaged."""
    text = content.value if isinstance(content, ir.StringAttr) else content
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _field(content: Any, name: str) -> Any:
    return content.get(name) if isinstance(content, dict) else None


def _numbers(content: Any) -> tuple[int, ...]:
    """A list of whole numbers; empty for anything else."""
    numbers = [_number(item) for item in content] if isinstance(content, list) else []
    known = tuple(number for number in numbers if number is not None)
    return known if len(known) == len(numbers) else ()


def _number(content: Any) -> int | None:
    """A whole number from 0 on, which may be a string, or None."""
    if isinstance(content, str) and content.isdecimal() and len(content) < 20:
        content = int(content)
    if isinstance(content, int) and not isinstance(content, bool) and 0 <= content <= _LARGEST:
        return content
    return None
