"""Decoders that declare in ways of their own what their layers attend to.

They run like `generate`, or are refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from sensorium import ModelError, SamplingParams
from tests.support.engine import assert_nothing_is_left, make_llm
from tiny_models.building import rescale

TinyModel = Callable[[str], str]
_NUM_TOKENS = 12
_WINDOW = 48  # more than a trial at start has tokens
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_BORDER = 24
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 13.0, 21.0, 34.0, 55.0],
    "original_max_position_embeddings": _BORDER,
}


def write_decoder(directory: Path, tiny_model: TinyModel, architecture: str, **changes: Any) -> str:
    sizes: dict[str, Any] = {
        "vocab_size": 440,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model_class = getattr(tf, architecture)
    torch.manual_seed(0)
    config = model_class.config_class(**{**sizes, **changes})
    rescale(model_class(config)).save_pretrained(directory)
    tf.AutoTokenizer.from_pretrained(tiny_model("llama")).save_pretrained(directory)
    return str(directory)


def make_prompts(*lengths: int) -> list[list[int]]:
    """Some begin alike, so that they have cached prefixes in common."""
    generator = torch.Generator().manual_seed(0)
    stem = torch.randint(3, 400, (max(lengths),), generator=generator).tolist()
    others = [torch.randint(3, 400, (length,), generator=generator).tolist() for length in lengths]
    return [*(stem[:length] for length in lengths), *others]


def assert_equal_to_generate(
    directory: str,
    architecture: str,
    prompts: list[list[int]],
    *,
    use_cache: bool = True,
    **options: Any,
) -> None:
    """Compare alone, together in chunks, and once more from the prefix cache.

    `use_cache`: whether Transformers keeps keys and values.
    """
    reference = getattr(tf, architecture).from_pretrained(directory).eval()
    reference.generation_config.eos_token_id = None
    greedy = {"do_sample": False, "max_new_tokens": _NUM_TOKENS, "use_cache": use_cache}
    expected = [
        reference.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    params = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    llm = make_llm(directory, **{"max_model_len": None, "block_size": 4, **options})
    assert get_tokens(llm.generate(prompts[:1], params, use_tqdm=False)) == expected[:1]
    llm = make_llm(
        directory,
        **{"max_model_len": None, "block_size": 4, "max_num_batched_tokens": 16, **options},
    )
    assert get_tokens(llm.generate(prompts, params, use_tqdm=False)) == expected
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert get_tokens(outputs) == expected
    assert any(output.num_cached_tokens for output in outputs)
    assert_nothing_is_left(llm)


def get_tokens(outputs: Any) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        (
            "PhimoeForCausalLM",
            {"sliding_window": _WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
            [_WINDOW],
        ),
        (
            "Qwen2MoeForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": _WINDOW,
                "max_window_layers": 4,
                "num_experts": 4,
                "shared_expert_intermediate_size": 32,
                **_EXPERTS,
            },
            [None, _WINDOW],
        ),
    ],
)
def test_a_window_that_only_the_mask_has_is_found(
    tiny_model: TinyModel,
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    windows: list[int | None],
) -> None:
    directory = write_decoder(tmp_path / "model", tiny_model, architecture, **changes)
    assert_equal_to_generate(directory, architecture, make_prompts(40, 5, 100, 61))
    assert [group.window for group in make_llm(directory, max_model_len=128).config.groups] == (
        windows
    )


@pytest.mark.parametrize("architecture", ["MoshiForCausalLM"])
def test_a_window_that_only_the_cache_has_ends_the_context(
    tiny_model: TinyModel, tmp_path: Path, architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In `generate` its prompts see everything, and its answers the last tokens only."""
    directory = write_decoder(
        tmp_path / "model", tiny_model, architecture, sliding_window=96, ffn_dim=64
    )
    reason = "because the model's own cache keeps 96 tokens of layer 0, but its mask has no such"
    with pytest.raises(ModelError, match=f"max_model_len=97 is more than the 96 tokens .*{reason}"):
        make_llm(directory, max_model_len=97)
    with caplog.at_level(logging.WARNING, logger="sensorium.engine.assembly.config"):
        assert make_llm(directory, max_model_len=None).config.limits.max_model_len == 96
    assert f"the context ends at 96 tokens, {reason}" in caplog.text
    assert_equal_to_generate(directory, architecture, make_prompts(84, 5, 30, 17))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "DiffLlamaForCausalLM",
            {},
            "DiffLlamaForCausalLM can't be run: layer 0 attends more than once in a forward pass",
        ),
        (
            "DogeForCausalLM",
            {},
            r"DogeForCausalLM can't be run: the attention mask of DogeAttention \(layer 0\) "
            "is made or changed by the layer itself",
        ),
        (
            "BertLMHeadModel",
            {"is_decoder": False},
            r"BertLMHeadModel can't be run: the attention mask of BertSelfAttention \(layer 0\) "
            "lets tokens attend to later ones",
        ),
    ],
)
def test_unsupported_attention_is_refused(
    tiny_model: TinyModel, tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    directory = write_decoder(tmp_path / "model", tiny_model, architecture, **changes)
    with pytest.raises(ModelError, match=message):
        make_llm(directory, max_model_len=64)


@pytest.mark.parametrize(
    "architecture",
    ["Phi3ForCausalLM", pytest.param("PhimoeForCausalLM", marks=pytest.mark.slow)],
)
def test_rotary_factors_follow_the_length_of_each_request(
    tiny_model: TinyModel, tmp_path: Path, architecture: str
) -> None:
    """Prompts before, at and beyond the border; some cross it with their first tokens."""
    changes: dict[str, Any] = {"original_max_position_embeddings": _BORDER}
    if architecture == "PhimoeForCausalLM":
        scales = {"short_mscale": 1.1, "long_mscale": 1.4}
        changes = {
            "rope_parameters": {**_LONG_ROPE, **scales},
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
    else:
        changes["rope_parameters"] = _LONG_ROPE
    directory = write_decoder(tmp_path / "model", tiny_model, architecture, **changes)
    lengths = (_BORDER, _BORDER - 1, _BORDER + 1, _BORDER - _NUM_TOKENS, 5, 60, 20, 90)
    assert_equal_to_generate(directory, architecture, make_prompts(*lengths))


def test_rotary_factors_of_phi_4_multimodal_follow_the_length_of_each_request(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The reference runs without a cache, because only then it is right.

    Where a sequence crosses the border its `generate` drops all keys, but hands on the last token
    only (seen with Transformers 5.22).
    """
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    audio = ("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels")
    directory = write_decoder(
        tmp_path / "model",
        tiny_model,
        "Phi4MultimodalForCausalLM",
        original_max_position_embeddings=_BORDER,
        rope_parameters=_LONG_ROPE,
        vision_config={**tower, "num_hidden_layers": 2, "crop_size": 56, "image_token_id": 430},
        audio_config={
            **tower,
            "num_blocks": 1,
            "audio_token_id": 431,
            **dict.fromkeys(audio, 32),
        },
    )
    lengths = (_BORDER, _BORDER - 1, _BORDER + 1, _BORDER - _NUM_TOKENS, 5, 60, 20, 90)
    prompts = make_prompts(*lengths)
    assert_equal_to_generate(directory, "Phi4MultimodalForCausalLM", prompts, use_cache=False)


def test_rotary_factors_that_a_model_would_mix_end_the_context(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Llama's `generate` doesn't compute a sequence again that crosses the border."""
    directory = write_decoder(
        tmp_path / "model", tiny_model, "LlamaForCausalLM", rope_parameters=_LONG_ROPE
    )
    with pytest.raises(ModelError, match=r"more than the 24 tokens .* two sets of rotary factors"):
        make_llm(directory, max_model_len=64)
    assert_equal_to_generate(
        directory, "LlamaForCausalLM", make_prompts(12, 5, 7), max_num_batched_tokens=8
    )


def test_dynamic_rotary_factors_are_never_scaled(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_decoder(
        tmp_path / "model",
        tiny_model,
        "LlamaForCausalLM",
        max_position_embeddings=64,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )
    with pytest.raises(ModelError, match="max_model_len=65 is more than the model's context of 64"):
        make_llm(directory, max_model_len=65)
    with caplog.at_level(logging.WARNING, logger="sensorium.engine.assembly.config"):
        assert_equal_to_generate(directory, "LlamaForCausalLM", make_prompts(52, 5, 30))
    assert "the context ends at 64 tokens, because its rotary factors are dynamic" in caplog.text


def test_a_model_with_several_token_tables_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Kyutai's model adds up the embeddings of a text token and of several audio codes."""
    codec = tf.MimiConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_filters=4,
        codebook_size=16,
        codebook_dim=8,
        num_quantizers=2,
        num_semantic_quantizers=1,
        vector_quantization_hidden_dimension=8,
        upsample_groups=32,
    )
    directory = write_decoder(
        tmp_path / "model",
        tiny_model,
        "KyutaiSpeechToTextForConditionalGeneration",
        ffn_dim=64,
        num_codebooks=2,
        codebook_vocab_size=17,
        audio_bos_token_id=16,
        audio_pad_token_id=470,
        codec_config=codec,
    )
    with pytest.raises(
        ModelError, match="can't be run: its token embedding is a KyutaiSpeechToTextEmbeddings"
    ):
        make_llm(directory, max_model_len=64)
