"""Which cache a route asks: that of the core, or the one that leaves it alone. Pinned by route.

In process, over a real core, through the real application: what a route tells the renderer, how
often media is decoded, and what becomes of the order of the cache that leads the core.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sensorium.engine.assembly.frontend import MediaParts
from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.multimodal.decoding import decoding
from sensorium.server.http.app import make_app
from tests.integration.async_serving import LocalCore, make_png, run_core
from tests.integration.test_async_engine import get_num_handles, run
from tests.support.clients import as_base64, ask, make_url_part
from tests.support.waiting import wait_until_async
from tests.unit.server.standing_in import CountingMetrics, StandInOptions

Body = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _see(seed: int, **fields: Any) -> Body:
    url = f"data:image/png;base64,{as_base64(make_png(seed))}"
    return {"messages": ask("see", make_url_part("image", url)), **fields}


# Whether the cache that leads to the core is passed by, and whether tensors are wanted.
_ROUTES: list[tuple[str, Body, bool, bool]] = [
    (CHAT, _see(1, max_tokens=1), False, True),
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 1}, False, True),
    (f"{CHAT}/render", _see(1), True, True),
    (f"{CHAT}/render", _see(1, return_kwargs=False), True, False),
    (f"{COMPLETIONS}/render", {"prompt": "hello"}, True, True),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3]}, False, True),
    ("/tokenize", _see(1), True, False),
    ("/tokenize", {"prompt": "hello"}, True, False),
]


@pytest.fixture(scope="module", params=["lru", "shm"])
def core(request: Any, tmp_path_factory: Any, tiny_model: Callable[[str], str]) -> Any:
    directory: Path = tmp_path_factory.mktemp("core")
    options = {"mm_processor_cache_type": request.param}
    with run_core(tiny_model("qwen2_5_vl"), directory, **options) as core:
        yield core


def _call(
    core: LocalCore, test: Callable[[httpx.AsyncClient, MediaParts], Awaitable[None]]
) -> None:
    async def main(engine: AsyncEngine, media_parts: MediaParts) -> None:
        app = make_app(engine, StandInOptions(), CountingMetrics())  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await test(client, media_parts)

    run(core, main)


class _Watch:
    """What the renderer was called with, and what was decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[bool, bool]] = []
        self.num_decoded = 0
        process, decode_image = InputProcessor.process_pausing, decoding.decode_image

        def watch_process(*args: Any, **options: Any) -> Any:
            self.calls.append((options["skip_mm_cache"], options["needs_tensors"]))
            return process(*args, **options)

        def watch_decode(*args: Any, **options: Any) -> Any:
            self.num_decoded += 1
            return decode_image(*args, **options)

        monkeypatch.setattr(InputProcessor, "process_pausing", watch_process)
        monkeypatch.setattr(decoding, "decode_image", watch_decode)


def test_every_route_uses_the_cache_that_it_should(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = _Watch(monkeypatch)

    async def test(client: httpx.AsyncClient, media_parts: MediaParts) -> None:
        del media_parts
        for path, body, is_skipped, needs_tensors in _ROUTES:
            watch.calls.clear()
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            assert watch.calls == [(is_skipped, needs_tensors)], path

    _call(core, test)


def _get_order(media_parts: MediaParts) -> list[Any]:
    """Of the main cache: its items, the next to go first, or when each was used."""
    caches: Any = media_parts.caches
    if caches.store is None:
        return list(caches.sender._lru._evictable)
    used: list[int] = caches.store._index._last_used.tolist()
    return [time for time in used if time]


def test_render_and_tokenize_leave_counts_and_order_of_the_main_cache(core: LocalCore) -> None:
    async def test(client: httpx.AsyncClient, media_parts: MediaParts) -> None:
        for seed in (1, 2, 3):
            assert (await client.post(CHAT, json=_see(seed, max_tokens=1))).status_code == 200
        sender = media_parts.caches.sender
        await wait_until_async(lambda: get_num_handles(media_parts) == 0)
        before, order = sender.statistics(), _get_order(media_parts)
        for seed in (2, 1, 4):
            for path, fields in (
                (f"{CHAT}/render", {}),
                (f"{CHAT}/render", {"return_kwargs": False}),
                ("/tokenize", {}),
            ):
                response = await client.post(path, json=_see(seed, **fields))
                assert response.status_code == 200, response.text
        assert sender.statistics() == before
        assert len(order) >= 3  # shared memory may have those of other tests
        assert _get_order(media_parts) == order
        assert (await client.post(CHAT, json=_see(2, max_tokens=1))).status_code == 200
        await wait_until_async(lambda: get_num_handles(media_parts) == 0)
        assert _get_order(media_parts) != order

    _call(core, test)


def test_a_repeated_render_decodes_nothing(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = _Watch(monkeypatch)

    async def test(client: httpx.AsyncClient, media_parts: MediaParts) -> None:
        del media_parts
        answers = [(await client.post(f"{CHAT}/render", json=_see(11))).json() for _ in range(3)]
        assert watch.num_decoded == 1
        assert [answer["features"] for answer in answers] == [answers[0]["features"]] * 3
        light = (await client.post(f"{CHAT}/render", json=_see(11, return_kwargs=False))).json()
        assert watch.num_decoded == 1
        assert light["features"] == {**answers[0]["features"], "kwargs_data": None}
        assert light["token_ids"] == answers[0]["token_ids"]

    _call(core, test)


def test_hashes_and_placeholders_need_no_decode_at_all(
    core: LocalCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = _Watch(monkeypatch)

    async def test(client: httpx.AsyncClient, media_parts: MediaParts) -> None:
        body = _see(12, return_kwargs=False)
        num_items = media_parts.caches.readonly.statistics().num_items
        light = (await client.post(f"{CHAT}/render", json=body)).json()
        count = (await client.post("/tokenize", json=_see(13))).json()["count"]
        assert watch.num_decoded == 0
        assert media_parts.caches.readonly.statistics().num_items == num_items
        whole = (await client.post(f"{CHAT}/render", json=_see(12))).json()
        assert watch.num_decoded == 1
        assert whole["token_ids"] == light["token_ids"]
        assert len(whole["token_ids"]) == count
        for name in ("mm_hashes", "mm_placeholders"):
            assert whole["features"][name] == light["features"][name]

    _call(core, test)


def test_a_damaged_image_that_was_not_decoded_does_not_take_a_uuid(core: LocalCore) -> None:
    async def test(client: httpx.AsyncClient, media_parts: MediaParts) -> None:
        del media_parts
        good, damaged = _see(14), _see(14)
        part, other = good["messages"][0]["content"][1], damaged["messages"][0]["content"][1]
        pixels = bytearray(make_png(14))
        start = pixels.index(b"IDAT") + 4
        pixels[start : start + 16] = bytes(16)
        other["image_url"] = {"url": f"data:image/png;base64,{as_base64(bytes(pixels))}"}
        part["uuid"] = other["uuid"] = "mine"
        for path in ("/tokenize", f"{CHAT}/render"):
            body = {**damaged, "return_kwargs": False}
            assert (await client.post(path, json=body)).status_code == 200
        response = await client.post(CHAT, json={**good, "max_tokens": 1})
        assert response.status_code == 200, response.text
        assert (await client.post(CHAT, json=damaged)).status_code == 400

    _call(core, test)
