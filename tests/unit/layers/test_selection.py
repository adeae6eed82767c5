"""The backend is the first that can do it; one that was asked for is never replaced."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sensorium.layers.attention import ATTENTION_BACKENDS, selection
from sensorium.layers.attention.backend import StepLayout
from sensorium.layers.attention.flashinfer_backend import FlashInferAttention
from sensorium.layers.attention.selection import choose_attention, find_fault
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.attention.varlen_backend import VarlenAttention
from sensorium.layers.kv_layout import LayerSpec
from sensorium.types.errors import ModelError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def layer(dim: int, *, value_dim: int | None = None, window: int | None = None) -> LayerSpec:
    return LayerSpec(
        layer_index=0,
        num_kv_heads=2,
        key_dim=dim,
        value_dim=dim if value_dim is None else value_dim,
        window=window,
        source=0,
    )


def choose(name: str, layers: Sequence[LayerSpec], **changes: Any) -> Any:
    values = {"block_size": 16, "dtype": torch.float32, "device": CPU}
    return choose_attention(name, layers=layers, **{**values, **changes})


class FakeAttention(TorchPagedAttention):
    name = "flashinfer"
    factor = 1.0

    def __init__(self, *, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        del device
        super().__init__(block_size=block_size, dtype=dtype)

    @staticmethod
    def find_obstacle(*_: Any) -> None:
        """Return that nothing stands in the way."""

    def attend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return super().attend(*arguments, **options) * self.factor


class WrongAttention(FakeAttention):
    factor = 1.5


class NanAttention(FakeAttention):
    factor = float("nan")


class BrokenAttention(FakeAttention):
    def prepare(self, layout: StepLayout) -> None:
        del layout
        raise OSError("no compiler")


def pretend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Let `backend` take the place of FlashInfer."""
    monkeypatch.setitem(selection._CANDIDATES, "flashinfer", backend)


def test_a_cpu_gets_the_gather_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose("auto", [layer(64)]).name == "torch"
    assert "not flashinfer: it needs a CUDA device" in caplog.text
    assert "not varlen: it needs a CUDA device" in caplog.text


def test_every_name_but_auto_is_a_backend() -> None:
    assert set(ATTENTION_BACKENDS) == {"auto", "torch", *selection._CANDIDATES}


@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_a_backend_that_was_asked_for_is_not_replaced(name: str) -> None:
    with pytest.raises(ModelError, match=f"attention_backend='{name}' can't be used.*CUDA"):
        choose(name, [layer(64)])


@pytest.mark.parametrize("backend", [FlashInferAttention, VarlenAttention])
@pytest.mark.parametrize(
    ("spec", "dtype", "reason"),
    [
        (layer(64), torch.float32, "float16 and bfloat16, not float32"),
        (layer(128, value_dim=64), torch.bfloat16, "keys of size 128 with values of size 64"),
        (layer(20), torch.bfloat16, "head sizes may be .*, not 20"),
    ],
)
def test_what_kernels_lack_is_named(
    backend: Any, spec: LayerSpec, dtype: torch.dtype, reason: str
) -> None:
    obstacle = backend.find_obstacle([layer(64), spec], dtype, CUDA)
    assert re.search(reason, obstacle)


def test_a_backend_that_passes_its_trial_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, FakeAttention)
    layers = [layer(8), layer(16, window=4)]
    assert isinstance(choose("auto", layers), FakeAttention)
    assert isinstance(choose("flashinfer", layers, block_size=1), FakeAttention)


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (WrongAttention, "wrong numbers: heads of size 8, window 4: off by"),
        (NanAttention, "wrong numbers: heads of size 8, window 4: off by nan"),
        (BrokenAttention, "a trial failed: OSError: no compiler"),
    ],
)
def test_a_backend_that_fails_its_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: Any, reason: str
) -> None:
    pretend(monkeypatch, backend)
    with caplog.at_level(logging.INFO):
        assert choose("auto", [layer(8, window=4)]).name == "torch"
    assert reason in caplog.text
    with pytest.raises(ModelError, match=reason):
        choose("flashinfer", [layer(8, window=4)])


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_the_gather_passes_the_trial_at_every_block_size(block_size: int) -> None:
    attention = TorchPagedAttention(block_size=block_size, dtype=torch.float32)
    layers = [layer(8), layer(16, value_dim=8, window=4)]
    fault = find_fault(attention, layers, block_size=block_size, dtype=torch.float32, device=CPU)
    assert fault is None
