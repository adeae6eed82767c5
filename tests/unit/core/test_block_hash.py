from __future__ import annotations

import pytest

from sensorium.core.request import Request, hash_block, hash_root
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams

ROOT = hash_root(None, None)


def make_request(
    token_ids: tuple[int, ...],
    *items: tuple[str, int, int],
    cache_salt: str | None = None,
    lora_id: str | None = None,
) -> Request:
    """Make a request with items given as (mm_hash, offset, length)."""
    features = tuple(
        MultiModalFeatureSpec(
            modality="image", mm_hash=mm_hash, mm_position=PlaceholderRange(offset, length)
        )
        for mm_hash, offset, length in items
    )
    core_request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(),
        mm_features=features,
        cache_salt=cache_salt,
        lora_id=lora_id,
    )
    return Request(core_request, rank=(0, 0), block_size=4)


def test_salt_and_adapter_are_distinguished() -> None:
    roots = {
        hash_root(lora_id, salt)
        for lora_id in (None, "", "a", "ab")
        for salt in (None, "", "b", "a", "ab")
    }
    assert len(roots) == 20


def test_a_salt_with_a_lone_surrogate_has_a_hash() -> None:
    lone = hash_root(None, "\ud800")
    assert lone != hash_root(None, "\ud801")


def test_name_depends_on_everything_before_the_block() -> None:
    assert hash_block(ROOT, [1, 2], []) == hash_block(ROOT, [1, 2], [])
    parent = hash_block(ROOT, [9, 9], [])
    assert hash_block(parent, [1, 2], []) != hash_block(ROOT, [1, 2], [])


@pytest.mark.parametrize(
    ("token_ids", "mm_items"),
    [
        ([1, 3], []),
        ([1], []),
        ([1, 2, 0], []),
        ([1, 2], [("a", 0)]),
        ([1, 2], [("a", 1)]),
        ([1, 2], [("b", 0)]),
        ([1, 2], [("a", -1)]),
        ([1, 2], [("a", 0), ("b", 0)]),
        ([1, 2], [("b", 0), ("a", 0)]),
        ([1, 2], [("ab", 0)]),
        ([2**40 + 1, 2], []),
    ],
)
def test_different_content_has_different_names(
    token_ids: list[int], mm_items: list[tuple[str, int]]
) -> None:
    assert hash_block(ROOT, token_ids, mm_items) != hash_block(ROOT, [1, 2], [])


def test_hashes_of_several_items_are_unambiguous() -> None:
    together = hash_block(ROOT, [1], [("ab", 0)])
    assert together != hash_block(ROOT, [1], [("a", 0), ("b", 0)])
    assert hash_block(ROOT, [1], [("a", 0)]) != hash_block(ROOT, [1, 0], [])


def test_requests_with_the_same_prefix_share_hashes_up_to_the_difference() -> None:
    one = make_request((1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3))
    two = make_request((1, 1, 1, 1, 2, 2, 2, 7, 3, 3, 3, 3))
    assert one.block_hash(0) == two.block_hash(0)
    assert one.block_hash(1) != two.block_hash(1)
    assert one.block_hash(2) != two.block_hash(2)


def test_salt_and_adapter_separate_all_blocks() -> None:
    names = {
        make_request((1,) * 4, cache_salt=salt, lora_id=lora_id).block_hash(0)
        for salt, lora_id in [(None, None), ("x", None), (None, "x"), ("y", None)]
    }
    assert len(names) == 4


def test_item_at_another_place_gives_another_name() -> None:
    tokens = (9, 9, 9, 9)
    names = {make_request(tokens, ("a", offset, 2)).block_hash(0) for offset in (0, 1, 2)}
    assert len(names) == 3


def test_an_item_after_the_block_does_not_change_its_hash() -> None:
    tokens = (1, 1, 1, 1, 9, 9, 9, 9)
    plain, with_item = make_request(tokens), make_request(tokens, ("a", 4, 4))
    assert plain.block_hash(0) == with_item.block_hash(0)
    assert plain.block_hash(1) != with_item.block_hash(1)


def test_another_item_changes_every_block_that_it_reaches() -> None:
    tokens = (1, 9, 9, 9, 9, 9, 9, 9, 9, 1, 1, 1)
    one, two = make_request(tokens, ("a", 1, 8)), make_request(tokens, ("b", 1, 8))
    assert not {one.block_hash(i) for i in range(3)} & {two.block_hash(i) for i in range(3)}


def test_name_of_a_later_block_can_be_asked_first() -> None:
    one, two = make_request((1,) * 8), make_request((1,) * 8)
    late = one.block_hash(1)
    two.block_hash(0)
    assert late == two.block_hash(1)
