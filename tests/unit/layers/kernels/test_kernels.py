"""The kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from sensorium.layers.kernels.decoding import attend_decoding, get_num_splits, store_new_tokens
from sensorium.layers.kernels.fused_layers import add_and_normalize, normalize

# Triton's interpreter does that.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
NUM_BLOCKS = 120


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    seq_lens: list[int],
    window: int | None,
) -> torch.Tensor:
    block_size = keys.shape[1]
    outputs = []
    for row, length in enumerate(seq_lens):
        first = 0 if window is None else max(0, length - window)
        positions = torch.arange(first, length, device=keys.device)
        slots = tables[row, positions // block_size].long() * block_size + positions % block_size
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[row, :, None],
                keys.flatten(0, 1)[slots].transpose(0, 1),
                values.flatten(0, 1)[slots].transpose(0, 1),
                scale=0.3,
                enable_gqa=True,
            )[:, 0]
        )
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size", "window"),
    [
        (4, 2, 16, 16, 16, None),
        (6, 2, 80, 80, 4, None),
        (4, 4, 128, 64, 16, 20),
        (16, 2, 128, 128, 1, None),
        (3, 1, 8, 8, 16, 1),
    ],
)
def test_a_decoding_request_attends_to_its_own_keys(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    torch.manual_seed(0)
    seq_lens = [1, 37, 17]
    keys = torch.randn(NUM_BLOCKS, block_size, num_kv_heads, key_dim, device=device)
    values = torch.randn(NUM_BLOCKS, block_size, num_kv_heads, value_dim, device=device)
    width = -(-max(seq_lens) // block_size)
    tables = (torch.randperm(NUM_BLOCKS - 1)[: 3 * width] + 1).view(3, width).to(device)
    query = torch.randn(3, num_heads, key_dim, device=device)
    expected = _attend(query, keys, values, tables, seq_lens, window)
    # Whatever lies behind a request's last key, it must not be seen.
    for row, length in enumerate(seq_lens):
        if length % block_size:
            keys[tables[row, length // block_size], length % block_size :] = float("nan")
            values[tables[row, length // block_size], length % block_size :] = float("nan")

    found = attend_decoding(
        query.transpose(0, 1).contiguous().transpose(0, 1),  # as the layers give it
        keys,
        values,
        tables.int(),
        torch.tensor(seq_lens, device=device),
        scaling=0.3,
        window=window,
    )

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_keys_are_divided_until_the_device_is_full() -> None:
    assert get_num_splits(2) == 64  # one request with two key heads
    assert get_num_splits(128) == 3
    assert get_num_splits(512) == 1


def test_new_tokens_go_to_their_slots_and_padding_to_none(device: torch.device) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(5, 4, 2, 24), torch.randn(5, 4, 2, 8)
    new_keys = torch.randn(1, 4, 2, 24).transpose(1, 2)  # [1, K, N, D]
    new_values = torch.randn(1, 2, 4, 8)
    slots = torch.tensor([7, -1, 19, 4])
    found = [keys.to(device), values.to(device)]
    store_new_tokens(*found, slots.to(device), new_keys.to(device), new_values.to(device))

    is_stored = slots >= 0
    for cache, new, result in zip((keys, values), (new_keys, new_values), found, strict=True):
        cache.flatten(0, 1)[slots[is_stored]] = new[0].transpose(0, 1)[is_stored]
        assert torch.equal(result.cpu(), cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_normalised_as_two_steps_would(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, added = torch.randn(2, 1, 7, 40, device=device).to(dtype)
    weight = torch.randn(40, device=device).to(dtype)
    total, normalized = add_and_normalize(x, added[..., :40], weight, eps=1e-5)
    torch.testing.assert_close(total, x + added)  # Triton's interpreter rounds in its own way
    assert torch.equal(normalized, normalize(total, weight, eps=1e-5))
    expected = torch.nn.functional.rms_norm(total.float(), (40,), weight.float(), 1e-5)
    torch.testing.assert_close(normalized.float(), expected, rtol=1e-2, atol=1e-2)
