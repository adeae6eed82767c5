"""A plugin of pytest that runs tests in another order, which is the same for the same seed.

A test that relies on what another one has left behind fails with it:

    python -m pytest -p tests.shuffled --shuffle-seed 3 tests/unit

Files are shuffled, and the tests of each file: those that share a server stay together. The seed
`reverse` turns the order round.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle-seed", default="0", help="a text that decides about the order")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("shuffle_seed")
    if seed == "reverse":
        items.reverse()
        return
    generator = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    generator.shuffle(groups)
    for group in groups:
        generator.shuffle(group)
    items[:] = [item for group in groups for item in group]
