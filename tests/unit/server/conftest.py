"""One server with a scripted engine for the tests that change nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.server.standing_in import RunningServer, serve


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve() as running:
        yield running
