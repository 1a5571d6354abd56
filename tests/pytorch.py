"""Whether the extra ``torch`` is installed."""

from __future__ import annotations

import importlib.util

import pytest

IS_INSTALLED = all(map(importlib.util.find_spec, ("torch", "torchax")))
REASON = "PyTorch is not installed: pip install 'toast-partitioner[torch]'"


def need_pytorch() -> None:
    """Skip the tests of a module without the extra ``torch``."""
    if not IS_INSTALLED:
        pytest.skip(REASON, allow_module_level=True)
