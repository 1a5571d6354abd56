"""A program whose best plan resolves compatible conflicts differently (paper, section 3.5).

``a`` is what every token has to do with every other; labels are carried along it, and against it::

    a = x @ x.T                     [S, S]: both dimensions are the tokens, a conflict
    return a @ labels, a.T @ labels

The conflicts of ``a`` and of its uses form boxes, so TOAST resolves them alike: one dimension of
``a`` is sharded where it is made and wherever it is used.  Say the rows.  The first product then
keeps its rows sharded and needs nothing from other devices; the second sums over the rows, so every
device holds a partial sum of the whole result, and the results, which are wide, have to be summed
over devices.  The other resolution only swaps the two products.

Resolved by itself, each product shards the dimension that it does not sum over.  The price is one
all-to-all of ``a``, between its definition and one use, and ``a`` is small against the results: it
has as many columns as there are tokens, they have one per label.  (The number of labels is odd, as
that of GPT-2's vocabulary is; else sharding the labels would do as well.)

Refinements, which the search puts behind the actions, are bound to no color.  With them it finds
what is best here whatever the resolution: the first two plans below do without.

    python examples/compatibility_loses.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import toast
from toast.search import Polishing, TreeSearch

TOKENS, WIDTH, LABELS = 1024, 512, 50257


def carry_labels(x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Labels carried along the affinity of tokens, and against it."""
    affinity = x @ x.T
    return affinity @ labels, affinity.T @ labels


def plans() -> dict[str, toast.Plan]:
    """The plan with compatible conflicts resolved alike, with each by itself, and refined."""
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)
    labels = jax.ShapeDtypeStruct((TOKENS, LABELS), jnp.float32)
    analysis = toast.analyze(carry_labels, x, labels)
    mesh, hardware = "tokens=4", "tpu-v5e"
    plain = TreeSearch(), Polishing()
    return {
        "compatible": toast.plan(analysis, mesh=mesh, hardware=hardware, stages=plain),
        "independent": toast.plan(
            analysis, mesh=mesh, hardware=hardware, stages=plain, resolution="independent"
        ),
        "refined": toast.plan(analysis, mesh=mesh, hardware=hardware),
    }


def main() -> None:
    for resolution, plan in plans().items():
        moved = ", ".join(f"{c.count} {c.kind}" for c in plan.after.collectives if c.count)
        print(
            f"{resolution:12} step {plan.after.step_seconds * 1e3:5.2f} ms "
            f"(unsharded {plan.before.step_seconds * 1e3:.2f}), {moved or 'no collectives'}"
        )


if __name__ == "__main__":
    main()
