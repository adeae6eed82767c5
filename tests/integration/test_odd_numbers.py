"""Numbers of other libraries are numbers; what is none is refused, and does no harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium import LLM, ModelError, RequestError, SamplingParams
from tests.parity.reference import GREEDY
from tests.support.engine import get_token_ids, make_llm

TinyModel = Callable[[str], str]


@pytest.mark.parametrize(
    "values",
    [
        {"seed": np.int64(5)},
        {"seed": np.int32(-5)},
        {"seed": np.uint64(2**63 + 1)},
        {
            "temperature": Fraction(1, 2),
            "top_p": Fraction(1, 2),
            "repetition_penalty": Fraction(3, 2),
        },
        {"temperature": np.float32(0.7), "top_k": np.int64(5), "logit_bias": {3: Fraction(1, 3)}},
        {"max_tokens": np.int64(4), "logprobs": np.int8(2)},
    ],
    ids=str,
)
def test_numbers_of_other_libraries_equal_plain_ones(
    tiny_model: TinyModel, values: dict[str, Any]
) -> None:
    odd = SamplingParams(**{"temperature": 1.0, "max_tokens": 6, "seed": 1, **values})
    for name in values:
        assert type(getattr(odd, name)) in (int, float, dict)
    llm = make_llm(tiny_model("llama"))
    alone = get_token_ids(llm.generate("hello", GREEDY, use_tqdm=False))
    outputs = llm.generate(["hello", "x", "hello"], [GREEDY, odd, GREEDY], use_tqdm=False)
    tokens = get_token_ids(outputs)
    assert [tokens[0], tokens[2]] == alone * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 10**400),
        ("logprobs", 10**400),
        ("top_p", float("nan")),
        ("ignore_eos", "no"),
        ("bad_words", ["\ud800"]),
        ("n", 10**5000),
    ],
    ids=["huge", "huge", "nan", "text", "half a character", "thousands of digits"],
)
def test_invalid_numbers_are_refused_by_their_field(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name}: must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"auto_map": 5}),
        ("config.json", {"architectures": [5]}),
        ("config.json", {"architectures": {"a": 1}}),
        ("config.json", {"model_type": [1]}),
        ("generation_config.json", {"bad_words_ids": 5}),
    ],
)
def test_broken_numbers_in_a_checkpoint_are_a_model_error(
    tiny_model: TinyModel, tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = directory / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    with pytest.raises(ModelError):
        LLM(str(directory), max_model_len=64)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(tiny_model: TinyModel, mode: str) -> None:
    llm = make_llm(tiny_model("llava"))
    clear = Image.new("RGBA", (60, 60), (10, 200, 30, 0))
    images = [clear.convert("LA") if mode == "LA" else clear, Image.new("RGB", (60, 60), "white")]
    if mode == "P":
        images[0] = Image.new("P", (60, 60), 0)
        images[0].putpalette([10, 200, 30])
        images[0].info["transparency"] = 0
    prompts = [{"prompt": "<image>what?", "multi_modal_data": {"image": image}} for image in images]
    first, second = get_token_ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    assert first == second


def test_a_pair_of_samples_and_rate_is_one_item(tiny_model: TinyModel) -> None:
    audio = np.sin(np.arange(8000) / 7).astype(np.float32)
    llm = make_llm(tiny_model("qwen2_audio"))
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>what?"
    prompts = [
        {"prompt": text, "multi_modal_data": {"audio": media}}
        for media in (audio, (audio, 16_000), [(audio, 16_000)])
    ]
    assert len(set(get_token_ids(llm.generate(prompts, GREEDY, use_tqdm=False)))) == 1
