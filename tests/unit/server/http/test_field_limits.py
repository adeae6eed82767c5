"""Lists that are looked through with every token have limits."""

from __future__ import annotations

from typing import Any

import pytest

from sensorium.server.http.bodies.reading import read_request
from sensorium.server.http.protocol.requests import ChatCompletionRequest
from sensorium.types.errors import RequestError


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("stop", ["a"] * 64, ["a"] * 65),
        ("stop", "a" * 1024, "a" * 1025),
        ("bad_words", ["a"] * 64, ["a"] * 65),
        ("stop_token_ids", [1] * 65_536, [1] * 65_537),
        ("allowed_token_ids", [1] * 65_536, [1] * 65_537),
        ("logit_bias", {str(i): 1 for i in range(4096)}, {str(i): 1 for i in range(4097)}),
        ("logit_bias", {"1": 1}, dict.fromkeys(map(str, range(4097)), "no number")),
    ],
)
def test_list_above_its_limit_is_refused_by_name(name: str, allowed: Any, refused: Any) -> None:
    read_request(ChatCompletionRequest, {"messages": [], name: allowed})
    with pytest.raises(RequestError) as caught:
        read_request(ChatCompletionRequest, {"messages": [], name: refused})
    assert caught.value.path[0] == name
