"""Texts for people: numbers of three digits with units, and shortened lists."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(count: float) -> str:
    """A number of bytes: ``2.54 GiB``, ``684 MiB``, ``12 KiB`` or ``4 B``."""
    if count < 0:
        return f"-{size_text(-count)}"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:.0f} B"


#: Units of sizes, as people write them.
_SIZES = {
    "b": 1.0, **{f"{name}ib": 2.0 ** (10 * power) for power, name in enumerate("kmgt", 1)},
    **{f"{name}b": 1e3**power for power, name in enumerate("kmgt", 1)},
}  # fmt: skip


def gib_of(text: str) -> float:
    """The GiB of a size with a unit (``600MiB``, ``80 GB``), or without (``14``, ``0.5``).

    :raises ValueError: if it is none.

    >>> gib_of("14"), gib_of("512MiB"), gib_of("1 TiB")
    (14.0, 0.5, 1024.0)
    """
    number, unit = text.strip(), "gib"
    for name in sorted(_SIZES, key=len, reverse=True):
        if number.lower().endswith(name):
            number, unit = number[: -len(name)], name
            break
    try:
        return float(number) * (_SIZES[unit] / 2**30)
    except ValueError:
        raise ValueError(
            f"{text!r} is no size; write GiB (14), or a size with its unit (600MiB)"
        ) from None


def time_text(seconds: float) -> str:
    """A number of seconds: ``4.22 s``, ``312 ms``, ``12 us``, or ``< 0.01 us`` if it is tiny."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return "< 0.01 us" if 0 < seconds < 5e-9 else f"{_digits(seconds / 1e-6)} us"


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 999.5 else f"{number:.3g}"


def rate_text(bytes_per_s: float) -> str:
    """A rate in powers of ten, as in datasheets: ``46.6 GB/s``."""
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def listed(texts: Sequence[str], most: int = 3) -> str:
    """The first ``most`` texts and the number of others: ``a, b, c and 2 more``."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")
