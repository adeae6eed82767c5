from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.types.errors import RequestError
from sensorium.types.multimodal import (
    MultiModalFeatureSpec,
    PlaceholderRange,
    get_mm_features_in_window,
)

T, F = True, False
masks = st.lists(st.booleans(), min_size=1, max_size=12)


def make_features(*ranges: tuple[int, int]) -> list[MultiModalFeatureSpec]:
    """Make features of items at `[offset, end)`."""
    return [
        MultiModalFeatureSpec(
            modality="image",
            mm_hash=f"item {index}",
            mm_position=PlaceholderRange(offset, end - offset),
        )
        for index, (offset, end) in enumerate(ranges)
    ]


def test_without_a_mask_every_position_takes_an_embedding() -> None:
    place = PlaceholderRange(7, 4)
    assert place.end == 11
    assert place.get_num_embeds() == 4
    assert place.embeds_cumsum is None
    assert place.get_embeds_indices_in_range(1, 3) == (1, 3)
    assert place.extract_embeds_range() == [(7, 11)]


def test_mask_says_which_positions_take_one() -> None:
    place = PlaceholderRange(10, 6, (F, T, T, F, T, F))
    assert place.get_num_embeds() == 3
    assert place.embeds_cumsum == [0, 1, 2, 2, 3, 3]
    assert place.extract_embeds_range() == [(11, 13), (14, 15)]


def test_empty_mask_means_no_embeddings_at_all() -> None:
    place = PlaceholderRange(3, 5, ())
    assert place.get_num_embeds() == 0
    assert place.get_embeds_indices_in_range(0, 5) == (0, 0)
    assert place.get_embeds_indices_in_range(2, 4) == (0, 0)
    assert place.extract_embeds_range() == []


def test_mask_without_a_true_entry_means_no_embeddings() -> None:
    place = PlaceholderRange(3, 2, (F, F))
    assert place.get_num_embeds() == 0
    assert place.extract_embeds_range() == []


def test_range_that_ends_at_zero_holds_nothing() -> None:
    assert PlaceholderRange(0, 3, (T, T, T)).get_embeds_indices_in_range(0, 0) == (0, 0)
    assert PlaceholderRange(0, 3, (F, T, T)).get_embeds_indices_in_range(0, 0) == (0, 0)
    assert PlaceholderRange(0, 3).get_embeds_indices_in_range(0, 0) == (0, 0)


@given(mask=masks, data=st.data())
def test_embeddings_of_a_part_are_counted_one_by_one(mask: list[bool], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(mask)))
    end = data.draw(st.integers(start, len(mask)))
    place = PlaceholderRange(5, len(mask), tuple(mask))
    assert place.get_num_embeds() == sum(mask)
    assert place.get_embeds_indices_in_range(start, end) == (sum(mask[:start]), sum(mask[:end]))


@given(mask=masks, offset=st.integers(0, 9))
def test_spans_hold_exactly_the_embedding_positions(mask: list[bool], offset: int) -> None:
    spans = PlaceholderRange(offset, len(mask), tuple(mask)).extract_embeds_range()
    covered = [position for start, end in spans for position in range(start, end)]
    assert covered == [offset + i for i, is_embed in enumerate(mask) if is_embed]
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_zero_positions_have_no_span() -> None:
    assert PlaceholderRange(4, 0).extract_embeds_range() == []
    assert PlaceholderRange(4, 0).get_num_embeds() == 0


def test_equal_ranges_have_equal_hashes_whatever_the_mask_was_given_as() -> None:
    as_tuple = PlaceholderRange(1, 3, (T, F, T))
    as_list = PlaceholderRange(1, 3, [True, False, True])  # type: ignore[arg-type]
    as_numbers = PlaceholderRange(1, 3, [1, 0, 1])  # type: ignore[arg-type]
    assert as_tuple == as_list == as_numbers
    assert hash(as_tuple) == hash(as_list) == hash(as_numbers)
    assert as_list.is_embed == (T, F, T)


def test_ranges_with_different_masks_differ() -> None:
    assert PlaceholderRange(1, 3, (T, T, T)) != PlaceholderRange(1, 3, (T, F, T))
    assert PlaceholderRange(1, 3) != PlaceholderRange(1, 3, (T, T, T))
    assert PlaceholderRange(1, 3) != PlaceholderRange(2, 3)


def test_repr_shows_no_derived_fields() -> None:
    assert repr(PlaceholderRange(1, 2)) == "PlaceholderRange(offset=1, length=2, is_embed=None)"


@pytest.mark.parametrize(("offset", "length"), [(-1, 3), (0, -1)])
def test_negative_range_is_refused(offset: int, length: int) -> None:
    with pytest.raises(RequestError, match=f"not {offset} and {length}"):
        PlaceholderRange(offset, length)


def test_mask_of_another_length_is_refused() -> None:
    with pytest.raises(RequestError, match="2 entries for a placeholder of 3 positions"):
        PlaceholderRange(0, 3, (T, F))


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 2, (0, 0)),  # before the first
        (0, 3, (0, 1)),  # its first position
        (4, 5, (0, 1)),  # its last position
        (5, 6, (1, 1)),  # just behind it
        (5, 8, (1, 2)),
        (4, 9, (0, 3)),  # a part of each
        (8, 10, (2, 3)),
        (10, 99, (3, 3)),  # behind the last
        (0, 99, (0, 3)),
        (4, 4, (0, 1)),  # an empty window inside an item
        (6, 6, (1, 1)),  # and between items
    ],
)
def test_window_holds_the_items_that_overlap_it(
    start: int, end: int, expected: tuple[int, int]
) -> None:
    features = make_features((2, 5), (6, 8), (8, 10))
    assert get_mm_features_in_window(features, start, end) == expected


def test_without_items_the_window_is_empty() -> None:
    assert get_mm_features_in_window([], 0, 10) == (0, 0)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=8),
    start=st.integers(0, 40),
    length=st.integers(1, 12),
)
def test_window_agrees_with_looking_at_every_item(
    sizes: list[tuple[int, int]], start: int, length: int
) -> None:
    ranges = []
    position = 0
    for gap, size in sizes:
        ranges.append((position + gap, position + gap + size))
        position += gap + size
    lo, hi = get_mm_features_in_window(make_features(*ranges), start, start + length)
    overlapping = [i for i, (a, b) in enumerate(ranges) if a < start + length and b > start]
    assert list(range(lo, hi)) == overlapping


def test_encoder_decoder_window_begins_with_the_first_item() -> None:
    features = make_features((0, 1500), (0, 1500))
    assert get_mm_features_in_window(features, 0, 1, is_encoder_decoder=True) == (0, 2)
    assert get_mm_features_in_window(features, 9999, 10000, is_encoder_decoder=True) == (0, 2)
