"""Engines and servers that all tests of a session share, so each test must leave them idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sensorium import LLM
from tests.integration.media_hosts import MediaServer, be_silent
from tests.integration.media_steps import OPTIONS as CACHE_OPTIONS
from tests.integration.media_steps import assert_idle
from tests.integration.neighbours import OPTIONS, Neighbours, make_good_prompts
from tests.support.clients import MODEL
from tests.support.engine import make_llm
from tests.support.server import POOL, SHARED_SERVERS, ServerProcess

if TYPE_CHECKING:
    from tests.integration.browsing import Browser


@pytest.fixture(scope="session")
def neighbours_of(tiny_model: Callable[[str], str]) -> Callable[[str], Neighbours]:
    """Return a function that gives the engine of a family, with good prompts for it."""

    @cache
    def make(family: str) -> Neighbours:
        llm = make_llm(tiny_model(family), **OPTIONS)
        return Neighbours(llm, make_good_prompts(family))

    return make


@pytest.fixture(scope="session")
def _processing_llms(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], LLM]]:
    media_path = tmp_path_factory.mktemp("media")
    llms: dict[str, LLM] = {}

    def get(name: str) -> LLM:
        if name not in llms:
            options = {**CACHE_OPTIONS[name], "allowed_local_media_path": media_path}
            llms[name] = make_llm(tiny_model("llava"), max_model_len=256, **options)
        return llms[name]

    yield get
    for llm in llms.values():
        llm.close()


@pytest.fixture
def llm_of(_processing_llms: Callable[[str], LLM]) -> Iterator[Callable[[str], LLM]]:
    """Return a function that gives the engine with a cache type, or with "off".

    After the test nothing of a request may be left in the engines that it used.
    """
    used: dict[str, LLM] = {}

    def get(name: str) -> LLM:
        used[name] = _processing_llms(name)
        return used[name]

    yield get
    for llm in used.values():
        assert_idle(llm)


@pytest.fixture(scope="session")
def media_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that servers may read media from."""
    return tmp_path_factory.mktemp("served-media")


@pytest.fixture(scope="session")
def omni_flags(media_path: Path) -> tuple[str, ...]:
    """Return the flags of servers that answer as `omni_llm` does, in small steps."""
    return (
        *("--served-model-name", MODEL, "--max-model-len", "2048", "--dtype", "float32"),
        *("--max-num-batched-tokens", "64", "--max-num-seqs", "8"),
        *("--mm-processor-cache-gb", "0.25", "--allowed-local-media-path", str(media_path)),
        "--allow-private-media-addresses",
    )


@pytest.fixture(scope="session", autouse=True)
def _end_of_shared_servers() -> Iterator[None]:
    yield
    SHARED_SERVERS.stop_all()


@pytest.fixture(scope="module")
def omni_server(
    tiny_model: Callable[[str], str], omni_flags: tuple[str, ...]
) -> Iterator[ServerProcess]:
    """Run a server with one frontend and the mirrored cache, for images, videos and audio."""
    with SHARED_SERVERS.use(tiny_model("qwen2_5_omni"), *omni_flags) as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(
    tiny_model: Callable[[str], str], omni_flags: tuple[str, ...]
) -> Iterator[ServerProcess]:
    """Run a server with two frontends, a pool for each and a cache in shared memory."""
    flags = (*omni_flags, "--api-server-count", "2", "--mm-processor-cache-type", "shm", *POOL)
    with SHARED_SERVERS.use(tiny_model("qwen2_5_omni"), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def mini_server() -> Iterator[ServerProcess]:
    """Run the embedded model as a user starts it: with a pool, and from nothing."""
    flags = ("--mm-processor-pool-size", "2")
    with SHARED_SERVERS.use("sensorium-mini", *flags, is_cold=True) as server:
        yield server


@pytest.fixture(scope="session")
def _session_browser() -> Iterator[Browser]:
    pytest.importorskip("selenium")
    from tests.integration.browsing import Browser, find_browser

    programs = find_browser()
    if programs is None:
        pytest.skip("no chromium and chromedriver on this machine")
    browser = Browser(*programs)
    yield browser
    browser.close()


@pytest.fixture
def browser(_session_browser: Browser) -> Iterator[Browser]:
    """Give a real browser. It may ask no host but the server, and log no errors."""
    yield _session_browser
    _session_browser.assert_clean()


@pytest.fixture(scope="module")
def trusting_server(
    tiny_model: Callable[[str], str], omni_flags: tuple[str, ...]
) -> Iterator[ServerProcess]:
    """Run a server like `shared_server` that trusts the hashes in requests."""
    flags = (*omni_flags, "--api-server-count", "2", "--mm-processor-cache-type", "shm")
    with SHARED_SERVERS.use(tiny_model("qwen2_5_omni"), *flags, "--trust-injected") as server:
        yield server


@pytest.fixture(scope="session")
def omni_llm(tiny_model: Callable[[str], str]) -> Iterator[LLM]:
    llm = make_llm(tiny_model("qwen2_5_omni"), max_model_len=2048)
    yield llm
    llm.close()


_NUM_SILENT_PATHS = 100
# The media cache is small, so that room that is not given back is missed soon.
_SERVER_FLAGS = {
    "lru": ("--mm-processor-cache-gb", "0.004"),
    "shm": ("--api-server-count", "2", "--mm-processor-cache-gb", "0.004"),
}


@pytest.fixture(scope="module", params=["shm"])
def fault_server(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], str]
) -> Iterator[ServerProcess]:
    """Run a server for tests that kill or overload it; it must be idle after each of them."""
    with SHARED_SERVERS.use(
        tiny_model("qwen2_5_vl"),
        *("--max-model-len", "4096", *POOL),
        *("--allow-private-media-addresses", "--media-deadline", "3600"),
        *_SERVER_FLAGS[request.param],
    ) as server:
        yield server


@pytest.fixture
def silent_host() -> Iterator[MediaServer]:
    """Run a host that accepts every request for a picture and never answers."""
    host = MediaServer()
    for index in range(_NUM_SILENT_PATHS):
        host.on(f"/{index}.png", be_silent)
    yield host
    host.close()
