"""Eight CPU devices for every test: the flag is set, and read by XLA, before any test runs.

Commands under test set it too, for a process of their own.  No test reads what the user's own runs
have kept, or keeps anything there; those of the cache set up one of their own.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TOAST_CACHE"] = "off"
os.environ.pop("COLUMNS", None)  # tables are as wide as in a pipe
# XLA ends a process of which a device waits for others for longer than 40 seconds, as it may do on a
# busy machine.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax

# Less time for LLVM; the programs that are compared, and how XLA partitions them, are the same.
jax.config.update("jax_disable_most_optimizations", True)
# A computation that crashes the process then shows the line that runs it.
jax.config.update("jax_cpu_enable_async_dispatch", False)

from tests.durations import Durations

assert len(jax.devices()) == 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="Write golden files anew.")
    parser.addoption("--quick", action="store_true", help="Run a quick third of the tests.")
    parser.addoption(
        "--record-durations", action="store_true", help="Write tests/durations.csv anew."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(config), "toast-durations")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with ``golden/NAME`` beside the test; with --regenerate, write it."""
    folder = pathlib.Path(request.path).parent / "golden"

    def compare(name: str, text: str) -> None:
        if request.config.getoption("--regenerate"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        assert text == (folder / name).read_text(), "if meant: pytest --regenerate"

    return compare
