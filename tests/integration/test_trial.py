"""Models of unknown types run if a trial agrees with the model on its own, or are refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import sensorium.engine.builder as builder
import sensorium.models.loading as loading
from sensorium import ModelError, SamplingParams
from tests.parity.cases import MODALITIES
from tests.parity.driver import assert_nothing_is_left, get_token_ids, make_llm
from tests.parity.reference import GREEDY
from tiny_models.building import rescale

TinyModel = Callable[[str], str]


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family code at all, and a trial for every model."""
    monkeypatch.setattr(builder, "ADAPTERS", {})
    monkeypatch.setattr(loading, "ADAPTERS", {})


@pytest.mark.usefixtures("nothing_is_known")
@pytest.mark.parametrize("family", ["llama", "internvl", "glm4v", "audioflamingo3", "smolvlm"])
def test_a_family_that_needs_no_code_passes(
    tiny_model: TinyModel, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="sensorium.engine.trial"):
        llm = make_llm(tiny_model(family))
    tried = [record.getMessage() for record in caplog.records if "trial of" in record.getMessage()]
    assert len(tried) == 1 + len(MODALITIES[family])
    statistics = llm.core.scheduler.encoder_cache.statistics()
    assert (statistics.num_entries, statistics.num_used_embeds) == (0, 0)
    assert_nothing_is_left(llm)


@pytest.mark.usefixtures("nothing_is_known")
@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_vl", "trial of text with image the model on its own computed something else"),
        ("gemma3", "trial of text with image the model on its own computed something else"),
        ("gemma4", "a trial of text with image failed"),
        ("qwen2_audio", "a trial of text with audio failed"),
        ("qwen2_5_omni", "a trial of text with image failed"),
    ],
)
def test_a_family_without_its_code_is_refused(
    tiny_model: TinyModel, family: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        make_llm(tiny_model(family))


def test_a_mask_that_is_not_known_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """PaliGemma attends to its whole prompt in both directions."""
    llava = tf.AutoProcessor.from_pretrained(tiny_model("llava"))
    tokenizer = llava.tokenizer
    text = {
        "vocab_size": len(tokenizer) + 1100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    vision = {**text, "image_size": 56, "patch_size": 14, "vision_use_head": False}
    tokenizer.add_tokens([f"<loc{index:04}>" for index in range(4)])
    image_processor = tf.SiglipImageProcessor(size={"height": 56, "width": 56})
    image_processor.image_seq_length = 16
    processor = tf.PaliGemmaProcessor(image_processor, tokenizer)
    config = tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **text},
        vision_config=vision,
        image_token_id=processor.image_token_id,
        projection_dim=32,
    )
    torch.manual_seed(0)
    model = tf.PaliGemmaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    with pytest.raises(
        ModelError, match=r"PaliGemmaForConditionalGeneration can't be run: .*trial"
    ):
        make_llm(str(tmp_path / "model"))


def write_decoder(directory: Path, tiny_model: TinyModel, architecture: str) -> str:
    model_class = getattr(tf, architecture)
    sizes: dict[str, Any] = {
        "vocab_size": 440,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "MistralForCausalLM":
        sizes["sliding_window"] = 12
    torch.manual_seed(0)
    rescale(model_class(model_class.config_class(**sizes))).save_pretrained(directory)
    tf.AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM", "PhiForCausalLM"]
)
def test_decoders_of_other_types_run_and_equal_generate(
    tiny_model: TinyModel, tmp_path: Path, architecture: str
) -> None:
    directory = write_decoder(tmp_path / "model", tiny_model, architecture)
    reference = getattr(tf, architecture).from_pretrained(directory).eval()
    reference.generation_config.eos_token_id = None
    prompts = [list(range(3, 40)), list(range(60, 64)), list(range(100, 170))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = make_llm(directory, max_num_batched_tokens=16)
    for output, prompt in zip(llm.generate(prompts, params, use_tqdm=False), prompts, strict=True):
        theirs = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        assert list(output.outputs[0].token_ids) == theirs[0, len(prompt) :].tolist()


def test_the_thinker_is_taken_from_a_whole_omni_checkpoint(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    thinker = Path(tiny_model("qwen2_5_omni"))
    whole = shutil.copytree(thinker, tmp_path / "omni")
    weights = {f"thinker.{k}": v for k, v in load_file(thinker / "model.safetensors").items()}
    weights["talker.model.norm.weight"] = torch.ones(4)
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen2_5_omni",
        "architectures": ["Qwen2_5OmniModel"],
        "thinker_config": json.loads((thinker / "config.json").read_text()),
    }
    (whole / "config.json").write_text(json.dumps(config))
    outputs = [
        get_token_ids(make_llm(str(path)).generate("hello world", GREEDY, use_tqdm=False))
        for path in (thinker, whole)
    ]
    assert outputs[0] == outputs[1]
