"""Which embeddings stand where, against a walk over every position."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.worker.input_batch import get_gather_slices

from .factories import make_feature


@st.composite
def feature_lists(draw: st.DrawFn) -> tuple[MultiModalFeatureSpec, ...]:
    features = []
    end = 0
    for index in range(draw(st.integers(0, 5))):
        offset = end + draw(st.integers(0, 4))
        length = draw(st.integers(1, 8))
        masks = st.lists(st.booleans(), min_size=length, max_size=length).map(tuple)
        features.append(make_feature(f"h{index}", offset, length, draw(st.none() | masks)))
        end = offset + length
    return tuple(features)


def walk(
    features: tuple[MultiModalFeatureSpec, ...], window_start: int, window_end: int
) -> list[tuple[int, int, int]]:
    """Yield (position, mm_index, which embedding) for each position of the window with one."""
    found = []
    for mm_index, feature in enumerate(features):
        place = feature.mm_position
        num_embeds = 0
        for relative in range(place.length):
            if place.is_embed is not None and not place.is_embed[relative]:
                continue
            position = place.offset + relative
            if window_start <= position < window_end:
                found.append((position, mm_index, num_embeds))
            num_embeds += 1
    return found


@given(features=feature_lists(), start=st.integers(0, 50), length=st.integers(0, 50))
@settings(deadline=None)
def test_slices_are_what_a_walk_over_the_window_finds(
    features: tuple[MultiModalFeatureSpec, ...], start: int, length: int
) -> None:
    found = [
        (int(position), part.mm_index, embed)
        for part in get_gather_slices(features, start, start + length)
        for position, embed in zip(part.positions, range(part.start, part.end), strict=True)
    ]
    assert found == walk(features, start, start + length)


def test_an_item_without_embeddings_in_the_window_asks_for_nothing() -> None:
    feature = make_feature("h", 2, 4, (True, False, False, True))
    assert get_gather_slices([feature], 3, 5) == []
