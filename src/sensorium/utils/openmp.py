"""Makes PyTorch's threads give up their core while they wait for one another.

A CPU computes a layer with several threads (OpenMP), which wait for one another after each
operation. By default a thread that waits spins 300,000 rounds before it sleeps. Where another
process wants the core, one thread then spins while the other has no core to compute on: with one
busy process beside them, two threads on two cores took 150 ms for a token instead of 9. ADR 54.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Rounds: fewer cost more when nothing else runs, because a thread that sleeps must be woken.
_NUM_SPINS = "3000"
_POLICY, _COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # of the GNU library, which PyTorch has


def get_wait_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a process should start that computes with PyTorch.

    It is empty if the environment says already how threads wait. The library reads them when
    PyTorch is imported.
    """
    if _POLICY in environment or _COUNT in environment:
        return {}
    return {_COUNT: _NUM_SPINS}


def wait_without_spinning() -> None:
    """Set these variables for this process, before it imports PyTorch, and for its children."""
    os.environ.update(get_wait_variables(os.environ))
