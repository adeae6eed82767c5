"""Copies to a device keep the values and don't wait."""

from __future__ import annotations

import pytest
import torch

from sensorium.utils.to_device import to_device


def test_on_a_cpu_a_tensor_stays_as_it_is() -> None:
    tensor = torch.arange(5)
    assert to_device(tensor, torch.device("cpu")) is tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_to_a_gpu_do_not_wait_and_are_not_overwritten() -> None:
    device = torch.device("cuda")
    to_device(torch.arange(4096), device)  # first uses
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = [to_device(torch.full((4096,), index), device) for index in range(64)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for index, copy in enumerate(copies):
        assert copy.eq(index).all()
