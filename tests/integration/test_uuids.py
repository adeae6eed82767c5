"""Callers' own names for media: bound to what they first came with, and only within their salt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from sensorium import LLM, RequestError
from sensorium.multimodal.media import LoadedMedia, MediaBytes
from sensorium.types.errors import MediaFetchError, MissingMediaError
from sensorium.utils.pausing import Pausing
from tests.integration.media_steps import (
    CACHE_TYPES,
    Calls,
    Gate,
    LlmOf,
    Outcomes,
    QueryCount,
    assert_idle,
    forget_outputs,
    generate,
    make_new_image,
    make_new_png,
    make_prompt,
    make_uuid_prompt,
    process,
    process_and_release,
    release,
)
from tests.support.waiting import wait_until

URL = "https://media.example/picture.png"
_numbers = count()


def make_uuid() -> str:
    return f"picture-{next(_numbers)}"


class Host:
    """A stand-in for the loader, with one address and content that can be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, llm: LLM, content: bytes | None) -> None:
        self.content = content
        self.num_fetches = 0
        loader = llm.media_parts.loader
        load_pausing = loader.load_pausing

        def load(sources: Sequence[tuple[Any, str]], **options: Any) -> Pausing[list[Any]]:
            others = [(source, modality) for source, modality in sources if source != URL]
            found = iter((yield from load_pausing(others, **options)))
            return [self._fetch() if source == URL else next(found) for source, _ in sources]

        monkeypatch.setattr(loader, "load_pausing", load)

    def _fetch(self) -> LoadedMedia:
        self.num_fetches += 1
        outcome: MediaBytes | RequestError = MediaFetchError("the host does not answer")
        if self.content is not None:
            outcome = MediaBytes(self.content)
        return LoadedMedia(outcome=outcome, fetch_s=0.0)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("form", ["bytes", "pil"])
def test_a_uuid_alone_serves_what_it_was_bound_to(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch, cache_type: str, form: str
) -> None:
    llm, uuid = llm_of(cache_type), make_uuid()
    image = make_new_png() if form == "bytes" else make_new_image()
    expected = generate(llm_of("off"), make_prompt(image))
    assert generate(llm, make_uuid_prompt(image, uuid)) == expected
    calls, queries = Calls(monkeypatch, llm), QueryCount(llm)
    forget_outputs(llm)
    assert generate(llm, make_uuid_prompt(None, uuid)) == expected
    alone = {"prompt": "<image>what is this?", "multi_modal_uuids": {"image": [uuid]}}
    assert generate(llm, alone) == expected
    assert calls.take() == {}
    assert queries.get() == (2, 2)


def test_bytes_are_compared_with_those_of_their_uuid(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, uuid, data = llm_of("lru"), make_uuid(), make_new_png()
    process_and_release(llm, make_uuid_prompt(data, uuid))
    calls = Calls(monkeypatch, llm)
    assert process_and_release(llm, make_uuid_prompt(data, uuid)).items[0].handle.is_hit
    with pytest.raises(
        RequestError, match=rf"image\[0\]: uuid '{uuid}' was first used for another"
    ):
        process(llm, make_uuid_prompt(make_new_png(), uuid))
    assert calls.take() == {}
    assert process_and_release(llm, make_uuid_prompt(None, uuid)).items[0].handle.is_hit


@pytest.mark.parametrize("cache_type", [*CACHE_TYPES, "off"])
def test_an_unknown_uuid_alone_is_missing(llm_of: LlmOf, cache_type: str) -> None:
    llm, uuid = llm_of(cache_type), make_uuid()
    prompt = make_prompt(make_new_png(), None, multi_modal_uuids={"image": [None, uuid]})
    with pytest.raises(
        MissingMediaError, match=rf"image\[1\]: .* '{uuid}' is in no cache"
    ) as caught:
        process(llm, prompt)
    assert caught.value.missing == (uuid,)
    (output,) = llm.generate(prompt, use_tqdm=False, return_errors=True)
    assert isinstance(output.error, MissingMediaError)
    assert output.error.missing == (uuid,)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_uuid_whose_item_was_evicted_is_missing_until_it_is_sent_again(
    llm_of: LlmOf, cache_type: str
) -> None:
    llm, uuid, data = llm_of(cache_type), make_uuid(), make_new_png()
    process_and_release(llm, make_uuid_prompt(data, uuid))
    llm.media_parts.caches.sender.clear_cache()
    with pytest.raises(MissingMediaError, match="send the media"):
        process(llm, make_uuid_prompt(None, uuid))
    with pytest.raises(RequestError, match="first used for another"):
        process(llm, make_uuid_prompt(make_new_png(), uuid))
    process_and_release(llm, make_uuid_prompt(data, uuid))
    assert process_and_release(llm, make_uuid_prompt(None, uuid)).items[0].handle.is_hit


def test_a_known_uuid_avoids_the_fetch(llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, uuid, data = llm_of("lru"), make_uuid(), make_new_png()
    host = Host(monkeypatch, llm, data)
    expected = generate(llm, make_uuid_prompt(URL, uuid))
    assert host.num_fetches == 1
    host.content = None
    assert generate(llm, make_uuid_prompt(URL, uuid)) == expected
    assert generate(llm, make_uuid_prompt(None, uuid)) == expected
    assert host.num_fetches == 1
    # Bound to the bytes, not to the address.
    assert process_and_release(llm, make_uuid_prompt(data, uuid)).items[0].handle.is_hit
    with pytest.raises(MediaFetchError, match=r"image\[0\]: the host does not answer"):
        process(llm, make_prompt(URL))


def test_evicted_media_is_fetched_again_and_must_be_the_same(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, uuid, data = llm_of("lru"), make_uuid(), make_new_png()
    host = Host(monkeypatch, llm, data)
    process_and_release(llm, make_uuid_prompt(URL, uuid))
    llm.media_parts.caches.sender.clear_cache()
    process_and_release(llm, make_uuid_prompt(URL, uuid))
    assert host.num_fetches == 2
    llm.media_parts.caches.sender.clear_cache()
    host.content = make_new_png()
    with pytest.raises(RequestError, match="first used for another image"):
        process(llm, make_uuid_prompt(URL, uuid))


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_uuid_is_valid_only_within_its_salt(llm_of: LlmOf, cache_type: str) -> None:
    llm, uuid = llm_of(cache_type), make_uuid()
    mine, theirs = make_new_png(), make_new_png()
    process_and_release(llm, make_uuid_prompt(mine, uuid, cache_salt="me"))
    for salt in ({"cache_salt": "you"}, {}):
        with pytest.raises(MissingMediaError):
            process(llm, make_uuid_prompt(None, uuid, **salt))
    process_and_release(llm, make_uuid_prompt(theirs, uuid, cache_salt="you"))
    found = [
        process_and_release(llm, make_uuid_prompt(None, uuid, cache_salt=salt))
        for salt in ("me", "you")
    ]
    hashes = [entry.items[0].handle.mm_hash for entry in found]
    expected = [
        process_and_release(llm, make_prompt(data, cache_salt=salt))
        for data, salt in ((mine, "me"), (theirs, "you"))
    ]
    assert hashes == [entry.items[0].handle.mm_hash for entry in expected]


def test_other_options_of_a_known_uuid_are_another_item(llm_of: LlmOf) -> None:
    llm, uuid, data = llm_of("lru"), make_uuid(), make_new_png()
    options = {"mm_processor_kwargs": {"do_normalize": False}}
    process_and_release(llm, make_uuid_prompt(data, uuid))
    with pytest.raises(MissingMediaError):
        process(llm, make_uuid_prompt(None, uuid, **options))
    process_and_release(llm, make_uuid_prompt(data, uuid, **options))
    hashes = {
        process_and_release(llm, make_uuid_prompt(None, uuid, **fields)).items[0].handle.mm_hash
        for fields in ({}, options)
    }
    assert len(hashes) == 2


def test_a_damaged_upload_does_not_take_its_uuid(llm_of: LlmOf) -> None:
    llm, uuid, data = llm_of("lru"), make_uuid(), make_new_png()
    with pytest.raises(RequestError, match=r"image\[0\]"):
        process(llm, make_uuid_prompt(data[:-40], uuid))
    with pytest.raises(MissingMediaError):
        process(llm, make_uuid_prompt(None, uuid))
    assert not process_and_release(llm, make_uuid_prompt(data, uuid)).items[0].handle.is_hit


def test_one_of_two_uploads_under_one_uuid_wins(
    llm_of: LlmOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, uuid = llm_of("lru"), make_uuid()
    images = [make_new_png() for _ in range(2)]
    gate = Gate(monkeypatch)
    outcomes = Outcomes(
        [lambda data=data: process(llm, make_uuid_prompt(data, uuid)) for data in images]  # type: ignore[misc]
    )
    wait_until(lambda: llm.media_parts.pipeline.flights.num_waiting == 2)
    gate.open()
    results = outcomes.wait()
    (error,) = [result for result in results if isinstance(result, RequestError)]
    assert "first used for another image" in str(error)
    (winner,) = [result for result in results if not isinstance(result, RequestError)]
    release(llm, winner)
    assert_idle(llm)
    known = process_and_release(llm, make_uuid_prompt(None, uuid))
    assert known.items[0].handle.mm_hash == winner.items[0].handle.mm_hash


@pytest.mark.parametrize(
    ("uuids", "message"),
    [
        ([""], "1 to 128 characters"),
        (["x" * 129], "1 to 128 characters"),
        ([7], "1 to 128 characters"),
        (["a", "b"], "2 uuids for 1 media items"),
    ],
    ids=["empty", "long", "number", "two"],
)
def test_odd_uuids_are_refused(llm_of: LlmOf, uuids: list[Any], message: str) -> None:
    prompt = make_prompt(make_new_png(), multi_modal_uuids={"image": uuids})
    with pytest.raises(RequestError, match=message):
        process(llm_of("lru"), prompt)


def test_neither_media_nor_uuid_is_refused(llm_of: LlmOf) -> None:
    with pytest.raises(RequestError, match=r"image\[0\]: has neither media nor a uuid"):
        process(llm_of("lru"), make_prompt(None))
