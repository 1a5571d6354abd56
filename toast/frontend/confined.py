"""Reads an untrusted StableHLO file in a process that may hang, crash or run out of memory.

    python -P toast/frontend/confined.py

MLIR's parser never returns for some invalid modules and aborts on text that is not UTF-8; nested
calls may inline to millions of ops.

The standard input holds one line of JSON and then the content of the file.  The JSON has the limits
(``bytes``, ``seconds``), the ``name`` of the file, ``what`` to read (``program`` or ``functions``)
and the entry ``function``.  The output is one byte, the kind of the answer
(:data:`toast.frontend.stablehlo.PROGRAM` and so on), followed by the bytecode of the inlined or of
the whole module, or by an error in one line.  The process does not import JAX.
"""

from __future__ import annotations

import json
import sys

#: A recursion limit below the default: the process that reads the bytecode has a deeper stack.
_RECURSION = 700


def main() -> None:
    """Reads the request from the standard input and writes the answer."""
    from toast.boundary import limits

    request = json.loads(sys.stdin.buffer.readline())
    limits.bound(request["bytes"], request["seconds"])
    sys.setrecursionlimit(_RECURSION)
    answer = _answer(sys.stdin.buffer.read(), **request)
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()


def _answer(data: bytes, *, name: str, what: str, function: str, **_limits: object) -> bytes:
    from toast.boundary.printable import shortened
    from toast.errors import TargetError
    from toast.frontend.stablehlo import ERROR

    try:
        return _read(data, name, what, function)
    except TargetError as error:
        message = str(error)
    except RecursionError:
        message = f"{name}: its regions or calls are nested too deeply; flatten the program"
    except MemoryError:
        message = f"{name}: reading it ran out of memory; use a smaller program"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = f"{type(error).__name__}: {shortened(lines[0])}"
        message = f"{name}: TOAST cannot read this program: {reason}"
    return ERROR + message.encode(errors="replace")


def _read(data: bytes, name: str, what: str, function: str) -> bytes:
    from toast.frontend import mlir, stablehlo

    module = mlir.parse(data, name)
    if function:
        mlir.make_entry(module, function, name)
    entries = len(mlir.public_functions(module))
    if what == "functions" and not function and entries != 1 and mlir.functions_of(module):
        if mlir.has_entry(module):
            stablehlo.inlined_public(module, name)
        answer = stablehlo.FUNCTIONS + mlir.bytecode(module)
        programs, _ = stablehlo.separate(module, name)
    else:
        entry = stablehlo.inlined(module, name)
        answer = stablehlo.PROGRAM + mlir.bytecode(module)
        programs = (stablehlo.flattened(module, entry, name=name, file=name),)
    for program in programs:
        for op in range(len(program.ops)):
            program.location(op)  # a name that is not text ends the process
    return answer


if __name__ == "__main__":
    main()
