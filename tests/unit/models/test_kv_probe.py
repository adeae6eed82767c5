"""The KV layout is learnt by watching a forward pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sensorium.models.hf_model import HfModel
from sensorium.models.loading import load_config, load_model
from sensorium.models.probes import KVProbe
from sensorium.types.errors import ModelError


def load(directory: str) -> HfModel:
    cpu = torch.device("cpu")
    return load_model(directory, load_config(directory), dtype=torch.float32, device=cpu)


def attend(
    probe: KVProbe, layer_index: int, key: torch.Tensor, value: torch.Tensor | None = None
) -> torch.Tensor:
    query = torch.ones(1, 6, 2, 8)
    if value is None:
        value = torch.ones(1, key.shape[1], 2, 5)
    return probe.attend(layer_index, query, key, value, scaling=None)


def test_a_layer_is_described_by_the_tensors_it_brings() -> None:
    probe = KVProbe()
    output = attend(probe, 0, torch.ones(1, 3, 2, 8))
    (layer,) = probe.layers
    assert (layer.num_kv_heads, layer.key_dim, layer.value_dim) == (3, 8, 5)
    assert layer.source == 0
    assert output.shape == (1, 2, 6, 5)


def test_layers_that_bring_the_same_tensors_share_them() -> None:
    probe = KVProbe()
    own, other = (
        (torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 5)),
        (torch.ones(1, 3, 2, 8), torch.ones(1, 3, 2, 5)),
    )
    for layer_index, tensors in ((1, other), (0, own), (2, own), (3, other)):
        attend(probe, layer_index, *tensors)
    assert [layer.layer_index for layer in probe.layers] == [0, 1, 2, 3]
    assert [layer.source for layer in probe.layers] == [0, 1, 0, 1]


def test_layers_with_equal_keys_and_other_values_share_nothing() -> None:
    probe = KVProbe()
    key = torch.ones(1, 3, 2, 8)
    for layer_index in range(2):
        attend(probe, layer_index, key)
    assert [layer.source for layer in probe.layers] == [0, 1]


def test_a_layer_that_attends_twice_is_refused() -> None:
    probe = KVProbe()
    attend(probe, 4, torch.ones(1, 3, 2, 8))
    with pytest.raises(ModelError, match="layer 4 attends more than once in a forward pass"):
        attend(probe, 4, torch.ones(1, 3, 2, 8))


def test_a_reused_address_of_freed_keys_shares_nothing() -> None:
    probe = KVProbe()
    for layer_index in range(20):
        attend(probe, layer_index, torch.full((1, 3, 2, 8), 1.0))
    assert all(layer.source == layer.layer_index for layer in probe.layers)


def test_windows_and_heads_of_a_model_are_found(tiny_model: Callable[[str], str]) -> None:
    layers = load(tiny_model("gemma3")).probe_layers()
    assert [layer.window for layer in layers] == [12, None, 12, None]
    assert {(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in layers} == {
        (2, 16, 16)
    }
    assert [layer.source for layer in layers] == [0, 1, 2, 3]


def test_a_model_with_other_kinds_of_layers_is_refused_with_the_counts(
    tiny_model: Callable[[str], str],
) -> None:
    hf_model = load(tiny_model("llama"))
    hf_model.text_config.num_hidden_layers += 1
    with pytest.raises(ModelError, match="LlamaForCausalLM can't be run: 3 of its 4 layers use"):
        hf_model.probe_layers()
