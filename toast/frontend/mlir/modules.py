"""Modules as they come and go: parsing, passes, bytecode, and single ops as text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

from toast.errors import TargetError
from toast.program import TensorType
from toast.units import listed


class _Context(ir.Context):  # type: ignore[misc]
    """A context with no dialects, where that of the bindings would load all there are."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


@functools.cache
def context() -> ir.Context:
    """One MLIR context with JAX's dialects and Shardy registered, kept for the process.

    It is made as JAX makes its own, without importing JAX.  It has no threads: one that reports an
    error waits for the interpreter, which waits for the parser.
    """
    made: ir.Context = _Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    made.append_dialect_registry(registry)
    made.load_all_available_dialects()
    made.enable_multithreading(False)
    for dialect in (sdy, chlo, stablehlo):
        dialect.register_dialect(made)
    mhlo.register_mhlo_dialect(made)
    made.allow_unregistered_dialects = False
    return made


def parse(data: bytes | str, origin: str) -> ir.Module:
    """Parse StableHLO text, bytecode or a portable artifact; ``origin`` names it in errors.

    Raises :class:`TargetError` with the parser's first message and its place.
    """
    with context() as ctx:
        try:
            if isinstance(data, bytes) and data.startswith(b"ML\xefR"):
                try:
                    return stablehlo.deserialize_portable_artifact(ctx, data)
                except Exception:  # plain bytecode is no portable artifact
                    return ir.Module.parse(data)
            text = data.decode() if isinstance(data, bytes) else data
            return ir.Module.parse(text)
        except UnicodeDecodeError:
            raise TargetError(
                f"{origin}: not StableHLO: neither MLIR text nor MLIR bytecode; "
                "export it with jax.export or .as_text()"
            ) from None
        except Exception as error:
            raise TargetError(f"{origin}{_first_diagnostic(error)}") from None


def _first_diagnostic(error: Exception) -> str:
    """``:LINE:COLUMN: message`` of the first MLIR diagnostic, on one line."""
    text = str(error)
    found = re.search(r'"?-"?:(\d+):(\d+)\)?:?\s*(?:error:)?\s*([^\n]+)', text)
    if found:
        line, column, message = found.groups()
        return f":{line}:{column}: not StableHLO: {message.strip()}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = next((line for line in lines if "error:" in line), lines[-1] if lines else "")
    return f": not StableHLO: {detail.split('error:')[-1].strip()}"


def run_passes(module: ir.Module, pipeline: str) -> None:
    """Run a textual pass pipeline, such as Shardy's, on ``module`` in place."""
    with module.context:
        passmanager.PassManager.parse(pipeline).run(module.operation)


def clone(module: ir.Module) -> ir.Module:
    """An independent copy of ``module``."""
    with module.context:
        return ir.Module.parse(bytecode(module))


def bytecode(module: ir.Module) -> bytes:
    """MLIR bytecode of ``module``, with locations."""
    import io

    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()


def text_without_locations(module: ir.Module) -> str:
    """The module as text that does not change when lines move in the user's source."""
    return str(module.operation.get_asm(enable_debug_info=False))


def functions_of(module: ir.Module) -> dict[str, Any]:
    """The functions of a module that have a body, by name."""
    return {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func" and f.operation.regions[0].blocks
    }


def make_entry(module: ir.Module, name: str, origin: str) -> None:
    """Make the function called ``name`` the only public one, so that it is the entry.

    Raises :class:`TargetError` where there is no such function.
    """
    functions = functions_of(module)
    if name not in functions:
        known = listed([f"@{known}" for known in functions], 5) or "none"
        raise TargetError(f"{origin}: no function @{name} with a body; the functions are {known}")
    with module.context:
        for known, function in functions.items():
            attributes = function.operation.attributes
            if known != name:
                attributes["sym_visibility"] = ir.StringAttr.get("private")
            elif "sym_visibility" in attributes:
                del attributes["sym_visibility"]


def main_function(module: ir.Module, origin: str) -> Any:
    """The entry: the public function called ``main``, or else the only public one."""
    entries = _entries(module)
    if len(entries) != 1:
        raise TargetError(
            f"{origin}: expected one public function (or one called main), found {len(entries)}; "
            "name the entry function main"
        )
    return entries[0]


def has_entry(module: ir.Module) -> bool:
    """Whether :func:`main_function` finds the entry of a module."""
    return len(_entries(module)) == 1


def _entries(module: ir.Module) -> list[Any]:
    functions = [f for f in module.body.operations if f.operation.name == "func.func"]
    public = [f for f in functions if not _is_private(f)]
    named = [f for f in public if ir.StringAttr(f.attributes["sym_name"]).value == "main"]
    return named or public


def _is_private(function: Any) -> bool:
    attributes = function.operation.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


def portable_artifact(module: ir.Module) -> bytes:
    """``module`` in the serialized form that ``jax.export.Exported`` holds, its entry ``main``."""
    if ir.StringAttr(main_function(module, "module").attributes["sym_name"]).value != "main":
        module = clone(module)
        with module.context:
            main_function(module, "module").attributes["sym_name"] = ir.StringAttr.get("main")
    version = stablehlo.get_version_from_compatibility_requirement(
        stablehlo.StablehloCompatibilityRequirement.WEEK_4
    )
    from jax._src.lib import _jax as jax_extension

    return bytes(jax_extension.mlir.serialize_portable_artifact(bytecode(module), version, True))


def walk(block: Any) -> Iterator[Any]:
    """The operations of a block and of all regions in it, outer ones first."""
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from walk(inner)


def walk_order(module: ir.Module) -> dict[Any, int]:
    """The number of each operation in a walk over the module; the same for a clone of it."""
    return {operation: number for number, operation in enumerate(walk(module.body))}


def attribute_texts(module: ir.Module, name: str) -> dict[int, str]:
    """The attribute called ``name`` of each operation that has it, by number in the walk."""
    return {
        number: str(operation.attributes[name])
        for operation, number in walk_order(module).items()
        if name in operation.attributes
    }


def set_attributes(module: ir.Module, name: str, texts: Mapping[int, str]) -> None:
    """Set the attribute called ``name``, given as text, by number in the walk."""
    with module.context:
        for operation, number in walk_order(module).items():
            if number in texts:
                operation.attributes[name] = ir.Attribute.parse(texts[number])
    module.operation.verify()


def generic_text(operation: Any) -> str:
    """An operation in MLIR's generic form, without locations."""
    return str(operation.get_asm(print_generic_op_form=True, use_local_scope=True))


def type_text(type_: TensorType) -> str:
    """A tensor type as MLIR writes it."""
    element = {"c64": "complex<f32>", "c128": "complex<f64>"}.get(type_.dtype, type_.dtype)
    if found := re.fullmatch(r"f8e(\w+)", element):
        element = "f8E" + found[1].replace("m", "M").replace("fn", "FN")
    return f"tensor<{''.join(f'{size}x' for size in type_.shape)}{element}>"


def module_of_ops(
    ops: Sequence[tuple[str, Sequence[TensorType], Sequence[TensorType]]],
) -> ir.Module:
    """A module whose main function runs ops side by side, each on arguments of its own.

    An op is given in generic form, with the types that its operands and results shall have.  Raises
    :class:`TargetError` when one does not verify at these types.
    """
    parameters: list[str] = []
    lines: list[str] = []
    values: list[str] = []
    types: list[str] = []
    for number, (text, operands, results) in enumerate(ops):
        start = text.index('"')
        opened = text.index("(", start)
        closed = text.index(")", opened)
        end = text.rindex(" : (")
        ins, outs = ([type_text(t) for t in side] for side in (operands, results))
        used = ", ".join(f"%p{len(parameters) + i}" for i in range(len(ins)))
        lines.append(
            f"%r{number}:{len(outs)} = {text[start : opened + 1]}{used}{text[closed:end]}"
            f" : ({', '.join(ins)}) -> ({', '.join(outs)})"
        )
        values += [f"%r{number}#{i}" for i in range(len(outs))]
        parameters, types = parameters + ins, types + outs
    signature = ", ".join(f"%p{i}: {type_}" for i, type_ in enumerate(parameters))
    return parse(
        f"func.func public @main({signature}) -> ({', '.join(types)}) {{\n"
        + "\n".join(lines)
        + f"\nfunc.return {', '.join(values)} : {', '.join(types)}\n}}\n",
        "op",
    )
