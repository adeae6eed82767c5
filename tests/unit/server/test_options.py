"""The options of a server: they cross processes, and decide what these share."""

from __future__ import annotations

import msgspec
import pytest

from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.multimodal.media import MediaLimits
from sensorium.server.options import ServeOptions
from sensorium.types.errors import RequestError


def test_all_options_survive_the_way_to_another_process() -> None:
    options = ServeOptions(
        loading=LoadingOptions(model="m", revision="v1"),
        served_model_name=("a", "b"),
        api_server_count=3,
        engine=EngineOptions(limit_mm_per_prompt={"image": 4}, cuda_graph_sizes=[1, 2]),
        media=MediaOptions(
            mm_processor_cache_type="shm",
            allowed_media_domains=["example.com"],
            media_limits=MediaLimits(max_bytes=7),
        ),
    )
    assert msgspec.json.decode(msgspec.json.encode(options), type=ServeOptions) == options


@pytest.mark.parametrize(
    ("media", "capacity_bytes"),
    [
        (MediaOptions(), 0),
        (MediaOptions(mm_processor_cache_type="shm"), 4 * 2**30),
        (MediaOptions(mm_processor_cache_type="shm", mm_processor_cache_gb=0.25), 2**28),
        (MediaOptions(mm_processor_cache_type="shm", mm_processor_cache_gb=0), 0),
        (MediaOptions(mm_processor_cache_gb=2), 0),
    ],
)
def test_the_parent_reserves_what_the_engine_expects(
    media: MediaOptions, capacity_bytes: int
) -> None:
    assert ServeOptions(media=media).shm_capacity_bytes == capacity_bytes
    assert ServeOptions(media=media, is_render_only=True).shm_capacity_bytes == 0


def test_frontends_without_a_common_cache_are_refused() -> None:
    with pytest.raises(RequestError, match="mm_processor_cache_type=shm"):
        ServeOptions(api_server_count=2)
    ServeOptions(api_server_count=2, media=MediaOptions(mm_processor_cache_gb=0))


def test_the_model_has_its_own_name_unless_it_gets_others() -> None:
    loading = LoadingOptions(model="m")
    assert ServeOptions(loading=loading).model_names == ("m",)
    named = ServeOptions(loading=loading, served_model_name=("a", "b"))
    assert (named.model_names, named.model_label) == (("a", "b"), "m as a, b")
