"""Engines with each kind of media cache, counts of their work, and checks that they are idle."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from PIL import Image

from sensorium import LLM, SamplingParams
from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.multimodal.cache.interface import CacheStatistics
from sensorium.multimodal.cache.shm_store import ShmStore
from sensorium.multimodal.processing.processor import MultiModalProcessor
from tests.parity.cases import make_image
from tests.support.engine import assert_nothing_is_left, get_token_ids
from tests.support.media import write_image

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
MARKER = "<image>"  # LLaVA's marker of an image
CACHE_TYPES = ("lru", "shm")
# Large enough for all media of one test module. The shared store reserves its memory at once, so
# it should not be larger.
OPTIONS: dict[str, dict[str, Any]] = {
    "lru": {"mm_processor_cache_type": "lru", "mm_processor_cache_gb": 0.02},
    "shm": {"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 0.02},
    "off": {"mm_processor_cache_gb": 0},
}
WAIT_S = 30.0
LlmOf = Callable[[str], LLM]
_seeds = count(1)


def make_new_image() -> Image.Image:
    """Return an image that is in no cache."""
    return make_image(60, 60, seed=next(_seeds))


def make_new_png() -> bytes:
    return write_image(make_new_image(), "PNG")


def make_prompt(*images: object, text: str = "what is this?", **fields: Any) -> dict[str, Any]:
    data = {"image": list(images)}
    return {"prompt": MARKER * len(images) + text, "multi_modal_data": data, **fields}


def make_uuid_prompt(image: object, uuid: str, **fields: Any) -> dict[str, Any]:
    return make_prompt(image, multi_modal_uuids={"image": [uuid]}, **fields)


def generate(llm: LLM, *prompts: Any, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    return get_token_ids(llm.generate(list(prompts), params, use_tqdm=False))


def forget_outputs(llm: LLM) -> None:
    """Clear what was computed from media. The processor cache keeps what it has."""
    llm.core.scheduler.encoder_cache.clear_cache()
    llm.core.scheduler.kv_cache.clear_cache()


def process(llm: LLM, prompt: Any, **options: Any) -> ProcessedRequest:
    return llm.input_processor.process("test", prompt, GREEDY, **options)


def release(llm: LLM, processed: ProcessedRequest, *, readonly: bool = False) -> None:
    media_parts = llm.media_parts
    cache = (media_parts.readonly if readonly else media_parts.pipeline).cache
    cache.release([item.handle for item in processed.items])


def process_and_release(llm: LLM, prompt: Any, *, readonly: bool = False) -> ProcessedRequest:
    processed = process(llm, prompt, skip_mm_cache=readonly)
    release(llm, processed, readonly=readonly)
    return processed


def get_statistics(llm: LLM) -> CacheStatistics:
    return llm.media_parts.caches.sender.statistics()


class QueryCount:
    """Counts of the main cache's queries and hits since this object was made."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._before = get_statistics(llm)

    def get(self) -> tuple[int, int]:
        now = get_statistics(self._llm)
        return (
            now.num_queries - self._before.num_queries,
            now.num_hits - self._before.num_hits,
        )

    @property
    def num_resends(self) -> int:
        return get_statistics(self._llm).num_resends - self._before.num_resends


class Calls:
    """Counts how often media was decoded, an item processed, and the model's processor called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        decoding = "sensorium.multimodal.decoding.decoding"
        for kind in ("image", "audio", "video"):
            self._watch(monkeypatch, f"{decoding}.decode_{kind}", "decode")
        self._watch(monkeypatch, MultiModalProcessor, "process", attribute="process_item")
        hf_class = type(llm.input_processor.processor.hf_processor)
        self._watch(monkeypatch, hf_class, "call", attribute="__call__")

    def _watch(
        self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, *, attribute: str = ""
    ) -> None:
        if not attribute:
            module, _, attribute = target.rpartition(".")
            target = __import__(module, fromlist=[attribute])
        original = getattr(target, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(target, attribute, call)

    def take(self) -> dict[str, int]:
        """Return the counts since the last call of this method."""
        with self._lock:
            taken, self.counts = dict(self.counts), Counter()
        return taken


class Gate:
    """A gate before the processing of items, which waits until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_open = threading.Event()
        self.num_entered = 0
        original = MultiModalProcessor.process_item

        def process_item(*args: Any, **kwargs: Any) -> Any:
            self.num_entered += 1
            assert self._is_open.wait(WAIT_S)
            return original(*args, **kwargs)

        monkeypatch.setattr(MultiModalProcessor, "process_item", process_item)

    def open(self) -> None:
        self._is_open.set()


class Outcomes:
    """The results or errors of functions that run in a thread each."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        self.results: list[Any] = [None] * len(functions)
        self._threads = [
            threading.Thread(target=self._run, args=(index, function), name=f"test-{index}")
            for index, function in enumerate(functions)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int, function: Callable[[], Any]) -> None:
        try:
            self.results[index] = function()
        except BaseException as error:
            self.results[index] = error

    def wait(self) -> list[Any]:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        return self.results


def assert_idle(llm: LLM) -> None:
    """Assert that nothing of a request is left in the core, the caches or the shared work."""
    assert_nothing_is_left(llm)
    for pipeline in (llm.media_parts.pipeline, llm.media_parts.readonly):
        assert pipeline.flights.num_waiting == 0
        assert pipeline.flights._entries == {}
    caches: Any = llm.media_parts.caches
    if caches.store is not None:
        assert get_num_leases(caches.store) == 0
        assert llm.core.payloads.receiver._held == {}
        assert len(caches.readonly._held) == 0
    elif llm.media_parts.caches.sender.statistics().capacity_bytes:
        assert len(caches.sender._held) == 0
        assert len(caches.readonly._held) == 0


def get_num_leases(store: ShmStore) -> int:
    """Return the number of leases that this process holds."""
    return store._num_leases.total()
