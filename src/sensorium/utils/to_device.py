"""Host-to-device copies that don't make the host wait."""

from __future__ import annotations

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`. To a GPU it goes through pinned memory: a copy from pageable memory
    waits for the device. torch's allocator of pinned memory gives a block out again only after the
    copies that read it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
