"""An engine reads what a frontend sends, and only bytes cross."""

from __future__ import annotations

from dataclasses import fields

import msgspec
import pytest
import torch

from sensorium.multimodal.item_codec import PrecomputedEmbeds
from sensorium.multimodal.media import DeferredBytes, MediaBytes, MediaItem
from sensorium.render.prompts import EnginePrompt, RenderedMedia
from sensorium.scale import messages
from sensorium.speech.transcript import Segment, SpeechUsage, Transcript
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, PlaceholderRange
from sensorium.types.outputs import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    RequestDelta,
    RequestOutput,
)
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams
from sensorium.types.structured import StructuredOutputsParams

_FILES = {"aa": b"a file", "bb": b"another"}


def _cross(prompt: EnginePrompt) -> EnginePrompt:
    wire, _ = messages.write_prompt(prompt)
    call = messages.Generate(prompt=wire, params=SamplingParams(), request_id="r")
    decoded = messages.decode_call(messages.encode_call(call))
    assert isinstance(decoded, messages.Generate)
    return messages.read_prompt(decoded.prompt, lambda digest: lambda: _FILES[digest])


def test_a_prompt_crosses_with_its_media_and_options() -> None:
    embeds = torch.arange(6, dtype=torch.float32).view(2, 3)
    given = EnginePrompt(
        token_ids=[1, 2, 3, 4],
        media=(
            MediaItem(path=("m", 0), modality="image", media=MediaBytes(b"a file", "aa")),
            MediaItem(path=("m", 1), modality="image", media=None, uuid="named"),
            MediaItem(path=("m", 2), modality="video", media="https://x.test/v", uuid="far"),
            MediaItem(path=("m", 3), modality="image", media=PrecomputedEmbeds(embeds)),
        ),
        positions=(
            ("image", PlaceholderRange(0, 2, (True, False))),
            ("video", PlaceholderRange(2, 1)),
        ),
        mm_processor_kwargs={"size": {"longest_edge": 5}},
        media_io_kwargs={"video": {"fps": 2}},
        add_special_tokens=False,
        cache_salt="salt",
        uuid_scope="scope",
        priority=-3,
    )
    read = _cross(given)
    for each in fields(EnginePrompt):
        if each.name not in ("media", "token_ids"):
            assert getattr(read, each.name) == getattr(given, each.name), each.name
    assert list(read.token_ids) == given.token_ids
    for own, wanted in zip(read.media, given.media, strict=True):
        assert (own.path, own.modality, own.uuid) == (wanted.path, wanted.modality, wanted.uuid)
    file, named, far, sent = (item.media for item in read.media)
    assert isinstance(file, DeferredBytes)
    assert (file.digest, file.data) == ("aa", b"a file")
    assert named is None
    assert far == "https://x.test/v"
    assert isinstance(sent, PrecomputedEmbeds)
    assert torch.equal(sent.tensor, embeds)


def test_a_file_is_loaded_when_it_is_needed_and_once() -> None:
    loaded: list[str] = []

    def load() -> bytes:
        loaded.append("now")
        return b"content"

    media = DeferredBytes("digest", load)
    assert loaded == []
    assert media.data == media.data == b"content"
    assert loaded == ["now"]


def test_processed_media_crosses_with_its_tensors() -> None:
    pixels = torch.arange(4, dtype=torch.float16).view(2, 2)
    rendered = RenderedMedia(
        mm_hashes={"image": ["h1", "h2"]},
        mm_placeholders={"image": [PlaceholderRange(0, 1), PlaceholderRange(1, 2, (False, True))]},
        mm_kwargs={"image": [{"pixel_values": pixels}, None]},
        mm_layouts={"image": [ItemLayout(text="<i>", token_id=7, num_embeds=1), None]},
        is_external=True,
    )
    read = _cross(EnginePrompt(token_ids=[7, 7, 7], rendered=rendered)).rendered
    assert read is not None
    assert read.mm_hashes == rendered.mm_hashes
    assert read.mm_placeholders == rendered.mm_placeholders
    assert read.mm_layouts == rendered.mm_layouts
    first, second = read.mm_kwargs["image"]
    assert torch.equal(first["pixel_values"], pixels)
    assert second is None
    assert read.is_external


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=3, temperature=0.5, top_k=4, stop=["a", "b"], seed=5, max_tokens=None),
        SamplingParams(logit_bias={3: -5.0}, bad_words=["x"], allowed_token_ids=[1, 2]),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"})),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ],
)
def test_sampling_parameters_cross_unchanged(params: SamplingParams) -> None:
    call = messages.Generate(prompt=messages.WirePrompt(text="x"), params=params, request_id="r")
    decoded = messages.decode_call(messages.encode_call(call))
    assert isinstance(decoded, messages.Generate)
    assert decoded.params == params


def test_answers_cross_unchanged() -> None:
    logprobs = ({5: Logprob(logprob=-0.5, rank=1, decoded_token="a")},)
    final = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1, 2),
        outputs=(
            CompletionOutput(
                index=0,
                text="a",
                token_ids=(5,),
                finish_reason=FinishReason.STOP,
                stop_reason=5,
                logprobs=logprobs,
            ),
        ),
        finished=True,
        prompt_logprobs=(None, logprobs[0]),
        encoder_hits=(0,),
        mm_tokens={"image": 3},
        stages={"perceive": 0.25},
    )
    piece = CompletionDelta(index=0, text="a", token_ids=(5,), logprobs=logprobs)
    delta = RequestDelta(request_id="r", deltas=(piece,), prompt_token_ids=(1, 2), final=final)
    assert messages.decode_answer(messages.encode(messages.Delta(delta))) == messages.Delta(delta)


def test_the_tokens_of_a_prompt_cross_once() -> None:
    prompt = tuple(range(1000, 5000))
    final = RequestOutput(
        request_id="r", prompt="many", prompt_token_ids=prompt, outputs=(), finished=True
    )
    deltas = [
        RequestDelta(
            request_id="r",
            deltas=(CompletionDelta(index=0, text="a", token_ids=(5,)),),
            prompt_token_ids=prompt,
            final=final if number == 2 else None,
        )
        for number in range(3)
    ]
    sent = [
        messages.encode(messages.Delta(messages.leave_out_prompt(delta, is_first=number == 0)))
        for number, delta in enumerate(deltas)
    ]
    assert len(sent[0]) > 4000
    assert max(map(len, sent[1:])) < 1000
    for data, wanted in zip(sent, deltas, strict=True):
        found = messages.decode_answer(data)
        assert isinstance(found, messages.Delta)
        assert messages.restore_prompt(found.delta, text="many", token_ids=prompt) == wanted


def test_an_unfinished_transcript_crosses_with_its_error() -> None:
    segment = Segment(index=0, seek=0, start=0.0, end=1.5, text="one", token_ids=(1,))
    broken = Transcript(
        text="one",
        task="transcribe",
        language="en",
        duration_s=3.0,
        segments=(segment,),
        usage=SpeechUsage(num_output_tokens=1),
        error=RequestError("the sound ends early", path=("file",)),
    )
    part = messages.decode_answer(messages.encode(messages.Part(transcript=broken)))
    assert isinstance(part, messages.Part)
    assert part.transcript is not None
    assert part.transcript.segments == broken.segments
    assert str(part.transcript.error) == "file: the sound ends early"


@pytest.mark.parametrize(
    "prompt",
    [EnginePrompt(text="half \ud800"), EnginePrompt(text="x", mm_processor_kwargs={"a": object()})],
)
def test_objects_that_can_not_be_sent_are_refused_with_a_reason(prompt: EnginePrompt) -> None:
    wire, _ = messages.write_prompt(prompt)
    call = messages.Generate(prompt=wire, params=SamplingParams(), request_id="r")
    with pytest.raises(RequestError, match="can't be sent to the engine"):
        messages.encode_call(call)


def test_an_invalid_message_is_not_read() -> None:
    for data in (b"", b"\xc1", msgspec.msgpack.encode({"type": "Nothing"})):
        with pytest.raises(msgspec.MsgspecError):
            messages.decode_call(data)


def test_hashes_without_media_are_listed() -> None:
    prompt = EnginePrompt(
        media=(
            MediaItem(path=(), modality="image", media=None, uuid="a"),
            MediaItem(path=(), modality="image", media=MediaBytes(b"x", "d"), uuid="b"),
        ),
        uuid_scope="who",
        cache_salt="salt",
    )
    assert messages.list_uuids(prompt) == (messages.UuidKey("image", "a", "who", "salt"),)
    rendered = RenderedMedia(mm_hashes={"image": ["h", "i"]}, mm_kwargs={"image": [None, {}]})
    assert messages.list_uuids(EnginePrompt(rendered=rendered)) == (
        messages.UuidKey("image", "h", None, None),
    )


def test_features_of_audio_cross_unchanged() -> None:
    features = torch.randn(4, 3)
    sent = messages.encode(messages.write_audio("s", features.T, is_last=True))
    read = messages.decode_append(sent)
    assert (read.request_id, read.is_last) == ("s", True)
    found = messages.read_audio(read)
    assert found is not None
    assert torch.equal(found, features.T)
    nothing = messages.write_audio("s", None, is_last=False)
    assert messages.read_audio(nothing) is None
