"""What a server says of itself when it starts."""

from __future__ import annotations

from typing import Any

import pytest

from sensorium.engine.assembly.options import MediaOptions
from sensorium.server.logs import describe_media, format_rows
from sensorium.server.options import ServeOptions


def test_values_of_the_announcement_are_aligned() -> None:
    assert format_rows([("model", "m"), ("KV cache", "9")]) == "  model     m\n  KV cache  9"


@pytest.mark.parametrize(
    ("media", "count", "expected"),
    [
        ({}, 1, ["4 GiB, lru, next to the engine", "1", "in the frontend's own process"]),
        ({"mm_processor_cache_gb": 0}, 1, ["off", "1", "in the frontend's own process"]),
        (
            {"mm_processor_cache_type": "shm", "mm_processor_pool_size": 2},
            3,
            ["4 GiB, in shared memory", "3", "2 processes each"],
        ),
    ],
)
def test_caches_and_processes_are_announced(
    media: dict[str, Any], count: int, expected: list[str]
) -> None:
    options = ServeOptions(api_server_count=count, media=MediaOptions(**media))
    assert [value for _, value in describe_media(options)] == expected
