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

import sensorium.engine.assembly.builder as builder
import sensorium.models.families as families
from sensorium import LLM, ModelError, RequestError, SamplingParams
from sensorium.core.request import SchedulerCounters
from sensorium.multimodal.processing.dummy_media import make_dummy_media
from tests.integration.odd_models import (
    make_gemma4_unified,
    make_paligemma,
    make_vibevoice_asr,
    make_vipllava,
)
from tests.parity.cases import MODALITIES, in_turns
from tests.parity.reference import GREEDY, NUM_TOKENS
from tests.support.engine import assert_nothing_is_left, get_token_ids, make_llm
from tiny_models.building import rescale

TinyModel = Callable[[str], str]
DTYPES = {"float32": "float32", "bfloat16": "bfloat16"}
_FAR_OFF = "trial of text with one image the engine's log-probabilities are not"
# Family -> the modality that its own code is needed for, and why a trial without that code fails.
SWITCHED_OFF = {
    "qwen3_vl": ("image", _FAR_OFF),
    "gemma3": ("image", _FAR_OFF),
    "gemma4": ("video", "a trial of text with one video failed"),
    "qwen2_audio": ("audio", "a trial of text with one audio failed"),
    "qwen2_5_omni": ("image", "a trial of text with one image failed"),
}


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No family code at all, and a trial for every model."""
    monkeypatch.setattr(builder, "KNOWN_MODELS", {})
    monkeypatch.setattr(families, "KNOWN_MODELS", {})


def get_figures(caplog: pytest.LogCaptureFixture) -> dict[str, tuple[float, float, float, float]]:
    """By what was tried: the distances overall and at worst, of the engine and of rounding."""
    return {
        record.args[0]: record.args[1:5]  # type: ignore[index,misc]
        for record in caplog.records
        if record.getMessage().startswith("trial of")
    }


@pytest.mark.usefixtures("nothing_is_known")
@pytest.mark.parametrize(
    ("family", "dtype"),
    in_turns(("llama", "internvl", "glm4v", "audioflamingo3", "smolvlm"), DTYPES),
)
def test_a_family_that_needs_no_code_passes(
    tiny_model: TinyModel, family: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="sensorium.engine.assembly.trial"):
        llm = make_llm(tiny_model(family), dtype=dtype)
    tried = get_figures(caplog)
    assert tried.keys() == {"text", *(f"text with {m}" for m in MODALITIES[family])}
    least = {"float32": 1e-4, "bfloat16": 2e-3}[dtype]
    for overall, worst, rounding, worst_rounding in tried.values():
        assert overall <= 1.25 * max(rounding, least)  # half of what is allowed
        assert worst <= 2.5 * max(worst_rounding, least)
    assert llm.input_processor.switched_off.reasons == {}
    assert_no_trace(llm)


def assert_no_trace(llm: LLM) -> None:
    """All that an engine counts and keeps is as if it had never run anything."""
    scheduler = llm.core.scheduler
    statistics = scheduler.encoder_cache.statistics()
    assert (statistics.num_entries, statistics.num_queries, statistics.num_hits) == (0, 0, 0)
    assert scheduler.counters == SchedulerCounters()
    for pool in scheduler.kv_cache.statistics():
        assert (pool.num_used, pool.num_cached, pool.num_evictions) == (0, 0, 0)
    assert llm.core.runner.num_encoder_bytes == 0
    caches = llm.media_parts.caches
    for cache in (caches.sender, caches.readonly):
        counts = cache.statistics()
        assert (counts.num_queries, counts.num_items, counts.num_bytes) == (0, 0, 0)
    assert_nothing_is_left(llm)


@pytest.mark.usefixtures("nothing_is_known")
@pytest.mark.parametrize(("family", "dtype"), in_turns(tuple(SWITCHED_OFF), DTYPES))
def test_a_modality_of_a_family_without_its_code_is_switched_off(
    tiny_model: TinyModel, family: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    modality, message = SWITCHED_OFF[family]
    llm = make_llm(tiny_model(family), dtype=dtype)
    assert message in llm.input_processor.switched_off.reasons[modality]
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [line.startswith(f"{modality} is switched off") for line in lines].count(True) == 1
    assert_no_trace(llm)
    item = make_dummy_media(modality, 16_000)
    marker = llm.input_processor.processor.get_marker(modality)
    prompt: Any = {"prompt": f"{marker}hello", "multi_modal_data": {modality: item}}
    with pytest.raises(
        RequestError, match=f"{modality} is switched off on this server: .*{message}"
    ):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    (output,) = llm.generate("hello world", GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == NUM_TOKENS


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    ("make", "wrong"),
    [(make_gemma4_unified, {"image", "video"}), (make_vibevoice_asr, {"audio"})],
    ids=["gemma4_unified", "vibevoice_asr"],
)
def test_models_of_the_wrong_kind_are_found_in_any_precision(
    make: Callable[[Path], str], wrong: set[str], dtype: str, tmp_path: Path
) -> None:
    """One attends to pictures in both directions, the other draws random numbers."""
    llm = make_llm(make(tmp_path / "model"), dtype=dtype)
    reasons = llm.input_processor.switched_off.reasons
    assert reasons.keys() == wrong
    for reason in reasons.values():
        assert "are not those of the model on its own" in reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_model_of_an_unlisted_type_takes_pictures(dtype: str, tmp_path: Path) -> None:
    llm = make_llm(make_vipllava(tmp_path / "model"), dtype=dtype)
    assert llm.input_processor.allowed_modalities == ("image",)


def test_a_modality_that_no_prompt_may_have_is_not_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_vipllava(tmp_path / "model")
    caplog.set_level(logging.INFO, logger="sensorium.engine.assembly.trial")
    make_llm(directory, limit_mm_per_prompt={"image": 0})
    assert get_figures(caplog).keys() == {"text"}


def test_a_model_without_another_attention_is_compared_with_disturbed_embeddings(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sensorium.engine.assembly.trial")
    directory = Path(write_decoder(tmp_path / "model", tiny_model, "Qwen3ForCausalLM"))
    values = json.loads((directory / "config.json").read_text())
    values["_attn_implementation"] = "eager"
    (directory / "config.json").write_text(json.dumps(values))
    make_llm(str(directory), dtype="bfloat16")
    ((_, worst, _, worst_rounding),) = get_figures(caplog).values()
    assert 0 < worst < 2.5 * worst_rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_whose_two_attentions_disagree_is_refused(dtype: str, tmp_path: Path) -> None:
    """PaliGemma attends to text in both directions by PyTorch's attention, by the eager one not."""
    with pytest.raises(
        ModelError,
        match=r"PaliGemmaForConditionalGeneration can't be run: in a trial of text .*"
        rf"two forms of attention, its log-probabilities differ by 0\.3\d, .* {dtype} explains",
    ):
        make_llm(make_paligemma(tmp_path / "model"), dtype=dtype)


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
