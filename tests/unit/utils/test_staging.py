"""Arrays arrive on the device as they were, through one buffer that grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sensorium.utils.arrays import StagingBuffer

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_buffer(num_words: int = 64, device: str = "cpu") -> StagingBuffer:
    return StagingBuffer(device=torch.device(device), num_words=num_words)


def test_shapes_types_and_values_survive() -> None:
    arrays = {
        "vector": np.array([3, -1, 2**62], dtype=np.int64),
        "floats": np.array([0.1, -1e300, np.inf]),
        "matrix": np.arange(6, dtype=np.int64).reshape(2, 3),
        "empty": np.empty(0, dtype=np.int64),
    }
    tensors = make_buffer().upload(arrays)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].shape == array.shape
        assert np.array_equal(tensors[name].numpy(), array)
    assert tensors["vector"].dtype == torch.int64
    assert tensors["floats"].dtype == torch.float64


def test_an_array_that_is_not_contiguous_arrives_in_its_own_order() -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2]
    assert np.array_equal(make_buffer().upload({"a": array})["a"].numpy(), array)


def test_tensors_of_one_upload_share_the_buffer_without_overlap() -> None:
    tensors = make_buffer().upload({"a": np.ones(3, dtype=np.int64), "b": np.zeros(2)})
    assert tensors["a"].untyped_storage().data_ptr() == tensors["b"].untyped_storage().data_ptr()
    tensors["a"].fill_(7)
    assert tensors["b"].tolist() == [0.0, 0.0]


def test_a_small_buffer_grows_to_what_a_step_needs_and_is_then_kept() -> None:
    buffer = make_buffer(num_words=2)
    large = np.arange(100, dtype=np.int64)
    first = buffer.upload({"a": large})["a"]
    assert first.tolist() == large.tolist()
    again = buffer.upload({"a": large + 1})["a"]
    assert again.tolist() == (large + 1).tolist()
    assert again.data_ptr() == first.data_ptr()


@pytest.mark.gpu
@needs_cuda
def test_an_upload_waits_until_the_one_before_it_has_been_copied() -> None:
    buffer = make_buffer(num_words=1 << 20, device="cuda")
    size = 1 << 20
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # the device is busy while the host continues
    first = buffer.upload({"a": np.full(size, 1, dtype=np.int64)})["a"].clone()
    buffer.upload({"a": np.full(size, 2, dtype=np.int64)})
    assert bool((first == 1).all())
