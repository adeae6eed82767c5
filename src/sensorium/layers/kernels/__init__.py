"""Holds our own Triton kernels; import its modules only if `find_obstacle` returns `None`."""

from __future__ import annotations

import importlib.util

import torch


def find_obstacle(device: torch.device) -> str | None:
    """Return why the Triton kernels can't be used on a device, or None if they can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None
