"""Checks that all hosts of a system run the same plan.

Hosts that compile different programs wait for each other's collectives without end, or compute
wrong results.
"""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from toast.errors import PlanError
from toast.program import Program, Shardings

#: Number of characters of a hash in messages.
_SHOWN = 12


def plan_digest(program: Program, shardings: Shardings) -> str:
    """A hash of a program and its shardings.

    It does not depend on source lines, on the program's name, or on the values of constants.
    """
    content = (
        program.digest, program.padding, sorted(program.donated), shardings.mesh,
        sorted(shardings.values.items()), sorted(shardings.uses.items()), shardings.results,
        sorted(shardings.sums.items()), sorted(shardings.manual_axes.items()),
    )  # fmt: skip
    return hashlib.sha256(repr(content).encode()).hexdigest()


def check_hosts(program: Program, mesh: jax.sharding.Mesh, shardings: Shardings) -> None:
    """Raises :class:`toast.errors.PlanError` on every host if the hosts have different plans.

    The hosts exchange the hashes of their plans (:func:`plan_digest`).  Without several hosts, or
    for a mesh of one host's devices, nothing is exchanged.
    """
    if jax.process_count() == 1 or not mesh.is_multi_process:
        return
    own = plan_digest(program, shardings)
    words = np.frombuffer(bytes.fromhex(own), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(words))
    hosts: dict[str, list[str]] = {}
    for host, row in enumerate(gathered.reshape(jax.process_count(), -1)):
        hosts.setdefault(row.astype(np.uint8).tobytes().hex(), []).append(str(host))
    if len(hosts) > 1:
        named = [
            f"{digest[:_SHOWN]} on host{'s' * (len(each) > 1)} {', '.join(each)}"
            for digest, each in hosts.items()
        ]
        raise PlanError(
            f"{program.name}: the hosts have different plans: {'; '.join(named)}, and this is host "
            f"{jax.process_index()}; load the same plan file and run the same code on all hosts"
        )
