"""Every rule, proven on every distinct op of the test programs and of the small models.

    python benchmarks/prove.py

Prints a row per op kind; exits with code 1 when a rule is wrong.  Takes a few minutes.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.rules.test_models import PROGRAMS
from toast import api
from toast.models import ZOO, build
from toast.prove import prove, tally


def main() -> int:
    """Prove, print, and say whether all is well."""
    programs = {name: api.program_of(f, *shapes) for name, (f, shapes) in PROGRAMS.items()}
    small = [name for name in ZOO if name != "t2b"]  # whose small form is t2b-tiny
    programs |= {name: api.program_of(build(name, small=True)) for name in small}
    proofs = []
    for number, (name, program) in enumerate(programs.items()):
        print(f"[{number + 1}/{len(programs)}] {name}", file=sys.stderr)
        found = prove(program)
        proofs += found
        for proof in found:
            if proof.wrong:
                print(f"{program.describe(proof.op)}: factor {proof.factor}: {proof.outcome}")
    print(f"{'kind':26s}{'proven':>8s}{'wrong':>8s}{'not run':>8s}")
    for row in tally(proofs):
        print(f"{row.kind:26s}{row.proven:8d}{row.wrong:8d}{row.skipped:8d}")
    return 1 if any(p.wrong for p in proofs) else 0


if __name__ == "__main__":
    sys.exit(main())
