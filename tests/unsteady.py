"""A plugin of pytest that holds up threads at random lines, as a busy machine does.

A test that only holds while threads are quick fails with it, long before it fails by chance:

    python -m pytest -p tests.unsteady --unsteady-seed 3 tests/unit/multimodal

The thread of the test itself is not held up, so that it runs ahead of the others.
"""

from __future__ import annotations

import random
import threading
import time
from types import FrameType
from typing import Any

import pytest

_WATCHED = ("/sensorium/", "/tests/", "/concurrent/futures/", "/threading.py", "/queue.py")
_SHARE = 0.01  # of all lines
_SHORTEST_S = 0.002  # half of the pauses are over twice as long, one in a hundred a hundred times
_LONGEST_S = 0.3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unsteady-seed", type=int, default=0, help="where threads are held up")


def pytest_configure(config: pytest.Config) -> None:
    threading.settrace(_Trace(config.getoption("--unsteady-seed")))


class _Trace:
    """What Python calls for each function of a thread, and for each line of one that is watched."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._is_watched: dict[str, bool] = {}

    def __call__(self, frame: FrameType, _event: str, _value: Any) -> Any:
        name = frame.f_code.co_filename
        is_watched = self._is_watched.get(name)
        if is_watched is None:
            is_watched = self._is_watched[name] = any(part in name for part in _WATCHED)
        return self._hold_up if is_watched else None

    def _hold_up(self, _frame: FrameType, event: str, _value: Any) -> Any:
        if event == "line" and self._random.random() < _SHARE:
            time.sleep(min(_LONGEST_S, _SHORTEST_S / (1.0 - self._random.random())))
        return self._hold_up
