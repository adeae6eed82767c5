"""Several completions of one request come back as one output.

So do the log-probabilities of its prompt.
"""

from __future__ import annotations

from typing import Any

from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.types.errors import ErrorRecord
from sensorium.types.request import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from sensorium.types.sampling import SamplingParams

from .test_output_processor import LetterTokenizer


def make_processor(**params: Any) -> OutputProcessor:
    processor = OutputProcessor(LetterTokenizer())
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=tuple(map(ord, "xyz")),
        sampling_params=SamplingParams(max_tokens=99, **params),
    )
    processor.add_request(request, "xyz")
    return processor


def give(
    index: int, text: str, reason: FinishReason | None = None, **more: Any
) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id=f"r#{index}",
        new_token_ids=tuple(map(ord, text)),
        finish_reason=reason,
        **more,
    )


def test_completions_come_together_in_the_order_of_their_indices() -> None:
    processor = make_processor(n=3)
    last = FinishReason.LENGTH
    assert processor.process([give(2, "c", last), give(0, "a", num_cached_tokens=1)]) == ([], [])
    assert processor.process([give(1, "b", last, num_cached_tokens=2)]) == ([], [])
    (output,), stopped = processor.process([give(0, "d", last, num_cached_tokens=1)])
    assert stopped == []
    assert output.request_id == "r"
    assert [(c.index, c.text) for c in output.outputs] == [(0, "ad"), (1, "b"), (2, "c")]
    assert output.num_cached_tokens == 1
    assert processor.request_ids == ()


def test_a_stop_string_ends_one_completion_and_the_others_continue() -> None:
    processor = make_processor(n=2, stop="b")
    assert processor.process([give(0, "b"), give(1, "a")]) == ([], ["r#0"])
    assert processor.process([give(0, "z"), give(1, "c")]) == ([], [])
    (output,), stopped = processor.process([give(1, "b")])
    assert stopped == ["r#1"]
    assert [c.text for c in output.outputs] == ["", "ac"]
    assert [c.stop_reason for c in output.outputs] == ["b", "b"]


def test_one_that_fails_takes_the_others_with_it() -> None:
    processor = make_processor(n=3)
    processor.process([give(0, "a", FinishReason.LENGTH), give(1, "b"), give(2, "c")])
    failure = give(1, "", FinishReason.ERROR, error=ErrorRecord(message="no", path=("seed",)))
    (output,), stopped = processor.process([failure])
    assert stopped == ["r#2"]
    assert str(output.error) == "seed: no"
    assert [c.finish_reason for c in output.outputs] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.ABORT,
    ]
    assert [c.text for c in output.outputs] == ["a", "b", "c"]
    assert processor.process([give(2, "d")]) == ([], [])


def test_one_that_is_aborted_takes_the_others_with_it() -> None:
    processor = make_processor(n=2)
    (output,), stopped = processor.process([give(0, "", FinishReason.ABORT)])
    assert stopped == ["r#1"]
    assert output.error is None
    assert {c.finish_reason for c in output.outputs} == {FinishReason.ABORT}


def test_a_request_is_known_by_its_children_until_it_is_forgotten() -> None:
    processor = make_processor(n=2)
    assert processor.get_child_ids(["unknown", "r"]) == ["r#0", "r#1"]
    processor.forget(["r"])
    assert processor.get_child_ids(["r"]) == []
    assert processor.process([give(0, "a", FinishReason.LENGTH)]) == ([], [])


def make_entry(rank: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=-float(rank), rank=rank, top_token_ids=(97,), top_logprobs=(-0.5,))


def test_prompt_log_probabilities_start_with_none_and_hold_the_tokens_of_the_prompt() -> None:
    processor = make_processor(prompt_logprobs=1)
    first, second = make_entry(4), make_entry(9)
    chunk = EngineCoreOutput(request_id="r", prompt_logprobs=(first,))
    assert processor.process([chunk]) == ([], [])
    last = EngineCoreOutput(
        request_id="r",
        new_token_ids=(97,),
        prompt_logprobs=(second,),
        finish_reason=FinishReason.LENGTH,
    )
    (output,), _ = processor.process([last])
    nothing, y, z = output.prompt_logprobs or ()
    assert nothing is None
    assert y is not None
    assert z is not None
    assert {i: (e.logprob, e.rank, e.decoded_token) for i, e in y.items()} == {
        97: (-0.5, 1, "a"),
        ord("y"): (-4.0, 4, "y"),
    }
    assert z[ord("z")].rank == 9


def test_prompt_log_probabilities_that_were_not_asked_for_are_absent() -> None:
    processor = make_processor()
    last = EngineCoreOutput(request_id="r", new_token_ids=(97,), finish_reason=FinishReason.LENGTH)
    (output,), _ = processor.process([last])
    assert output.prompt_logprobs is None
