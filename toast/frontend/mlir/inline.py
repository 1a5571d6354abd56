"""Inlines calls and removes dead ops."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from toast.errors import TargetError
from toast.frontend.mlir.modules import main_function, public_functions


def inline_calls(module: ir.Module, origin: str) -> None:
    """Replaces every call that is reachable from the main function by the body of its callee.

    Composites that are :func:`opaque` stay; calls in their decompositions are replaced, too.  The
    location of an inlined op is its own location, called from that of the call.  ``origin`` names
    the module in errors.

    Raises :class:`TargetError` for recursive calls, calls of functions without a body or with
    several blocks, and calls that expand to too many ops.
    """
    _inline(module, [main_function(module, origin)], origin)


def inline_public(module: ir.Module, origin: str) -> None:
    """Does :func:`inline_calls` for every public function, and erases private functions only."""
    _inline(module, public_functions(module), origin)


def _inline(module: ir.Module, entries: list[Any], origin: str) -> None:
    """Inlines the calls of the ``entries``, and erases functions that nothing calls any more."""
    functions = {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    with module.context:
        work = _Work(origin)
        kept: set[str] = set()
        for entry in entries:
            _inline_region(entry.operation.regions[0], functions, (), work)
            kept |= _computations(entry.operation)
        for name, function in functions.items():
            if function not in entries and name not in kept | work.decompositions:
                function.operation.erase()


def _computations(operation: Any) -> set[str]:
    """The functions that custom calls in an op refer to, such as the order of ``ApproxTopK``."""
    names: set[str] = set()
    if "called_computations" in operation.attributes:
        symbols = ir.ArrayAttr(operation.attributes["called_computations"])
        names |= {ir.FlatSymbolRefAttr(symbol).value for symbol in symbols}
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                names |= _computations(inner.operation)
    return names


#: The most ops that inlining may copy: nested calls can expand exponentially.
_MOST_COPIES = 1_500_000


class _Work:
    """Counts the ops that inlining copies, and collects the functions that stay."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        #: The functions of opaque composites.
        self.decompositions: set[str] = set()
        self._left = _MOST_COPIES

    def copied(self) -> None:
        """Counts one more op; raises :class:`TargetError` beyond the limit."""
        self._left -= 1
        if self._left < 0:
            raise TargetError(
                f"{self.origin}: its calls expand to more than {_MOST_COPIES:,} ops; "
                "reduce the nesting of calls"
            )


#: Ops that call a function, and the attribute that names the function.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}

#: Composites with this prefix are ops with rules; XLA replaces them by their decompositions.
OPAQUE = "toast."

#: Composites that devices run in local forms of their own (``toast/lower/attention_forms.py``), not
#: by their decompositions.
WITH_LOCAL_FORMS = frozenset({
    "toast.attention", "toast.attention_backward", "toast.paged_attention",
})  # fmt: skip


def opaque(operation: Any) -> bool:
    """Whether an operation is a composite that stays one op of the program."""
    if operation.name != "stablehlo.composite":
        return False
    return str(operation.attributes["name"].value).startswith(OPAQUE)


def decomposition(operation: Any) -> str:
    """The function that devices run on their shards for a composite; ``""`` if there is none."""
    if not opaque(operation) or operation.attributes["name"].value in WITH_LOCAL_FORMS:
        return ""
    return str(ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value)


def _inline_region(
    region: Any, functions: dict[str, Any], stack: tuple[str, ...], work: _Work
) -> None:
    for block in region.blocks:
        for op in list(block.operations):
            operation = op.operation
            symbol = _CALLS.get(operation.name)
            if symbol is None:
                for inner in operation.regions:
                    _inline_region(inner, functions, stack, work)
                continue
            name = ir.FlatSymbolRefAttr(operation.attributes[symbol]).value
            if name in stack:
                raise TargetError(
                    f"{work.origin}: function @{name} is recursive; unroll the recursion"
                )
            callee = functions.get(name)
            if callee is not None and len(callee.operation.regions[0].blocks) > 1:
                raise TargetError(
                    f"{work.origin}: function @{name} has several blocks; lower branches (cf.br) "
                    "to stablehlo.if, case or while"
                )
            if callee is None or not callee.operation.regions[0].blocks:
                raise TargetError(
                    f"{work.origin}: the module calls @{name} but does not define it; "
                    "add the definition to the file"
                )
            body = callee.operation.regions[0]
            if name not in work.decompositions:
                _inline_region(body, functions, (*stack, name), work)
            if opaque(operation):
                work.decompositions.add(name)
            else:
                _inline_call(operation, body.blocks[0], work)


def _inline_call(call: Any, body: Any, work: _Work) -> None:
    """Copies the ops of ``body`` before ``call``, replaces its results, and erases it."""
    mapping = dict(zip(body.arguments, call.operands, strict=True))
    insertion = ir.InsertionPoint(call)
    for op in body.operations:
        source = op.operation
        if source.name == "func.return":
            for old, new in zip(call.results, source.operands, strict=True):
                old.replace_all_uses_with(mapping.get(new, new))
            break
        work.copied()
        copy = source.clone(insertion).operation
        copy.location = ir.Location.callsite(source.location, [call.location])
        _remap(copy, mapping)
        mapping.update(zip(source.results, copy.results, strict=True))
    call.erase()


def _remap(operation: Any, mapping: dict[Any, Any]) -> None:
    """Replaces operands, also those inside regions, by the caller's values."""
    for index, operand in enumerate(operation.operands):
        if operand in mapping:
            operation.operands[index] = mapping[operand]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _remap(inner.operation, mapping)


#: Ops that may have side effects.
_EFFECTS = frozenset({
    "stablehlo.custom_call", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send",
    "stablehlo.recv", "stablehlo.while", "stablehlo.case", "stablehlo.if", "func.return",
})  # fmt: skip


def drop_dead_ops(function: Any) -> None:
    """Erases ops without used results: XLA does not run them, so they must not be priced."""
    for op in reversed(list(function.operation.regions[0].blocks[0].operations)):
        operation = op.operation
        if operation.name.startswith("sdy.") or operation.name in _EFFECTS:
            continue
        if not any(True for result in operation.results for _ in result.uses):
            operation.erase()
