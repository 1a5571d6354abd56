"""Recomputation in the backward pass: which values of a layer are kept, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from toast.errors import TargetError
from toast.frontend import memory_tracing
from toast.frontend.checkpoints import checkpoint

#: The names that ``names`` keeps: the results of attention's projections, and of attention.
KEPT = ("query", "key", "value", "attention")


def checkpointed(
    layer: Callable[..., Any], remat: str, offload: str, names: tuple[str, ...], *, scanned: bool
) -> Callable[..., Any]:
    """A layer that keeps only some of its values for the backward pass.

    While it is traced for a plan with a memory policy, that decides instead.

    :param layer: a function of arrays that names its values with ``checkpoint_name``.
    :param remat: ``none`` to keep everything, ``full`` to keep nothing but the arguments, ``names``
        to keep the values named ``KEPT``, or names of values, joined by ``+``.
    :param offload: names of values, joined by ``+``, that are kept in the memory of the host; empty
        for none.
    :param names: the names that values of the layer have.
    :param scanned: whether a scan runs the layer, which keeps XLA from merging the computations of
        both passes.
    :raises toast.errors.TargetError: for a name that no value has, or that is both kept and
        offloaded.
    """
    offloaded = _chosen(offload, "offload", names)
    if remat == "none":
        if offloaded:
            raise TargetError("offload needs remat: full, names, or names of values")
        planned = memory_tracing.planned()
        return checkpoint(layer, prevent_cse=not scanned) if planned else layer
    if remat == "names":
        kept = [name for name in KEPT if name in names and name not in offloaded]
    else:
        kept = [] if remat == "full" else _chosen(remat, "remat", names)
    both = sorted(set(kept) & set(offloaded))
    if both:
        raise TargetError(f"{both[0]} is in remat and in offload; remove it from one of them")
    if offloaded:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept, names_which_can_be_offloaded=offloaded,
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    else:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
    return checkpoint(layer, policy=policy, prevent_cse=not scanned)


def _chosen(text: str, option: str, names: tuple[str, ...]) -> list[str]:
    """The names in the text of an option."""
    chosen = text.split("+") if text else []
    for name in chosen:
        if name not in names:
            words = "none, full, names, or " if option == "remat" else ""
            raise TargetError(
                f"{option} {text}: no value is named {name!r}; use {words}names of "
                f"{', '.join(names)}, joined by +"
            )
    return chosen
