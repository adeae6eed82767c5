"""A model that can't be run is refused in one sentence, before anything is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, PretrainedConfig

from sensorium.models import loading
from sensorium.models.loading import (
    load_config,
    load_model,
    resolve_device,
    resolve_dtype,
)
from sensorium.types.errors import ModelError

CPU = torch.device("cpu")


def test_a_directory_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"there is no config.json in '{tmp_path}'"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["NoSuchModel"]}, "'NoSuchModel' is not an architecture"),
        ({"architectures": None}, "'llama' is not an architecture"),
        (
            {"architectures": ["LlamaForCausalLM"], "is_encoder_decoder": True},
            "LlamaForCausalLM is an encoder-decoder model of an unknown family",
        ),
        ({"architectures": ["LlamaModel"]}, "LlamaModel can't be run: it does not generate"),
    ],
)
def test_an_architecture_that_can_not_be_run_is_refused_before_its_weights_are_read(
    changes: dict[str, Any], message: str
) -> None:
    config = LlamaConfig(**changes)
    with pytest.raises(ModelError, match=message):
        load_model("/nowhere", config, dtype=torch.float32, device=CPU)


def test_a_family_with_code_of_its_own_gets_its_own_wrapper(
    tiny_model: Callable[[str], str],
) -> None:
    for family, modalities in (("gemma3", {"image"}), ("llava", set())):
        directory = tiny_model(family)
        config = load_config(directory)
        hf_model = load_model(directory, config, dtype=torch.float32, device=CPU)
        assert hf_model.bidirectional_modalities == modalities


@pytest.mark.parametrize("device", ["gpu", "cpu:x", ""])
def test_an_unknown_device_is_refused_by_name(device: str) -> None:
    with pytest.raises(ModelError, match=f"unknown device '{device}'"):
        resolve_device(device)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="'cuda' can't be used: torch finds no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto") == CPU


@pytest.mark.parametrize(
    ("asked", "stored", "device", "has_bfloat16", "expected"),
    [
        ("float16", "float32", "cpu", False, torch.float16),
        ("auto", "bfloat16", "cpu", True, torch.bfloat16),
        ("auto", "bfloat16", "cpu", False, torch.float32),
        ("auto", "float16", "cpu", True, torch.float32),
        ("auto", "float16", "cuda", True, torch.float16),
        ("auto", None, "cuda", True, torch.bfloat16),
        ("auto", None, "cpu", True, torch.float32),
    ],
)
def test_dtypes_are_the_checkpoints_where_the_device_is_fast_with_them(
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    stored: str | None,
    device: str,
    has_bfloat16: bool,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(loading, "_has_fast_bfloat16", lambda: has_bfloat16)
    config = PretrainedConfig(dtype=stored)
    assert resolve_dtype(asked, config, torch.device(device)) is expected


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(ModelError, match="unknown dtype 'int4': use auto, float32"):
        resolve_dtype("int4", PretrainedConfig(), CPU)


def test_a_generation_config_that_is_not_json_is_refused(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (directory / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json is not JSON"):
        load_config(str(directory))


def test_a_checkpoint_that_lacks_a_tensor_is_refused_with_its_name(
    tiny_model: Callable[[str], str], tmp_path: Path
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors .* model.layers.1.self_attn.q_proj"):
        load_model(str(directory), load_config(str(directory)), dtype=torch.float32, device=CPU)
