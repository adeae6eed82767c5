"""What is streamed is what is returned, and never more than can't change."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.engine.outputs.text_reader import count_held_back
from sensorium.types.errors import ErrorRecord
from sensorium.types.outputs import CompletionDelta, RequestDelta, RequestOutput
from sensorium.types.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from sensorium.types.sampling import SamplingParams
from tests.unit.engine.test_output_processor import LetterTokenizer


def make_processor(*, is_streamed: bool = True, **params: Any) -> OutputProcessor:
    processor = OutputProcessor(LetterTokenizer())
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(ord(">"),),
        sampling_params=SamplingParams(max_tokens=99, **params),
    )
    processor.add_request(request, ">", is_streamed=is_streamed)
    return processor


def give(
    text: str, finish_reason: FinishReason | None = None, request_id: str = "r", **more: Any
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=tuple(map(ord, text)),
        finish_reason=finish_reason,
        **more,
    )


def step(processor: OutputProcessor, *outputs: EngineCoreOutput) -> list[RequestDelta]:
    finished, _ = processor.process(outputs)
    assert finished == []  # it is streamed
    return take_deltas(processor)


def take_deltas(processor: OutputProcessor) -> list[RequestDelta]:
    delta = processor.take_delta("r")
    return [] if delta is None else [delta]


def take_one(processor: OutputProcessor, *outputs: EngineCoreOutput) -> CompletionDelta:
    ((delta,),) = [entry.deltas for entry in step(processor, *outputs)]
    return delta


def test_each_step_gives_its_new_text_and_the_last_the_whole_request() -> None:
    processor = make_processor()
    (first,) = step(processor, give("ab"))
    assert first == RequestDelta(
        request_id="r",
        deltas=(CompletionDelta(index=0, text="ab", token_ids=(97, 98)),),
        prompt_token_ids=first.prompt_token_ids,
    )
    assert take_deltas(processor) == []  # taken
    (last,) = step(processor, give("c", FinishReason.LENGTH))
    assert last.deltas == (
        CompletionDelta(index=0, text="c", token_ids=(99,), finish_reason=FinishReason.LENGTH),
    )
    assert last.final is not None
    assert last.final.outputs[0].text == "abc"
    assert take_deltas(processor) == []
    assert processor.request_ids == ()


def test_steps_that_were_not_read_come_together() -> None:
    processor = make_processor()
    processor.process([give("a")])
    processor.process([give("b")])
    assert take_one(processor, give("c", FinishReason.LENGTH)).text == "abc"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    processor = make_processor(stop=("xyz",))
    assert [take_one(processor, give(letter)).text for letter in "axyxy"] == [
        "a",
        "",
        "",
        "xy",
        "",
    ]
    (last,) = step(processor, give("z"))
    (delta,) = last.deltas
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", FinishReason.STOP, "xyz")
    assert last.final is not None
    assert last.final.outputs[0].text == "axy"


def test_what_was_held_back_comes_when_it_is_no_stop_string() -> None:
    processor = make_processor(stop=("xyz",))
    assert take_one(processor, give("xy")).text == ""
    assert take_one(processor, give("!")).text == "xy!"
    assert take_one(processor, give("x", FinishReason.LENGTH)).text == "x"


def test_an_incomplete_character_is_held_back_until_the_end() -> None:
    processor = make_processor()
    assert take_one(processor, give("a\ufffd")).text == "a"
    assert take_one(processor, give("", FinishReason.ABORT)).text == "\ufffd"


def test_log_probabilities_come_with_their_tokens() -> None:
    entry = TokenLogprobs(logprob=-1.0, rank=1, top_token_ids=(97,), top_logprobs=(-1.0,))
    processor = make_processor(logprobs=1, stop=("ab",))
    delta = take_one(processor, give("a", logprobs=(entry,)))
    assert (delta.text, len(delta.logprobs or ())) == ("", 1)
    (last,) = step(processor, give("c", FinishReason.LENGTH, logprobs=(entry,)))
    assert [len(delta.logprobs or ()) for delta in last.deltas] == [1]
    assert last.final is not None
    assert len(last.final.outputs[0].logprobs or ()) == 2


def test_completions_are_kept_separate_and_each_ends_once() -> None:
    processor = make_processor(n=2)
    (both,) = step(processor, give("a", request_id="r#0"), give("b", request_id="r#1"))
    assert [(delta.index, delta.text) for delta in both.deltas] == [(0, "a"), (1, "b")]
    (first,) = step(processor, give("c", FinishReason.LENGTH, request_id="r#0"))
    assert first.final is None
    assert [delta.finish_reason for delta in first.deltas] == [FinishReason.LENGTH]
    (last,) = step(processor, give("d", FinishReason.STOP, request_id="r#1"))
    assert [delta.index for delta in last.deltas] == [1]
    assert last.final is not None


def test_other_completions_of_a_failure_end_with_it() -> None:
    processor = make_processor(n=2, stop=("xyz",))
    step(processor, give("a", request_id="r#0"), give("bxy", request_id="r#1"))
    failure = give("", FinishReason.ERROR, request_id="r#0", error=ErrorRecord(message="no memory"))
    (last,) = step(processor, failure)
    assert [(delta.index, delta.text, delta.finish_reason) for delta in last.deltas] == [
        (0, "", FinishReason.ERROR),
        (1, "xy", FinishReason.ABORT),
    ]
    assert last.final is not None
    assert str(last.final.error) == "no memory"


def test_a_forgotten_stream_gives_nothing() -> None:
    processor = make_processor()
    processor.process([give("a")])
    processor.forget(["r"])
    assert take_deltas(processor) == []


def test_a_request_that_is_not_streamed_gives_no_deltas() -> None:
    processor = make_processor(is_streamed=False)
    finished, _ = processor.process([give("a", FinishReason.LENGTH)])
    assert len(finished) == 1
    assert take_deltas(processor) == []


LETTERS = st.text("ab\ufffd", min_size=1, max_size=12)


@given(
    texts=st.lists(LETTERS, min_size=1, max_size=3),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.ABORT, FinishReason.STOP]),
)
def test_the_deltas_together_are_the_text(
    texts: list[str], stop: list[str], include: bool, min_tokens: int, reason: FinishReason
) -> None:
    processor = make_processor(
        n=len(texts), stop=tuple(stop), include_stop_str_in_output=include, min_tokens=min_tokens
    )
    ids = ["r"] if len(texts) == 1 else [f"r#{index}" for index in range(len(texts))]
    streamed: defaultdict[int, str] = defaultdict(str)
    tokens: defaultdict[int, tuple[int, ...]] = defaultdict(tuple)
    ends: list[int] = []
    final: RequestOutput | None = None
    for position in range(max(map(len, texts))):
        outputs = [
            give(text[position], reason if position == len(text) - 1 else None, request_id)
            for text, request_id in zip(texts, ids, strict=True)
            if position < len(text)
        ]
        for entry in step(processor, *outputs):
            assert final is None
            final = entry.final
            for delta in entry.deltas:
                streamed[delta.index] += delta.text
                tokens[delta.index] += delta.token_ids
                ends += [delta.index] if delta.finish_reason is not None else []
    assert final is not None
    assert sorted(ends) == list(range(len(texts)))
    for completion in final.outputs:
        assert streamed[completion.index] == completion.text
        assert tokens[completion.index] == completion.token_ids


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("", ["ab"], 0),
        ("xa", ["ab"], 1),
        ("xab", ["ab"], 0),
        ("xaba", ["abac", "ba"], 3),
        ("aaa", ["aaaa", "aab"], 3),
        ("ab", [], 0),
    ],
)
def test_as_much_text_is_held_back_as_may_start_a_stop_string(
    text: str, stop: list[str], expected: int
) -> None:
    assert count_held_back(text, stop) == expected
