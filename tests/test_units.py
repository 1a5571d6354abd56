"""Numbers with units: three digits, and no exponents."""

from __future__ import annotations

from toast.units import time_text


def test_times() -> None:
    texts = {4.2249: "4.22 s", 0.3121: "312 ms", 12e-6: "12 us", 1.5e-8: "0.015 us", 0.0: "0 us"}
    assert {seconds: time_text(seconds) for seconds in texts} == texts
    assert time_text(1.39e-17) == time_text(1e-12) == "< 0.01 us"
