"""A plugin of pytest that clears away what a failed test has left open.

Its frames keep files, sockets and processes alive. Without this the garbage collector would meet
them in a later test, which would then fail for an open file that is not its own.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Generator

import pytest

_HAS_FAILED = pytest.StashKey[bool]()
_KEPT = ("last_type", "last_value", "last_traceback", "last_exc")  # of the last failure, by pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    if item.stash.get(_HAS_FAILED, False):
        for name in _KEPT:
            if hasattr(sys, name):
                delattr(sys, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return result
