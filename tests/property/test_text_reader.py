"""Text that is read in pieces, by a reader that begins anew with each, is the engine's own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.engine.outputs.text_reader import UNKNOWN, TextReader, TextState
from sensorium.types.errors import RequestError
from sensorium.types.outputs import CompletionOutput
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams

_FAMILIES = ("qwen2_5_omni", "gemma3", "llama", "idefics3", "voxtral")
_NUM_IDS = 500  # some of them in no vocabulary
token_lists = st.lists(st.integers(0, _NUM_IDS), min_size=1, max_size=60)
cuts = st.sets(st.integers(0, 60))
stops = st.lists(st.integers(0, 40), max_size=3)


@cache
def _load(path: str) -> Any:
    return AutoTokenizer.from_pretrained(path)


def _complete(
    tokenizer: Any,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
    reason: FinishReason,
) -> tuple[CompletionOutput, int]:
    """As the engine does, token by token; and how many it has taken."""
    processor = OutputProcessor(tokenizer)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=tuple(prompt), sampling_params=params
    )
    processor.add_request(request, None)
    for index, token_id in enumerate(token_ids):
        is_last = index == len(token_ids) - 1
        output = EngineCoreOutput(
            request_id="r", new_token_ids=(token_id,), finish_reason=reason if is_last else None
        )
        finished, _ = processor.process([output])
        if finished:
            return finished[0].outputs[0], index + 1
    raise AssertionError("it has no end")


def _read(
    tokenizer: Any,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    params: SamplingParams,
    *,
    cuts: set[int],
    finish_reason: str,
    stop_reason: object,
) -> tuple[str, str | None]:
    """In pieces, with nothing but the bytes of a state between them."""
    borders = [0, *sorted(cut for cut in cuts if 0 < cut < len(token_ids)), len(token_ids)]
    state: bytes | None = None
    text, stop_string = "", None
    for start, end in pairwise(borders):
        own = None if state is None else msgspec.msgpack.decode(state, type=TextState)
        if own is not None:
            own.check()
        reader = TextReader(tokenizer, params, prompt_token_ids=tuple(prompt), state=own)
        is_last = end == len(token_ids)
        text += reader.add(
            token_ids[start:end],
            finish_reason=finish_reason if is_last else None,
            stop_reason=stop_reason if is_last else None,
        )
        stop_string = reader.stop_string or stop_string
        state = msgspec.msgpack.encode(reader.save())
        assert len(state) < 2048
    return text, stop_string


@pytest.mark.parametrize("family", _FAMILIES)
@settings(max_examples=60)
@given(
    token_ids=token_lists,
    prompt=st.lists(st.integers(0, _NUM_IDS), max_size=8),
    cuts=cuts,
    stops=stops,
    is_included=st.booleans(),
    min_tokens=st.integers(0, 8),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_pieces_give_the_text_of_the_whole(
    tiny_model: Callable[[str], str],
    family: str,
    token_ids: list[int],
    prompt: list[int],
    cuts: set[int],
    stops: list[int],
    is_included: bool,
    min_tokens: int,
    reason: FinishReason,
) -> None:
    tokenizer = _load(tiny_model(family))
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    stop = [whole[start : start + 3] for start in stops if whole[start : start + 3]]
    params = SamplingParams(
        stop=stop,
        include_stop_str_in_output=is_included,
        min_tokens=min_tokens,
        max_tokens=99,
    )
    expected, num_taken = _complete(tokenizer, prompt, token_ids, params, reason)
    is_string = isinstance(expected.stop_reason, str)
    text, stop_string = _read(
        tokenizer,
        prompt,
        token_ids[:num_taken],
        params,
        cuts=cuts,
        finish_reason=str(expected.finish_reason),
        stop_reason=expected.stop_reason,
    )
    assert text == expected.text
    assert stop_string == (expected.stop_reason if is_string else None)


class _Bytes:
    """Token n is the byte n; 256 is special, and has a text where it is not skipped."""

    def __len__(self) -> int:
        return 257

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        kept = b"".join(b"<end>" if i == 256 else bytes([i]) for i in token_ids if i <= 256)
        if skip_special_tokens:
            kept = bytes(i for i in token_ids if i < 256)
        return kept.decode(errors="replace")


@settings(max_examples=300)
@given(
    text=st.text("abé", min_size=1, max_size=20),
    cuts=st.sets(st.integers(0, 30)),
    stop=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    is_included=st.booleans(),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_stop_strings_may_be_cut_anywhere(
    text: str, cuts: set[int], stop: list[str], is_included: bool, reason: FinishReason
) -> None:
    token_ids = list(text.encode()) + ([256] if reason is FinishReason.STOP else [])
    params = SamplingParams(stop=stop, include_stop_str_in_output=is_included, max_tokens=99)
    expected, num_taken = _complete(_Bytes(), (), token_ids, params, reason)
    told, stop_string = _read(
        _Bytes(),
        (),
        token_ids[:num_taken],
        params,
        cuts=cuts,
        finish_reason=str(expected.finish_reason),
        stop_reason=expected.stop_reason,
    )
    assert told == expected.text
    assert stop_string == (expected.stop_reason or None)


@pytest.mark.parametrize("token_id", [256, 300, 0xFF, 0xC3, ord("a")])
def test_state_does_not_grow_with_the_answer(token_id: int) -> None:
    """Not even of what never becomes text."""
    state: TextState | None = None
    params = SamplingParams(stop=["a" * 500])
    sizes = []
    for _ in range(400):
        reader = TextReader(_Bytes(), params, state=state)
        reader.add([token_id] * 3)
        state = reader.save()
        sizes.append(len(msgspec.msgpack.encode(state)))
        if reader.is_ended:
            break
    assert max(sizes) < 2048  # the stop string, and a few tokens


def test_incomplete_bytes_at_the_end_become_replacement_characters() -> None:
    reader = TextReader(_Bytes(), SamplingParams())
    assert reader.add([0xFF] * 100) == "\ufffd" * 96
    assert reader.add([], finish_reason="length") == "\ufffd" * 4


@pytest.mark.parametrize(
    ("stop_reason", "text"), [(UNKNOWN, "a"), ("bc", "a"), (None, "ab"), (99, "ab")]
)
def test_a_stop_string_is_known_by_the_reason_or_the_text(stop_reason: object, text: str) -> None:
    reader = TextReader(_Bytes(), SamplingParams(stop=["bc"]))
    assert reader.add(b"abc", finish_reason="stop", stop_reason=stop_reason) == text
    assert reader.stop_string == ("bc" if text == "a" else None)


def test_a_closing_token_gives_no_text_if_the_stop_reason_is_unknown() -> None:
    for stop in ((), ("x",)):
        reader = TextReader(_Bytes(), SamplingParams(stop=stop))
        assert reader.add(b"abc", finish_reason="stop", stop_reason=UNKNOWN) == "ab"


def test_no_text_follows_the_end() -> None:
    params = SamplingParams(stop=["b"])
    reader = TextReader(_Bytes(), params)
    assert reader.add(b"abcdef") == "a"
    again = TextReader(_Bytes(), params, state=reader.save())
    assert again.is_ended
    assert again.add(b"ghi", finish_reason="length") == ""


@pytest.mark.parametrize(
    "state",
    [
        TextState(token_ids=(1,) * 257),
        TextState(token_ids=(-1,)),
        TextState(token_ids=(2**31,)),
        TextState(token_ids=(1,), num_read=2),
        TextState(num_read=-1),
        TextState(text="a" * 4097),
        TextState(text="a", num_emitted=2),
        TextState(num_emitted=-1),
        TextState(num_tokens=-1),
    ],
)
def test_an_invalid_state_is_refused(state: TextState) -> None:
    with pytest.raises(RequestError, match="stream_state"):
        state.check()
