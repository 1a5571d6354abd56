"""One function out of many: calls are replaced by copies of what they call."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from toast.errors import TargetError
from toast.frontend.mlir.modules import main_function


def inline_calls(module: ir.Module, origin: str) -> None:
    """Replace every ``func.call`` reachable from main by a copy of its callee's body.

    Each copy keeps its own location below that of its call site.  Raises :class:`TargetError`
    for recursive calls and calls to functions without a body.
    """
    functions = {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func"
    }
    main = main_function(module, origin)
    with module.context:
        _inline_region(main.operation.regions[0], functions, (), _Work(origin))
        for function in functions.values():
            if function != main:
                function.operation.erase()


#: More copies than this are calls of calls of calls, which are no program that can be planned.
_MOST_COPIES = 1_500_000


class _Work:
    """Whose calls are inlined, and how many ops were copied for them."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._left = _MOST_COPIES

    def copied(self) -> None:
        """Count one more; raises :class:`TargetError` where it is one too many."""
        self._left -= 1
        if self._left < 0:
            raise TargetError(
                f"{self.origin}: its calls stand for more than {_MOST_COPIES:,} ops; call less"
            )


#: Ops that stand for a function's body, and the attribute that names the function.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}


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
                    f"{work.origin}: call of @{name}, which the module does not define; "
                    "link its definition into the file"
                )
            body = callee.operation.regions[0]
            _inline_region(body, functions, (*stack, name), work)
            _inline_call(operation, body.blocks[0], work)


def _inline_call(call: Any, body: Any, work: _Work) -> None:
    """Copy the ops of ``body`` before ``call``, rewire, and erase the call."""
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
    """Point operands, also those captured inside regions, at the caller's values."""
    for index, operand in enumerate(operation.operands):
        if operand in mapping:
            operation.operands[index] = mapping[operand]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                _remap(inner.operation, mapping)


#: Ops that may do something besides defining their results.
_EFFECTS = frozenset({
    "stablehlo.custom_call", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send",
    "stablehlo.recv", "stablehlo.while", "stablehlo.case", "stablehlo.if", "func.return",
})  # fmt: skip


def drop_dead_ops(function: Any) -> None:
    """Erase ops whose results nobody uses: XLA never runs them, so they must not be priced."""
    for op in reversed(list(function.operation.regions[0].blocks[0].operations)):
        operation = op.operation
        if operation.name.startswith("sdy.") or operation.name in _EFFECTS:
            continue
        if not any(True for result in operation.results for _ in result.uses):
            operation.erase()
