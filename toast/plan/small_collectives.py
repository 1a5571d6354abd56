"""Notes on plans with hundreds of tiny collectives, whose fixed cost is most of their time."""

from __future__ import annotations

from collections.abc import Sequence

from toast.cost import Transfer
from toast.units import listed, size_text, time_text

#: A collective of at most so many bytes is tiny: its fixed cost is most of its time.
_TINY_BYTES = 2**18

#: So many tiny collectives of one kind are worth a note.
_MANY = 100

#: They must also be at least this share of the step.
_SHARE = 0.01

#: The most kinds that a note names.
_NAMED = 3


def small_collective_notes(transfers: Sequence[Transfer], step_seconds: float) -> list[str]:
    """A line on tiny collectives that are many and cost time; none if there are few.

    ``transfers`` are those of the plan, ``step_seconds`` its predicted step.
    """
    kinds: dict[str, list[Transfer]] = {}
    for transfer in transfers:
        if 0 < transfer.bytes <= _TINY_BYTES and transfer.count > 0:
            kinds.setdefault(transfer.kind, []).append(transfer)
    costly: list[tuple[float, str, str]] = []
    for kind, tiny in kinds.items():
        count = sum(transfer.count for transfer in tiny)
        seconds = sum(transfer.count * transfer.seconds for transfer in tiny)
        if count < _MANY or seconds < _SHARE * step_seconds:
            continue
        mean = sum(transfer.count * transfer.bytes for transfer in tiny) / count
        plural = kind.replace("_", "-") + "s"
        costly.append((
            seconds,
            f"{round(count):,} {plural} of {size_text(mean)} on average "
            f"take {time_text(seconds)}",
            kind,
        ))  # fmt: skip
    if not costly:
        return []
    texts = [text for _, text, _ in sorted(costly, reverse=True)]
    advice = "keep small arrays whole (pin them), or stack them into one"
    if all(kind == "all_reduce" for _, _, kind in costly):
        advice = "stack small arrays into one (XLA may combine their sums, which has no price here)"
    return [f"tiny collectives: {listed(texts, _NAMED)}; most of it is their fixed cost: {advice}"]
