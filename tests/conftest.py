"""Fixtures that every kind of test may use: tiny real models, made once per checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.parity.table import ParityTable, mark_item

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


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes, which share the cores
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
    else:
        config.pluginmanager.register(ParityTable(ROOT / "build" / "parity.json"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one family run in one process: its reference is computed once."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        family = parameters.params.get("family") if parameters is not None else None
        if family is not None:
            item.add_marker(pytest.mark.xdist_group(str(family)))
            mark_item(item, str(family))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], str]:
    """The directory of a family's tiny random model."""
    from make_tiny_models import make_family

    return lambda family: str(make_family(family, ROOT / "build" / "tiny-models"))
