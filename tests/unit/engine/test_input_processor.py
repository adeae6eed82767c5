"""What a caller may give, what comes of it, and what is refused with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.multimodal.cache.interface import ItemHandle
from sensorium.multimodal.media import MediaItem, ProcessingOptions
from sensorium.multimodal.pipeline import CachedItem
from sensorium.types.errors import RequestError
from sensorium.types.model_kind import CAUSAL
from sensorium.types.multimodal import ItemLayout
from sensorium.types.sampling import GenerationDefaults, SamplingParams, TokenBans
from sensorium.utils.pausing import Pausing

DEFAULTS = GenerationDefaults(temperature=0.5, top_p=0.9, top_k=3, eos_token_ids=(7, 8))


class Encoding(dict[str, list[int]]):
    def char_to_token(self, index: int) -> int:
        return index


class LetterTokenizer:
    """A token is a character's code."""

    is_fast = True

    def __call__(self, text: str, **_: Any) -> Encoding:
        return Encoding(input_ids=list(map(ord, text)))

    def convert_tokens_to_ids(self, token: str) -> int:
        return ord(token)


class FakeProcessor:
    """A processor in which `I` and `V` become two placeholders each, `i` and `v`."""

    modalities = ("image", "video")
    tokenizer = LetterTokenizer()

    option_names = frozenset({"size"})

    def get_option_default(self, path: str) -> None:
        del path

    outside_audio = streaming_audio = None
    kind = CAUSAL

    @property
    def markers(self) -> dict[str, str]:
        return {modality: self.get_marker(modality) for modality in self.modalities}

    def get_marker(self, modality: str) -> str:
        return modality[0].upper()

    def get_token_ids(self, modality: str) -> tuple[int, ...]:
        return (ord(modality[0]),)


class FakePipeline:
    """Items are named after their media; notes what is asked for and what is held."""

    def __init__(self) -> None:
        self.calls: list[tuple[MediaItem, ProcessingOptions]] = []
        self.held: list[ItemHandle] = []
        self.cache = self

    def process_pausing(
        self,
        items: Sequence[MediaItem],
        options: ProcessingOptions,
        *,
        needs_tensors: bool,
        cancelled: object,
    ) -> Pausing[list[CachedItem]]:
        yield from ()  # all of it is here: there is nothing to wait for
        del needs_tensors, cancelled
        self.calls += [(item, options) for item in items]
        for item in items:
            if isinstance(item.media, str) and item.media == "bad":
                raise RequestError("cannot be read", path=item.path)
        handles = [
            ItemHandle(
                modality=item.modality,
                mm_hash=f"hash-{item.media}",
                layout=ItemLayout(
                    text=item.modality[0] * 2, token_id=ord(item.modality[0]), num_embeds=2
                ),
                num_bytes=0,
                is_hit=False,
            )
            for item in items
        ]
        self.held += handles
        return [CachedItem(handle=handle, path=()) for handle in handles]

    def release(self, items: Sequence[CachedItem]) -> None:
        for item in items:
            self.held.remove(item.handle)


@pytest.fixture
def fake() -> FakePipeline:
    return FakePipeline()


@pytest.fixture
def inputs(fake: FakePipeline) -> InputProcessor:
    return make_inputs(fake)


def make_inputs(fake: FakePipeline, *, seed: int = 0) -> InputProcessor:
    return InputProcessor(
        FakeProcessor(),  # type: ignore[arg-type]
        pipeline=fake,  # type: ignore[arg-type]
        defaults=DEFAULTS,
        limit_mm_per_prompt={"image": 2},
        seed=seed,
    )


def process(inputs: InputProcessor, prompt: Any, **params: Any) -> ProcessedRequest:
    return inputs.process("r", prompt, SamplingParams(**params))


def test_text_and_token_ids_give_the_same_request(inputs: InputProcessor) -> None:
    token_ids = list(map(ord, "abc"))
    requests = [
        process(inputs, prompt, seed=1).request
        for prompt in (
            "abc",
            {"prompt": "abc"},
            token_ids,
            tuple(token_ids),
            np.array(token_ids),
            {"prompt_token_ids": token_ids},
        )
    ]
    assert all(request == requests[0] for request in requests)
    assert requests[0].prompt_token_ids == tuple(token_ids)
    assert process(inputs, "abc").prompt == "abc"
    assert process(inputs, token_ids).prompt is None


def test_media_become_features_and_handles(inputs: InputProcessor, fake: FakePipeline) -> None:
    processed = process(
        inputs,
        {
            "prompt": "aIbVc",
            "multi_modal_data": {"video": "v", "image": ["x"]},
            "mm_processor_kwargs": {"size": 4},
        },
    )
    assert processed.request.prompt_token_ids == tuple(map(ord, "aiibvvc"))
    features = processed.request.mm_features
    assert [(f.modality, f.mm_hash, f.mm_position.offset) for f in features] == [
        ("image", "hash-x", 1),
        ("video", "hash-v", 4),
    ]
    assert [item.handle for item in processed.items] == fake.held
    assert [handle.mm_hash for handle in fake.held] == ["hash-v", "hash-x"]
    assert all(options.processor_kwargs == {"size": 4} for _, options in fake.calls)


def test_unset_fields_of_a_request_come_from_the_model(inputs: InputProcessor) -> None:
    request = process(inputs, "a").request
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 3)
    assert request.eos_token_ids == (7, 8)
    assert process(inputs, "a", temperature=0.0, seed=5).request.sampling_params.temperature == 0.0


def test_requests_without_a_seed_get_different_ones_that_an_engine_repeats(
    fake: FakePipeline,
) -> None:
    first, second = make_inputs(fake, seed=1), make_inputs(fake, seed=1)
    seeds = [process(first, "a").request.sampling_params.seed for _ in range(5)]
    assert len(set(seeds)) == 5
    assert [process(second, "a").request.sampling_params.seed for _ in range(5)] == seeds
    assert process(make_inputs(fake, seed=2), "a").request.sampling_params.seed not in seeds
    assert process(first, "a", seed=3).request.sampling_params.seed == 3


def test_fields_that_are_none_count_as_unset(inputs: InputProcessor) -> None:
    prompt = dict.fromkeys(
        ("multi_modal_data", "mm_processor_kwargs", "cache_salt", "priority"), None
    )
    request = process(inputs, {"prompt": "a", **prompt}, seed=1).request
    assert request == process(inputs, "a", seed=1).request
    assert request.priority == 0


def test_salt_and_priority_are_passed_on(inputs: InputProcessor) -> None:
    request = process(inputs, {"prompt": "a", "cache_salt": "s", "priority": -3}).request
    assert (request.cache_salt, request.priority) == ("s", -3)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "images": []}, r"unknown prompt field\(s\): images"),
        ({}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either 'prompt' or 'prompt_token_ids'"),
        ({"prompt": 5}, "prompt: must be str, not int"),
        ({"prompt": "a", "multi_modal_data": ["x"]}, "multi_modal_data: must be Mapping"),
        ({"prompt": "a", "mm_processor_kwargs": 1}, "mm_processor_kwargs: must be Mapping"),
        ({"prompt": "a", "cache_salt": b"s"}, "cache_salt: must be str, not bytes"),
        ({"prompt": "a", "priority": "high"}, "priority: must be int, not str"),
        (5, "a prompt must be text, token ids or a mapping, not int"),
        (b"abc", "not bytes"),
        ([1, -2], "token ids must be integers >= 0, not -2"),
        ([1, 2.0], "not 2.0"),
        ([True], "not True"),
        (["a"], "not 'a'"),
        (np.array([[1, 2]]), r"not \[1, 2\]"),
        ({"prompt_token_ids": "abc"}, "not str"),
        ({"prompt": "a", "multi_modal_data": {"audio": 1}}, r"takes no audio.*image, video"),
        ({"prompt": "a", "multi_modal_data": {"image": "xyz"}}, "0 'I' marker.* 1 image item"),
        (
            {"prompt": "III", "multi_modal_data": {"image": ["x", "y", "z"]}},
            "3 image items, but limit_mm_per_prompt allows 2",
        ),
        (
            {"prompt": "II", "multi_modal_data": {"image": ["x", "bad"]}},
            r"multi_modal_data.image\[1\]: cannot be read",
        ),
    ],
)
def test_a_prompt_that_makes_no_sense_is_refused_by_name(
    inputs: InputProcessor, fake: FakePipeline, prompt: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        process(inputs, prompt)
    assert fake.held == []


def test_a_request_that_fails_after_its_media_releases_them(
    inputs: InputProcessor, fake: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LetterTokenizer, "__call__", lambda *_, **__: Encoding(input_ids=[105] * 2))
    prompt = {"prompt": "I", "multi_modal_data": {"image": "x"}}
    assert len(process(inputs, prompt).items) == len(fake.held) == 1
    monkeypatch.setattr(inputs, "_get_bad_sequences", raise_error)
    with pytest.raises(RequestError, match="bad_words"):
        process(inputs, prompt)
    assert len(fake.held) == 1


def raise_error(words: object) -> None:
    raise RequestError(f"bad_words: {words}")


def test_items_over_the_limit_are_refused_before_any_is_processed(
    inputs: InputProcessor, fake: FakePipeline
) -> None:
    with pytest.raises(RequestError, match="limit_mm_per_prompt"):
        process(inputs, {"prompt": "III", "multi_modal_data": {"image": ["x"] * 3}})
    assert fake.calls == []


@pytest.mark.parametrize(
    ("media", "num_videos"),
    [
        (np.zeros((2, 4, 4, 3)), 1),
        ([np.zeros((2, 4, 4, 3))] * 2, 2),
        ([np.zeros((4, 4, 3))] * 5, 1),
        ([[np.zeros((4, 4, 3))] * 5] * 3, 3),
        ((), 0),
        (None, 0),
    ],
    ids=["an array", "arrays", "frames", "lists of frames", "none of them", "nothing"],
)
def test_a_list_of_frames_is_one_video(
    inputs: InputProcessor, fake: FakePipeline, media: Any, num_videos: int
) -> None:
    process(inputs, {"prompt": "V" * num_videos, "multi_modal_data": {"video": media}})
    assert len(fake.calls) == num_videos


def test_bad_words_are_banned_at_the_start_and_after_a_space(inputs: InputProcessor) -> None:
    bans = process(inputs, "abc", bad_words=["no", " x"]).request.bans
    words = {"".join(map(chr, sequence)) for sequence in bans.sequences}
    assert words == {"no", " no", "x", " x"}


def test_bans_of_the_model_hold_for_every_request(fake: FakePipeline) -> None:
    inputs = make_inputs(fake)
    inputs.defaults = replace(DEFAULTS, bans=TokenBans(sequences=((5,),), first_token_ids=(6,)))
    assert process(inputs, "a").request.bans == inputs.defaults.bans
    bans = process(inputs, "a", bad_words="z").request.bans
    assert bans.sequences == ((5,), (ord("z"),), (ord(" "), ord("z")))
    assert bans.first_token_ids == (6,)


def test_a_bad_word_without_tokens_is_refused_by_name(
    fake: FakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LetterTokenizer, "__call__", lambda *_, **__: Encoding(input_ids=[]))
    with pytest.raises(RequestError, match="bad_words: the tokenizer has no tokens for 'zz'"):
        process(make_inputs(fake), [1], bad_words=["zz"])
