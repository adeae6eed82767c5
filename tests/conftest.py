"""Fixtures that every kind of test may use: tiny real models, made once per checkout."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx._transports.default as httpx_transports
import pytest
import torch
from hypothesis import settings

from tests import leftovers
from tests.parity.table import ParityTable, mark_item
from tests.support import overlap

if not torch.cuda.is_available():
    # Triton's kernels then run on the CPU. It is read when Triton is first imported, by whomever.
    os.environ.setdefault("TRITON_INTERPRET", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
# How long an example takes says more about the machine than about the code. The same examples every
# time: a change is not refused for what another one has brought. `make test-slow` draws new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")
# Reading the certificates of all authorities takes 60 ms, and each of the thousands of clients that
# tests make would do so, though most talk to this machine without encryption.
httpx_transports.create_ssl_context = cache(httpx_transports.create_ssl_context)


# Which tests start first: the folders with the longest groups.
_FOLDERS = ("integration", "parity", "property", "unit")
_SETTINGS = "_hypothesis_internal_use_settings"  # where `@settings` of Hypothesis leaves them
_DIVISORS = {"all": 1, "fifth": 5, "tenth": 10}
_LEAST_EXAMPLES = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--references",
        choices=("kept", "fresh", "write"),
        default="kept",
        help="tokens of Transformers' `generate`: take them from the files and compute a tenth, "
        "compute all and compare them with the files, or write the files",
    )
    parser.addoption(
        "--no-overlap", action="store_true", help="read the results of each step before the next"
    )
    parser.addoption("--fast", action="store_true", help="leave out models and processes")
    parser.addoption(
        "--examples",
        choices=tuple(_DIVISORS),
        default="fifth",
        help="how many of their random examples the tests with Hypothesis try, but at least 10",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(leftovers)
    if not config.getoption("--no-overlap"):
        overlap.turn_on()
    if hasattr(config, "workerinput"):  # one of several processes, which share the cores
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
    else:
        config.pluginmanager.register(ParityTable(ROOT / "build"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of one family into one process, where its reference is loaded once.

    Groups of servers and families come first: no process is left with a long one at the end.
    """
    if config.getoption("fast"):
        _keep_fast(config, items)
    _take_fewer_examples(items, _DIVISORS[config.getoption("examples")])
    for item in items:
        parameters = getattr(item, "callspec", None)
        family = parameters.params.get("family") if parameters is not None else None
        if family is not None:
            item.add_marker(pytest.mark.xdist_group(str(family)))
            mark_item(item, str(family))
    if hasattr(config, "workerinput"):
        items.sort(key=_get_rank)


def _get_rank(item: pytest.Item) -> tuple[int, bool]:
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    rank = _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS)
    return rank, item.get_closest_marker("xdist_group") is None


def _keep_fast(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that load models or start processes."""
    slow = [
        item
        for item in items
        if "tiny_model" in getattr(item, "fixturenames", ()) or item.get_closest_marker("processes")
    ]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def _take_fewer_examples(items: list[pytest.Item], divisor: int) -> None:
    """Divide the numbers of examples of all tests with Hypothesis."""

    def divide(number: int) -> int:
        return max(min(number, _LEAST_EXAMPLES), number // divisor)

    settings.register_profile("fewer", settings(), max_examples=divide(settings().max_examples))
    settings.load_profile("fewer")
    owners = [(getattr(item, "obj", None), _SETTINGS) for item in items]  # functions
    owners += [(getattr(item, "cls", None), "settings") for item in items]  # state machines
    for owner, name in set(owners):
        own = getattr(owner, name, None)
        if isinstance(own, settings):
            setattr(owner, name, settings(own, max_examples=divide(own.max_examples)))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of objects that stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], str]:
    """The directory of a family's tiny random model."""
    from make_tiny_models import make_family

    return lambda family: str(make_family(family, ROOT / "build" / "tiny-models"))
