"""From tokens to answers: text, stop strings, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.types.errors import ErrorRecord
from sensorium.types.model_kind import CAUSAL, CROSS, ModelKind
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.outputs import CompletionOutput, RequestOutput
from sensorium.types.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from sensorium.types.sampling import SamplingParams

EOS = ord("$")
FIRE = ErrorRecord(kind="FailedRequestError", message="the GPU is on fire")


class LetterTokenizer:
    """A token is a character's code."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, token_ids))
        return text.replace("$", "") if skip_special_tokens else text


def make_processor(request_id: str = "r", **params: Any) -> OutputProcessor:
    processor = OutputProcessor(LetterTokenizer())
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=(ord(">"),),
        sampling_params=SamplingParams(max_tokens=99, **params),
    )
    processor.add_request(request, ">")
    return processor


def news(text: str, finish_reason: FinishReason | None = None, **more: Any) -> EngineCoreOutput:
    token_ids = tuple(map(ord, text))
    return EngineCoreOutput(
        request_id="r", new_token_ids=token_ids, finish_reason=finish_reason, **more
    )


def run(processor: OutputProcessor, outputs: Iterable[EngineCoreOutput]) -> RequestOutput:
    """Feed step by step until the request ends."""
    for output in outputs:
        finished, _ = processor.process([output])
        if finished:
            return finished[0]
    raise AssertionError("the request did not end")


def complete(
    text: str, finish_reason: FinishReason = FinishReason.LENGTH, **params: Any
) -> CompletionOutput:
    steps = [news(character) for character in text[:-1]] + [news(text[-1], finish_reason)]
    return run(make_processor(**params), steps).outputs[0]


def test_an_output_carries_the_request_and_its_counts() -> None:
    processor = make_processor()
    last = news("b", FinishReason.LENGTH, num_cached_tokens=16, num_encoder_hits=2)
    output = run(processor, [news("a"), last])
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", ">", (62,))
    assert (output.num_cached_tokens, output.num_encoder_hits) == (16, 2)
    assert output.finished
    assert output.error is None
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].token_ids == (97, 98)
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def _count_mm_tokens(
    *places: tuple[str, PlaceholderRange], kind: ModelKind = CAUSAL
) -> dict[str, int]:
    processor = OutputProcessor(LetterTokenizer(), kind=kind)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(62,) * 20,
        sampling_params=SamplingParams(max_tokens=1),
        mm_features=tuple(
            MultiModalFeatureSpec(modality=modality, mm_hash="h", mm_position=position)
            for modality, position in places
        ),
    )
    processor.add_request(request, None)
    return dict(run(processor, [news("a", FinishReason.LENGTH)]).mm_tokens)


def test_tokens_of_media_are_the_positions_that_take_embeddings() -> None:
    first = PlaceholderRange(1, 4)
    second = PlaceholderRange(6, 5, is_embed=(False, True, True, True, False))
    places = (("image", first), ("image", second), ("audio", PlaceholderRange(12, 2)))
    assert _count_mm_tokens(*places) == {"image": 7, "audio": 2}
    assert _count_mm_tokens() == {}


def test_audio_outside_the_prompt_takes_none_of_its_tokens() -> None:
    assert _count_mm_tokens(("audio", PlaceholderRange(0, 9)), kind=CROSS) == {}


def test_an_unfinished_request_gives_no_output() -> None:
    assert make_processor().process([news("a")]) == ([], [])


@pytest.mark.parametrize(
    ("include", "text"), [(False, "ab"), (True, "abx")], ids=["excluded", "included"]
)
def test_a_stop_token_has_text_only_if_that_was_asked_for(include: bool, text: str) -> None:
    completion = complete("abx", FinishReason.STOP, include_stop_str_in_output=include)
    assert completion.text == text
    assert completion.token_ids == tuple(map(ord, "abx"))


def test_an_end_of_sequence_token_has_no_text_and_no_stop_reason() -> None:
    completion = complete("ab$", FinishReason.STOP)
    assert (completion.text, completion.stop_reason) == ("ab", None)


@pytest.mark.parametrize("token_id", [0, 120])
def test_the_stop_token_of_the_caller_is_the_stop_reason(token_id: int) -> None:
    steps = [news("a"), news(chr(token_id), FinishReason.STOP, stop_token_id=token_id)]
    assert run(make_processor(), steps).outputs[0].stop_reason == token_id


@pytest.mark.parametrize(
    ("include", "text"), [(False, "ab"), (True, "abxyz")], ids=["excluded", "included"]
)
def test_a_stop_string_over_several_tokens_cuts_the_text(include: bool, text: str) -> None:
    processor = make_processor(stop=("xyz",), include_stop_str_in_output=include)
    for character in "abxy":
        assert processor.process([news(character)]) == ([], [])
    (output,), stopped = processor.process([news("z")])
    completion = output.outputs[0]
    assert stopped == ["r"]
    assert completion.text == text
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == "xyz"
    assert completion.token_ids == tuple(map(ord, "abxyz"))


def test_outputs_of_the_core_after_a_stop_string_are_ignored() -> None:
    processor = make_processor(stop=("x",))
    processor.process([news("x")])
    assert processor.process([news("y"), news("", FinishReason.ABORT)]) == ([], [])


def test_a_stop_string_in_the_last_token_needs_no_abort() -> None:
    processor = make_processor(stop=("b",))
    processor.process([news("a")])
    (output,), stopped = processor.process([news("b", FinishReason.LENGTH)])
    assert stopped == []
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert output.outputs[0].text == "a"


def test_a_stop_string_within_min_tokens_is_no_stop() -> None:
    completion = complete("axbxc", stop=("x",), min_tokens=2)
    assert (completion.text, completion.stop_reason) == ("axb", "x")


def test_the_text_of_an_incomplete_character_is_given_at_the_end() -> None:
    assert complete("a\ufffd").text == "a\ufffd"


def test_logprobs_hold_the_chosen_token_and_the_likeliest_with_their_text() -> None:
    entry = TokenLogprobs(logprob=-3.0, rank=7, top_token_ids=(98, 99), top_logprobs=(-0.5, -1.0))
    output = run(
        make_processor(logprobs=2),
        [news("a", logprobs=(entry,)), news("b", FinishReason.LENGTH, logprobs=(entry,))],
    )
    first, second = output.outputs[0].logprobs or ()
    assert {i: (e.logprob, e.rank, e.decoded_token) for i, e in first.items()} == {
        98: (-0.5, 1, "b"),
        99: (-1.0, 2, "c"),
        97: (-3.0, 7, "a"),
    }
    assert second[98].rank == 7  # what was chosen, not its place among the likeliest
    assert output.outputs[0].cumulative_logprob == -6.0


def test_a_token_that_is_likely_at_many_positions_is_decoded_once() -> None:
    class CountingTokenizer(LetterTokenizer):
        num_single = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            self.num_single += not skip_special_tokens
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = CountingTokenizer()
    processor = OutputProcessor(tokenizer)
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(97,) * 50,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=2),
    )
    processor.add_request(request, None)
    entry = TokenLogprobs(logprob=-3.0, rank=7, top_token_ids=(98, 99), top_logprobs=(-0.5, -1.0))
    output = run(processor, [news("a", FinishReason.LENGTH, prompt_logprobs=(entry,) * 49)])
    assert [len(found or ()) for found in output.prompt_logprobs or ()] == [0, *[3] * 49]
    assert tokenizer.num_single == 3


def test_logprobs_that_were_not_asked_for_are_absent() -> None:
    completion = complete("ab")
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_request_that_ends_without_a_token_keeps_the_text_it_had(reason: FinishReason) -> None:
    last = news("", reason, error=FIRE if reason is FinishReason.ERROR else None)
    output = run(make_processor(), [news("a"), last])
    assert output.outputs[0].text == "a"
    assert output.outputs[0].finish_reason is reason
    if reason is FinishReason.ERROR:
        assert str(output.error) == "the GPU is on fire"
    else:
        assert output.error is None


def test_requests_of_one_step_are_kept_separate() -> None:
    processor = make_processor("r")
    other = EngineCoreRequest(
        request_id="s", prompt_token_ids=(1,), sampling_params=SamplingParams()
    )
    processor.add_request(other, None)
    finished, _ = processor.process(
        [
            news("a"),
            EngineCoreOutput(
                request_id="s", new_token_ids=(98,), finish_reason=FinishReason.LENGTH
            ),
        ]
    )
    assert [(output.request_id, output.prompt) for output in finished] == [("s", None)]
    assert run(processor, [news("c", FinishReason.LENGTH)]).outputs[0].text == "ac"


def test_text_that_was_held_back_comes_out_when_a_request_is_aborted() -> None:
    processor = make_processor()
    incomplete = "\ufffd"  # what the first bytes of a character decode to
    steps = [news("a"), news(incomplete), news("", FinishReason.ABORT)]
    assert run(processor, steps).outputs[0].text == "a" + incomplete


def test_a_forgotten_request_gives_no_output() -> None:
    processor = make_processor()
    processor.forget(["r", "unknown"])
    assert processor.process([news("a", FinishReason.LENGTH)]) == ([], [])


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "a"),
        ({"skip_special_tokens": False}, "a$"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a$$"),
    ],
)
def test_special_tokens_have_text_if_it_was_asked_for(params: dict[str, Any], text: str) -> None:
    """The one that ends a request also needs `include_stop_str_in_output`."""
    assert complete("a$$", FinishReason.STOP, **params).text == text
