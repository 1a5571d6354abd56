"""A rule to begin with for a custom call that has none."""

from __future__ import annotations

from toast.analysis import Analysis
from toast.facts import quoted


def suggested_rule(analysis: Analysis) -> list[str]:
    """A rule for the first custom call without one, which shards its first dimension.

    Empty if there is no such call with a dimension.
    """
    program = analysis.program
    signatures = (program.signatures[program.ops[op].signature] for op in analysis.without_rule)
    calls = (s for s in signatures if s.kind == "custom_call")
    for call in calls:
        first = next((type_.shape for type_ in call.operands if type_.shape), ())
        if not first:
            continue
        attribute = "kernel_name" if call.attribute("kernel_name") else "call_target_name"
        kernel = str(call.attribute(attribute))
        name = quoted(kernel)
        other = f"mine(Op), tensor_dim(Op,T,D,Size), (D,Size) != (0,{first[0]})"
        return [
            f"a rule for {kernel} that shards its first dimension, in a file for --rules "
            f"(change {first[0]} and what follows to the call's einsum):",
            f"custom_call_rule({name}).",
            "%! mine(Op): a call of it.",
            f"mine(Op) :- op(Op,custom_call), attribute(Op,{attribute},{name}).",
            f"factor(Op,batch,T,0) :- mine(Op), tensor_dim(Op,T,0,{first[0]}).",
            f"factor(Op,(T,D),T,D) :- {other}.",
            f"need_replication(Op,(T,D)) :- {other}.",
        ]
    return []
