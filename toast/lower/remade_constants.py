"""Constants that a device computes anew where a use needs another sharding."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from toast.cost.constant_values import remade_values
from toast.frontend.mlir import CONSTRAINTS, ModuleSource
from toast.program import Program, Shardings


class RemadeConstants:
    """The ops of constants on whole shapes, kept while the lowering gives ops local shapes."""

    def __init__(self, program: Program, source: ModuleSource, shardings: Shardings) -> None:
        """Copies the ops of all constants that a use needs in another sharding."""
        self._program = program
        #: The copy of each op.
        self._copies: dict[int, Any] = {}
        remade = remade_values(program)
        first = len(program.ops) - len(program.results)
        for op, index in source.operand_sites:
            value = program.ops[op].operands[index]
            if remade[value]:
                wanted = shardings.at(program, op, index)
                if op >= first:
                    wanted = shardings.results[op - first]
                if wanted != shardings.of(program, value):
                    self._copy(source, program.values[value].op)

    def __contains__(self, value: int) -> bool:
        return self._program.values[value].op in self._copies

    def _copy(self, source: ModuleSource, op: int) -> None:
        if op in self._copies:
            return
        program, operation = self._program, source.operations[op]
        for value in program.ops[op].operands:
            self._copy(source, program.values[value].op)
        with operation.context, operation.location, ir.InsertionPoint(operation):
            self._copies[op] = operation.operation.clone()
        for index, value in enumerate(program.ops[op].operands):
            self._copies[op].operands[index] = self._result(self._copies, value)

    def _result(self, copies: dict[int, Any], value: int) -> Any:
        op = self._program.values[value].op
        return copies[op].results[self._program.ops[op].results.index(value)]

    def whole(self, value: int) -> Any:
        """The whole value, computed at the point where ops are emitted."""
        return self._whole(value, {})

    def _whole(self, value: int, emitted: dict[int, Any]) -> Any:
        op = self._program.values[value].op
        if self._copies[op].name in CONSTRAINTS:
            return self._whole(self._program.ops[op].operands[0], emitted)
        if op not in emitted:
            operands = [self._whole(v, emitted) for v in self._program.ops[op].operands]
            emitted[op] = self._copies[op].clone()
            for index, operand in enumerate(operands):
                emitted[op].operands[index] = operand
        return self._result(emitted, value)

    def erase(self) -> None:
        """Removes the copies from the module."""
        for copy in reversed(self._copies.values()):
            copy.erase()
        self._copies.clear()
