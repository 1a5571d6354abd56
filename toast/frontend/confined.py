"""Reads a StableHLO file of a stranger's in a process that may hang, crash or run out of memory.

    python -P toast/frontend/confined.py

MLIR's parser stops for ever at some invalid modules and aborts at texts that are no UTF-8; calls of
calls may inline to millions of ops.  Reads its limits, the file's name, ``what`` is wanted and the
entry ``function`` as one line of JSON from the standard input, then the file's content.  Answers
with the kind of its answer and bytecode that :mod:`toast.frontend.stablehlo` was able to read: of
the inlined module, or of the whole one; or with a line that says what is wrong.  It does not
import JAX.
"""

from __future__ import annotations

import json
import sys

#: Frames that the process which reads the module again may have above its own.
_RECURSION = 700


def main() -> None:
    """Read the module that standard input has."""
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
        said = str(error)
    except RecursionError:
        said = f"{name}: its regions or calls are too deep; flatten the program"
    except MemoryError:
        said = f"{name}: ran out of memory; give a smaller program"
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        said = f"{type(error).__name__}: {shortened(lines[0])}"
        said = f"{name}: not a program that TOAST can read: {said}"
    return ERROR + said.encode(errors="replace")


def _read(data: bytes, name: str, what: str, function: str) -> bytes:
    from toast.frontend import mlir, stablehlo

    module = mlir.parse(data, name)
    if function:
        mlir.make_entry(module, function, name)
    if what == "functions" and not mlir.has_entry(module) and mlir.functions_of(module):
        answer = stablehlo.FUNCTIONS + mlir.bytecode(module)
        programs = stablehlo.separate(module, name)
    else:
        entry = stablehlo.inlined(module, name)
        answer = stablehlo.PROGRAM + mlir.bytecode(module)
        programs = (stablehlo.flattened(module, entry, name=name, file=name),)
    for program in programs:
        for op in range(len(program.ops)):
            program.location(op)  # a name that is no text ends the process
    return answer


if __name__ == "__main__":
    main()
