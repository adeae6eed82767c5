"""Encoder outputs own their memory, so that dropping one frees it."""

from __future__ import annotations

import pytest
import torch

from sensorium.worker.encoder_runner import EncoderCache


def test_a_part_of_a_batch_does_not_keep_the_batch_alive() -> None:
    batch = torch.randn(10, 4)
    cache = EncoderCache()
    for key, part in zip("ab", batch.split([2, 8]), strict=True):
        cache.add(key, part)
    assert cache.num_bytes == batch.numel() * 4
    assert cache["a"].untyped_storage().nbytes() == 2 * 4 * 4
    assert torch.equal(cache["b"], batch[2:])
    batch.zero_()
    assert cache["a"].abs().sum() > 0


def test_a_whole_tensor_is_not_copied() -> None:
    embeds = torch.randn(3, 4)
    cache = EncoderCache()
    cache.add("a", embeds)
    assert cache["a"].data_ptr() == embeds.data_ptr()


def test_rows_with_gaps_between_them_are_stored_without_the_gaps() -> None:
    embeds = torch.randn(4, 8)
    cache = EncoderCache()
    cache.add("a", embeds[:, :2])
    cache.add("b", embeds.T)
    assert cache["a"].is_contiguous()
    assert cache["b"].is_contiguous()
    assert cache.num_bytes == (8 + 32) * 4
    assert torch.equal(cache["b"], embeds.T)


def test_entries_go_when_they_are_dropped_and_unknown_keys_are_passed_over() -> None:
    cache = EncoderCache()
    cache.add("a", torch.zeros(1, 2))
    cache.drop("never added")
    assert "a" in cache
    cache.drop("a")
    assert "a" not in cache
    assert (len(cache), cache.num_bytes) == (0, 0)
    with pytest.raises(KeyError):
        cache["a"]
