"""A model that can't be run is refused with a `ModelError` that names it and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sensorium import LLM, ModelError, SamplingParams

_SIZES: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TinyModel = Callable[[str], str]


def write_config(directory: Path, **values: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return str(directory)


def write_model(directory: Path, architecture: str, tokenizer: str, **changes: object) -> str:
    """A random model of the architecture with all that belongs to it."""
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**_SIZES, **changes})
    torch.manual_seed(0)
    model_class(config).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    return str(directory)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ModelError, match=f"'{path}'"):
            LLM(str(path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "architectures": ["NoSuchLM"]},
            "'NoSuchLM' is not an architecture of",
        ),
        ({"model_type": "nonesuch", "architectures": ["NoSuchLM"]}, "nonesuch"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
            "T5ForConditionalGeneration is an encoder-decoder model",
        ),
        (
            {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
            "BartForConditionalGeneration is an encoder-decoder model",
        ),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM can't be run: it has linear attention, with a state",
        ),
        (
            {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"]},
            "RwkvForCausalLM .*attention interface",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM .*does not generate",
        ),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "CLIPModel .*does not generate"),
        (
            {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]},
            "Qwen3_5ForConditionalGeneration can't be run: it has linear attention",
        ),
        (
            {"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]},
            "MllamaForConditionalGeneration can't be run: it has cross-attention",
        ),
        (
            {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
            "Llama4ForConditionalGeneration can't be run: it attends in chunks, which no",
        ),
        (
            {
                "model_type": "lfm2",
                "architectures": ["Lfm2ForCausalLM"],
                "num_hidden_layers": 2,
                "layer_types": ["conv", "full_attention"],
            },
            "Lfm2ForCausalLM can't be run: it has convolutions, with a state",
        ),
    ],
)
def test_an_architecture_that_cannot_be_run_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(write_config(tmp_path / "model", **config))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma2ForCausalLM", {"head_dim": 16}, "Gemma2Attention .*softcap"),
        (
            "GptOssForCausalLM",
            {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
            "GptOssAttention .*s_aux",
        ),
    ],
)
def test_a_decoder_that_needs_more_than_plain_attention_is_refused(
    tmp_path: Path,
    tiny_model: TinyModel,
    architecture: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(write_model(tmp_path / "model", architecture, tiny_model("llama"), **changes))


def test_a_decoder_that_passes_no_arguments_on_is_refused(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    with pytest.raises(ModelError, match="Nemotron"):
        LLM(write_model(tmp_path / "model", "NemotronForCausalLM", tiny_model("llama")))


def test_a_head_of_several_layers_is_refused_or_run_right(
    tmp_path: Path, tiny_model: TinyModel
) -> None:
    """BERT's transforms the hidden states before it multiplies them with the vocabulary."""
    directory = write_model(
        tmp_path / "model", "BertLMHeadModel", tiny_model("llama"), is_decoder=True
    )
    prompt = torch.arange(10, 40)[None]
    reference = transformers.BertLMHeadModel.from_pretrained(directory).eval()
    reference.generation_config.eos_token_id = None
    expected = reference.generate(prompt, do_sample=False, max_new_tokens=8)[0, 30:].tolist()
    try:
        llm = LLM(directory, max_model_len=64)
    except ModelError:
        return
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    output = llm.generate(prompt[0].tolist(), params, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == expected


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    directory = write_config(
        tmp_path / "model", model_type="llama", architectures=["LlamaForCausalLM"], **_SIZES
    )
    with pytest.raises(ModelError, match="weights"):
        LLM(directory)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    directory = write_model(tmp_path / "model", "LlamaForCausalLM", tiny_model("llama"))
    for path in tmp_path.glob("model/token*"):
        path.unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        LLM(directory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be an integer >= 1, not 0"),
        ({"max_model_len": 10**6}, "max_model_len=1000000 is more than the model's context"),
        ({"max_num_seqs": "many"}, "max_num_seqs .*'many'"),
        ({"block_size": 0}, "block_size must be an integer >= 1, not 0"),
        ({"scheduling_policy": "random"}, "scheduling_policy .*'random'"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes is 100"),
        ({"kv_cache_memory_bytes": 100_000, "max_model_len": 4096}, "the KV cache holds 112"),
        ({"dtype": "int3"}, "dtype must be auto, float32, bfloat16 or float16, not 'int3'"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tiny_model: TinyModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(tiny_model("llama"), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tiny_model: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"'cuda' .*no CUDA device"):
        LLM(tiny_model("llama"), device="cuda")
