"""What the user says of media is checked at the start, not when the first item comes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sensorium.engine.assembly.options import MediaOptions
from sensorium.multimodal.media import MediaLimits
from sensorium.types.errors import ModelError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mm_processor_cache_gb", math.nan),
        ("mm_processor_cache_gb", math.inf),
        ("mm_processor_cache_gb", -1),
        ("mm_processor_pool_size", 10**6),
        ("mm_processor_pool_size", 1.0),
        ("mm_shm_cache_max_object_size_mb", 10**30),
        ("allowed_media_domains", "example.com"),
        ("allowed_media_domains", [1]),
        ("allowed_local_media_path", 3),
        ("media_limits", None),
        ("enable_mm_embeds", "yes"),
    ],
)
def test_an_impossible_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        MediaOptions(**{name: value})


def test_an_empty_path_does_not_open_the_working_directory() -> None:
    with pytest.raises(ModelError, match="allowed_local_media_path"):
        MediaOptions(allowed_local_media_path="")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_bytes", 0),
        ("max_pixels", -1),
        ("max_frames", 1.5),
        ("max_process_bytes", 2**63),
        ("max_redirects", -1),
        ("deadline_s", math.nan),
        ("deadline_s", math.inf),
        ("max_edge", 0),
        ("max_decoded_pixels", 0.5),
        ("process_deadline_s", 0),
        ("process_wait_s", math.inf),
        ("max_duration_s", "long"),
    ],
)
def test_an_impossible_limit_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        MediaLimits(**{name: value})
