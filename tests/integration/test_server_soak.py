"""A short soak, by the script that makes the long one: answers and counts, no times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from soak import MODALITIES, list_faults, soak

pytestmark = pytest.mark.xdist_group("server-soak")
_SECONDS = 30.0


@pytest.mark.slow
def test_nothing_is_lost_or_wrong_under_load(tiny_model: Callable[[str], str]) -> None:
    run = soak(tiny_model("qwen2_5_omni"), seconds=_SECONDS, num_clients=12, seed=1)
    assert list_faults(run) == []
    counts = run.counts
    assert counts.num_aborted > 0
    assert {"text", "image seen", "image new", "bad", *MODALITIES[1:]} <= counts.num_answers.keys()
