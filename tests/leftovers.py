"""A plugin of pytest that clears away what a test has left behind.

The frames of a failed test keep files, sockets and processes alive. Without this the garbage
collector would meet them in a later test, which would then fail for an open file that is not its
own. A test that runs a command in this process may set up the logs of that command.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager

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
    with _restored_logs():
        result = yield
    if item.stash.get(_HAS_FAILED, False):
        for name in _KEPT:
            if hasattr(sys, name):
                delattr(sys, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    return result


@contextmanager
def _restored_logs() -> Iterator[None]:
    """Put back the handlers and levels of all loggers, and the way of warnings."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {name: logger.level for name, logger in _list_loggers()}
    show = warnings.showwarning
    yield
    root.handlers = handlers
    root.setLevel(level)
    for name, logger in _list_loggers():
        if logger.level != levels.get(name, logging.NOTSET):
            logger.setLevel(levels.get(name, logging.NOTSET))
    if warnings.showwarning is not show:
        logging.captureWarnings(False)


def _list_loggers() -> list[tuple[str, logging.Logger]]:
    known = list(logging.root.manager.loggerDict.items())
    return [(name, logger) for name, logger in known if isinstance(logger, logging.Logger)]
