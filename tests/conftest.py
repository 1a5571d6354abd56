"""Eight CPU devices for every test: the flag is set, and read by XLA, before any test runs.

Commands under test set it too, for a process of their own.  No test reads what the user's own runs
have kept, or keeps anything there; those of the cache set up one of their own.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOAST_CACHE"] = "off"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

assert len(jax.devices()) == 8
