"""The options of a server: they cross processes, and say what is shared between these."""

from __future__ import annotations

import msgspec
import pytest

from sensorium.server.options import (
    ServeOptions,
    make_engine_options,
    make_media_options,
    make_source,
)
from sensorium.types.errors import RequestError


def test_all_of_them_survive_the_way_to_another_process() -> None:
    options = ServeOptions(
        model="m",
        served_model_name=("a", "b"),
        api_server_count=3,
        engine={"limit_mm_per_prompt": {"image": 4}},
        media={"mm_processor_cache_type": "shm", "media_limits": {"max_bytes": 7}},
    )
    assert msgspec.json.decode(msgspec.json.encode(options), type=ServeOptions) == options


def test_the_parts_of_an_engine_are_made_of_them() -> None:
    options = ServeOptions(
        model="m",
        loading={"dtype": "float32", "device": "cpu", "revision": None},
        engine={"max_num_seqs": 3, "limit_mm_per_prompt": {"image": 4}},
        media={"mm_processor_cache_gb": 0.5, "media_limits": {"max_bytes": 7}},
    )
    source = make_source(options, use_tqdm=False)
    assert (source.model, source.dtype, source.use_tqdm_on_load) == ("m", "float32", False)
    assert make_engine_options(options).limit_mm_per_prompt == {"image": 4}
    media = make_media_options(options)
    assert (media.capacity_bytes, media.media_limits.max_bytes) == (2**29, 7)


@pytest.mark.parametrize(
    "media",
    [
        {},
        {"mm_processor_cache_type": "shm"},
        {"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 0.25},
        {"mm_processor_cache_type": "shm", "mm_processor_cache_gb": 0},
        {"mm_processor_cache_gb": 2},
    ],
)
def test_the_parent_reserves_what_the_engine_expects(media: dict[str, object]) -> None:
    options = ServeOptions(model="m", media=media)
    made = make_media_options(options)
    assert options.shm_capacity_bytes == (made.capacity_bytes if made.has_shared_memory else 0)
    assert options.shm_max_object_bytes == made.max_object_bytes
    assert options.has_processor_cache == (made.capacity_bytes > 0)


def test_frontends_without_a_common_cache_are_refused() -> None:
    with pytest.raises(RequestError, match="mm_processor_cache_type=shm"):
        ServeOptions(model="m", api_server_count=2)
    ServeOptions(model="m", api_server_count=2, media={"mm_processor_cache_gb": 0})


def test_the_model_has_its_own_name_unless_it_gets_others() -> None:
    assert ServeOptions(model="m").model_names == ("m",)
    assert ServeOptions(model="m", served_model_name=("a", "b")).model_names == ("a", "b")
