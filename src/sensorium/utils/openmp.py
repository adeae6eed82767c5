"""Makes PyTorch's threads give up their core while they wait for one another.

The OpenMP threads that compute an operation wait for one another at its end. By default they spin
300,000 rounds before they sleep. If another process needs the core, one thread then spins while the
other has no core to compute on: with one busy process next to them, two threads on two cores took
150 ms for a token instead of 9. See ADR 54.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Fewer rounds would be slower on an idle machine, because a thread that sleeps must be woken.
_NUM_SPINS = "3000"
_POLICY, _COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"  # of the GNU library, which PyTorch has


def get_wait_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that will import PyTorch, unless they are set already."""
    if _POLICY in environment or _COUNT in environment:
        return {}
    return {_COUNT: _NUM_SPINS}


def wait_without_spinning() -> None:
    """Set the wait variables for this process, before it imports PyTorch, and its children."""
    os.environ.update(get_wait_variables(os.environ))
