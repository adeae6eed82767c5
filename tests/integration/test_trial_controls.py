"""The trial sees mistakes: each of these, made on purpose, is found in every precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sensorium.engine.assembly.builder as builder
import sensorium.layers.attention.torch_backend as torch_backend
import sensorium.models.families as families
import sensorium.multimodal.placeholders as placeholders
from sensorium import ModelError
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.engine.assembly.trial import TrialRun
from sensorium.models.hf_model import HfModel
from sensorium.types.multimodal import MultiModalFeatureSpec
from tests.integration.test_trial import write_decoder
from tests.support.engine import make_llm

TinyModel = Callable[[str], str]
pytestmark = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
_DIFFERENT = "are not those of the model on its own"


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family code at all, and a trial for every model."""
    monkeypatch.setattr(builder, "KNOWN_MODELS", {})
    monkeypatch.setattr(families, "KNOWN_MODELS", {})


def get_reasons(directory: str, dtype: str) -> dict[str, str]:
    return make_llm(directory, dtype=dtype).input_processor.switched_off.reasons


def test_a_dropped_window_is_found(
    tiny_model: TinyModel, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_decoder(tmp_path / "model", tiny_model, "MistralForCausalLM")
    probe_layers = HfModel.probe_layers

    def drop(hf_model: HfModel) -> Any:
        layers = probe_layers(hf_model)
        assert {layer.window for layer in layers} == {12}
        return tuple(replace(layer, window=None) for layer in layers)

    assert get_reasons(directory, dtype) == {}
    monkeypatch.setattr(HfModel, "probe_layers", drop)
    # The model's own cache, which has the window, would show the mistake before the trial does.
    monkeypatch.setattr(HfModel, "find_context_limit", lambda *_: None)
    with pytest.raises(ModelError, match=_DIFFERENT):
        make_llm(directory, dtype=dtype)


def test_swapped_items_are_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_features = placeholders._make_features

    def swap(*arguments: Any) -> list[MultiModalFeatureSpec]:
        features = make_features(*arguments)
        hashes = [feature.mm_hash for feature in reversed(features)]
        return [replace(f, mm_hash=name) for f, name in zip(features, hashes, strict=True)]

    monkeypatch.setattr(placeholders, "_make_features", swap)
    # Its videos have equally many embeddings, so that only their content distinguishes them.
    switched_off = make_llm(tiny_model("internvl"), dtype=dtype).input_processor.switched_off
    assert _DIFFERENT in switched_off.only_one["video"]
    assert "video" not in switched_off.reasons


def test_plain_positions_instead_of_mrope_are_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore(_: Any, token_ids: Sequence[int], *__: Any) -> Any:
        return torch.arange(len(token_ids)).expand(3, -1), torch.zeros(3, 1, dtype=torch.long)

    monkeypatch.setattr(HfModel, "get_mrope_positions", ignore)
    assert _DIFFERENT in get_reasons(tiny_model("glm4v"), dtype)["image"]


def test_positions_of_answers_that_forget_their_items_are_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of an answer is still right."""
    get_positions = HfModel.get_mrope_positions

    def forget(hf_model: HfModel, *arguments: Any) -> Any:
        return get_positions(hf_model, *arguments)[0], torch.zeros(3, 1, dtype=torch.long)

    monkeypatch.setattr(HfModel, "get_mrope_positions", forget)
    assert _DIFFERENT in get_reasons(tiny_model("glm4v"), dtype)["image"]


def test_stale_blocks_of_a_prefix_are_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is not cached is still right."""
    get_blocks = KVCacheManager._prefix_blocks

    def repeat(*arguments: Any) -> list[int]:
        blocks = get_blocks(*arguments)
        return blocks[:1] * len(blocks)

    monkeypatch.setattr(KVCacheManager, "_prefix_blocks", repeat)
    with pytest.raises(ModelError, match=_DIFFERENT):
        make_llm(tiny_model("llama"), dtype=dtype)


def test_positions_that_begin_anew_in_every_step_are_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is computed in one step is still right."""
    forward = HfModel.forward

    def begin_anew(hf_model: Any, embeds: Any, positions: Any, *rest: Any) -> Any:
        return forward(hf_model, embeds, positions - positions.min(), *rest)

    monkeypatch.setattr(HfModel, "forward", begin_anew)
    with pytest.raises(ModelError, match="a trial of text"):
        make_llm(tiny_model("llama"), dtype=dtype)


def test_encoder_outputs_that_are_overwritten_are_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An item that was just encoded is still right."""
    forget = TrialRun.forget_prefixes

    def overwrite(run: Any) -> None:
        forget(run)
        outputs = run._core.runner.encoder_cache._embeds
        outputs.update({key: embeds.flip(0) for key, embeds in outputs.items()})

    monkeypatch.setattr(TrialRun, "forget_prefixes", overwrite)
    assert _DIFFERENT in get_reasons(tiny_model("internvl"), dtype)["image"]


def test_a_stale_slot_is_found(
    tiny_model: TinyModel, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of new tokens are not stored once a request writes its answer."""
    store = torch_backend.store_new_tokens

    def skip(cache: Any, slots: torch.Tensor, *tensors: Any) -> None:
        if len(slots) > 2:  # of both requests, when they write their answers
            store(cache, slots, *tensors)

    monkeypatch.setattr(torch_backend, "store_new_tokens", skip)
    with pytest.raises(ModelError, match=_DIFFERENT):
        make_llm(tiny_model("llama"), dtype=dtype)
