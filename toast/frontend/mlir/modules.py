"""MLIR modules: parsing, passes, bytecode, entry functions and modules of single ops."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

from toast.errors import TargetError
from toast.program import TensorType
from toast.units import listed

#: Operations whose results are values of their regions.
WITH_REGIONS = frozenset({
    "stablehlo.while", "stablehlo.case", "stablehlo.if", "stablehlo.optimization_barrier",
})  # fmt: skip

#: Kinds of a program's ops that are parts of such an operation, or of the function.
OF_REGIONS = frozenset({"carry", "yield", "join", "argument", "return", "optimization_barrier"})


class _Context(ir.Context):  # type: ignore[misc]
    """A context without dialects; the base class of the bindings would load all of them."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


@functools.cache
def context() -> ir.Context:
    """The MLIR context of the process, with the dialects of JAX and Shardy.

    It is configured like JAX's context, without importing JAX.  Multithreading is off: a thread
    that reports an error would wait for the interpreter while the interpreter waits for the parser.
    """
    ctx: ir.Context = _Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    ctx.append_dialect_registry(registry)
    ctx.load_all_available_dialects()
    ctx.enable_multithreading(False)
    for dialect in (sdy, chlo, stablehlo):
        dialect.register_dialect(ctx)
    mhlo.register_mhlo_dialect(ctx)
    ctx.allow_unregistered_dialects = False
    return ctx


def parse(data: bytes | str, origin: str) -> ir.Module:
    """Parses StableHLO text, bytecode or a portable artifact; ``origin`` names it in errors.

    Raises :class:`TargetError` with the parser's first message and its position.
    """
    with context() as ctx:
        try:
            if isinstance(data, bytes) and data.startswith(b"ML\xefR"):
                try:
                    return stablehlo.deserialize_portable_artifact(ctx, data)
                except Exception:  # plain bytecode, not a portable artifact
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
    diagnostic = re.search(r'"?-"?:(\d+):(\d+)\)?:?\s*(?:error:)?\s*([^\n]+)', text)
    if diagnostic:
        line, column, message = diagnostic.groups()
        return f":{line}:{column}: {_foreign_type(message) or f'not StableHLO: {message.strip()}'}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    detail = next((line for line in lines if "error:" in line), lines[-1] if lines else "")
    return f": not StableHLO: {detail.split('error:')[-1].strip()}"


#: What to do about types of dialects that jaxlib does not have.
_FOREIGN = {
    "quant": "quantised element type {}: jaxlib cannot read it; export the program with integers "
    "and their scales",
    "sparse_tensor": "sparse type {}: jaxlib cannot read it; pass dense arrays, such as the data "
    "and the indices of jax.experimental.sparse.BCOO",
}  # fmt: skip


def _foreign_type(message: str) -> str:
    """The message for a type that jaxlib cannot read; empty for other messages."""
    found = re.search(r'([!#])"(\w+)"<"(.*)">.*created with unregistered dialect', message)
    if not found:
        return ""
    mark, dialect, body = found.groups()
    shown = f"{mark}{dialect}.{body}"
    return _FOREIGN.get(dialect, "type {} is of no dialect of JAX; export plain types").format(
        shown
    )


def run_passes(module: ir.Module, pipeline: str) -> None:
    """Runs a textual pass pipeline, such as Shardy's, on ``module`` in place."""
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
    """The text of the module; it does not change when lines move in the user's source."""
    return str(module.operation.get_asm(enable_debug_info=False))


#: Constants with more elements are left out of an outline.
_OUTLINED = 1024


def outline(module: ir.Module) -> str:
    """The text of the module without locations and without the elements of large constants."""
    return str(module.operation.get_asm(enable_debug_info=False, large_elements_limit=_OUTLINED))


def functions_of(module: ir.Module) -> dict[str, Any]:
    """The functions of a module that have a body, by name."""
    return {
        ir.StringAttr(f.attributes["sym_name"]).value: f
        for f in module.body.operations
        if f.operation.name == "func.func" and f.operation.regions[0].blocks
    }


def make_entry(module: ir.Module, name: str, origin: str) -> None:
    """Makes the function ``name`` the entry: all other functions become private.

    ``origin`` names the module in errors.  Raises :class:`TargetError` if the module has no such
    function with a body.
    """
    functions = functions_of(module)
    if name not in functions:
        known = listed([f"@{other}" for other in functions], 5) or "none"
        raise TargetError(f"{origin}: no function @{name} with a body; the functions are {known}")
    with module.context:
        for other, function in functions.items():
            attributes = function.operation.attributes
            if other != name:
                attributes["sym_visibility"] = ir.StringAttr.get("private")
            elif "sym_visibility" in attributes:
                del attributes["sym_visibility"]


def main_function(module: ir.Module, origin: str) -> Any:
    """The entry: the public function ``main``, or otherwise the only public function.

    ``origin`` names the module in errors.  Raises :class:`TargetError` if there is no entry.
    """
    entries = _entries(module)
    if len(entries) != 1:
        raise TargetError(
            f"{origin}: expected one public function, or one named main, found {len(entries)}; "
            "name the entry function main"
        )
    return entries[0]


def copied_function(module: ir.Module, name: str, stem: str) -> Any:
    """A private copy of a function of a module, with a name that begins with ``stem``."""
    functions = {
        str(op.attributes["sym_name"].value): op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    free = next(n for i in itertools.count() if (n := f"{stem}_{i}") not in functions)
    copy = functions[name].operation.clone(ip=ir.InsertionPoint(module.body))
    copy.attributes["sym_name"] = ir.StringAttr.get(free)
    copy.attributes["sym_visibility"] = ir.StringAttr.get("private")
    return copy.opview


def module_name(module: ir.Module) -> str:
    """The name of a module; empty if it has none."""
    attributes = module.operation.attributes
    return str(attributes["sym_name"].value) if "sym_name" in attributes else ""


def counts(module: ir.Module) -> tuple[int, int]:
    """The numbers of arguments and of results of the main function."""
    with module.context:
        type_ = main_function(module, "module").attributes["function_type"]
        function = ir.FunctionType(ir.TypeAttr(type_).value)
        return len(function.inputs), len(function.results)


def has_entry(module: ir.Module) -> bool:
    """Whether a module has an entry (:func:`main_function`)."""
    return len(_entries(module)) == 1


def public_functions(module: ir.Module) -> list[Any]:
    """The public functions of a module, also those without a body."""
    functions = [f for f in module.body.operations if f.operation.name == "func.func"]
    return [f for f in functions if not _is_private(f)]


def _entries(module: ir.Module) -> list[Any]:
    public = public_functions(module)
    named = [f for f in public if ir.StringAttr(f.attributes["sym_name"]).value == "main"]
    return named or public


def _is_private(function: Any) -> bool:
    attributes = function.operation.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


def portable_artifact(module: ir.Module) -> bytes:
    """``module`` as a portable artifact with the entry ``main``, the form in ``jax.export``."""
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
    """The operations of a block and of its regions; an operation precedes those inside it."""
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from walk(inner)


def walk_order(module: ir.Module) -> dict[Any, int]:
    """The position of each operation in :func:`walk`; clones have the same positions."""
    return {operation: number for number, operation in enumerate(walk(module.body))}


def attribute_texts(module: ir.Module, name: str) -> dict[int, str]:
    """The text of the attribute ``name`` of each operation that has it, by position in the walk."""
    return {
        number: str(operation.attributes[name])
        for operation, number in walk_order(module).items()
        if name in operation.attributes
    }


def set_attributes(module: ir.Module, name: str, texts: Mapping[int, str]) -> None:
    """Sets the attribute ``name`` of operations to texts, by position in the walk."""
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
    if small := re.fullmatch(r"f([468])e(\w+)", element):
        element = f"f{small[1]}E" + small[2].replace("m", "M").replace("fn", "FN")
    return f"tensor<{''.join(f'{size}x' for size in type_.shape)}{element}>"


def tensor_type(shape: Sequence[int], dtype: str) -> ir.Type:
    """The MLIR type of a tensor; the current context is used."""
    return ir.Type.parse(type_text(TensorType(tuple(shape), dtype)))


def module_of_ops(
    ops: Sequence[tuple[str, Sequence[TensorType], Sequence[TensorType]]],
) -> ir.Module:
    """A module whose main function runs independent ops, each on its own arguments.

    :param ops: for each op its text in generic form, and the new types of its operands and results.
    :raises TargetError: if an op is invalid for these types.
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
