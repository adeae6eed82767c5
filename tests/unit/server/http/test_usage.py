"""The counts of tokens in `usage`, of outputs and of answers that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from sensorium.server.http.protocol.answers import PromptTokensDetails
from sensorium.server.http.protocol.tokens import WireUsage
from sensorium.server.http.usage import count_usage, make_usage, sum_details
from sensorium.types.outputs import RequestOutput

NAMES = ("cached_tokens", "image_tokens", "audio_tokens", "video_tokens")


def make_output(num_tokens: int, mm_tokens: Mapping[str, int], num_cached: int) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(1,) * num_tokens,
        outputs=(),
        finished=True,
        num_cached_tokens=num_cached,
        mm_tokens=mm_tokens,
    )


def get_details(details: PromptTokensDetails | None) -> Any:
    return msgspec.to_builtins(details)


def test_counts_of_all_prompts_are_added() -> None:
    outputs = (
        make_output(20, {"image": 7, "audio": 2}, 16),
        make_output(10, {"image": 3, "video": 4}, 0),
        make_output(5, {}, 1),
    )
    usage = make_usage(outputs)
    assert usage.prompt_tokens == 35
    assert get_details(usage.prompt_tokens_details) == dict(zip(NAMES, (17, 10, 2, 4), strict=True))


def test_modalities_without_media_have_0() -> None:
    details = make_usage([make_output(5, {}, 0)]).prompt_tokens_details
    assert get_details(details) == dict.fromkeys(NAMES, 0)


def test_details_that_are_not_known_are_null() -> None:
    assert msgspec.to_builtins(count_usage(3, 4)) == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": None,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([{"cached_tokens": 1, "image_tokens": 2}], {"cached_tokens": 1, "image_tokens": 2}),
        ([dict.fromkeys(NAMES, 3), dict.fromkeys(NAMES, 4)], dict.fromkeys(NAMES, 7)),
        ([{"cached_tokens": 1, "audio_tokens": 5}, {"audio_tokens": 6}], {"audio_tokens": 11}),
        ([{"image_tokens": 0}, {"image_tokens": 0}], {"image_tokens": 0}),
        ([{"image_tokens": 1}, None], None),
        ([{"image_tokens": -1, "audio_tokens": True, "video_tokens": "3"}], None),
        ([{"image_tokens": 2**53, "cached_tokens": 1.5, "text_tokens": 7}], None),
        ([{}], None),
        ([None], None),
    ],
)
def test_a_count_is_kept_if_all_answers_have_it(given: list[Any], expected: Any) -> None:
    usages = [WireUsage(prompt_tokens_details=details) for details in given]
    assert get_details(sum_details(usages)) == expected


def test_answers_without_usage_have_no_details() -> None:
    assert sum_details([None]) is None
    assert sum_details([WireUsage(prompt_tokens_details={"image_tokens": 3}), None]) is None


def test_the_schema_says_what_is_counted() -> None:
    _, components = msgspec.json.schema_components([PromptTokensDetails])
    schema = components["PromptTokensDetails"]
    assert tuple(schema["properties"]) == NAMES
    assert "positions of the prompt that take embeddings" in schema["description"]
