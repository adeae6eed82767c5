"""Penalties, bias and bans through the whole engine equal those of Transformers' `generate`.

That holds whatever else runs.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sensorium import LLM, RequestError, SamplingParams
from tests.integration.neighbours import Neighbours, make_prompt
from tests.parity.cases import make_image, make_text
from tests.support.engine import (
    Trace,
    assert_nothing_is_left,
    get_kv_bytes,
    get_token_ids,
    make_llm,
)

TinyModel = Callable[[str], str]
NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [make_text(3 + 5 * seed, seed=seed) for seed in range(6)]
# A row of every kind; all of them change what is generated.
KNOBS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 1},
    {"logit_bias": {40: 3.0, 41: -100}},
    {"temperature": 1.2, "min_p": 0.3, "top_k": 30, "top_p": 0.9, "seed": 2},
    {"allowed_token_ids": list(range(20, 60)), "temperature": 1.0, "seed": 3},
    {"bad_words": ["e", "the", "a b"], "temperature": 0.7, "seed": 4, "repetition_penalty": 1.1},
]
PARAMS = [replace(GREEDY, **knobs) for knobs in KNOBS]


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> LLM:
    return make_llm(tiny_model("llama"))


@pytest.fixture(scope="module")
def alone(tiny_model: TinyModel) -> list[tuple[int, ...]]:
    llm = make_llm(tiny_model("llama"), max_num_seqs=1, enable_prefix_caching=False)
    return get_token_ids(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


class HFModel:
    """Transformers' model in the directory, asked without ours."""

    def __init__(self, directory: str | Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()

    def generate(self, prompt: str, **options: Any) -> tuple[int, ...]:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        eos = self._model.generation_config.eos_token_id
        self._model.generation_config.eos_token_id = None
        try:
            tokens = self._model.generate(**inputs, max_new_tokens=NUM_TOKENS, **options)
        finally:
            self._model.generation_config.eos_token_id = eos
        return tuple(tokens[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("penalty", [0.6, 1.2, 3.0])
def test_the_repetition_penalty_gives_the_tokens_of_transformers(
    llm: LLM, tiny_model: TinyModel, penalty: float
) -> None:
    model = HFModel(tiny_model("llama"))
    expected = [model.generate(p, do_sample=False, repetition_penalty=penalty) for p in PROMPTS]
    params = replace(GREEDY, repetition_penalty=penalty)
    assert get_token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert expected != [model.generate(p, do_sample=False) for p in PROMPTS]


def test_placeholders_of_media_are_penalised_as_in_transformers(tiny_model: TinyModel) -> None:
    """The prompt is what `generate` sees: a token per embedding."""
    directory = tiny_model("llava")
    image = make_image(60, 60, seed=3)
    prompt = make_prompt("llava", image)
    processor = transformers.AutoProcessor.from_pretrained(directory)
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    inputs = processor(text=[prompt["prompt"]], images=[image], return_tensors="pt")
    placeholder = model.config.image_token_id
    options = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "eos_token_id": None}
    # Pushed up until it would be chosen, but for the penalty.
    bias = {"sequence_bias": [[[placeholder], 8.0]]}
    expected = model.generate(**inputs, **options, **bias, repetition_penalty=2.0)
    tokens = tuple(expected[0, inputs["input_ids"].shape[1] :].tolist())
    params = replace(GREEDY, repetition_penalty=2.0, logit_bias={placeholder: 8.0})
    assert get_token_ids(make_llm(directory).generate(prompt, params, use_tqdm=False)) == [tokens]


def test_bad_words_give_the_tokens_of_transformers(llm: LLM, tiny_model: TinyModel) -> None:
    """Words that the model would say, of one token and of several."""
    model = HFModel(tiny_model("llama"))
    decode = llm.get_tokenizer().decode
    free = [model.generate(p, do_sample=False) for p in PROMPTS]
    words = [decode(free[0][:1]), decode(free[1][1:3]), decode(free[2][4:7])]
    words = [word for word in words if word.strip() and word.isprintable()]
    assert words
    params = replace(GREEDY, bad_words=words)
    processed = llm.input_processor.process("r", PROMPTS[0], params)
    bad_words_ids = [list(sequence) for sequence in processed.request.bans.sequences]
    assert any(len(sequence) > 1 for sequence in bad_words_ids)
    expected = [model.generate(p, do_sample=False, bad_words_ids=bad_words_ids) for p in PROMPTS]
    assert get_token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    assert expected != free


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.3},
        {"suppress_tokens": list(range(30, 200))},
        {"begin_suppress_tokens": list(range(30, 300))},
        {"bad_words_ids": [[token_id] for token_id in range(100, 250)]},
        {"repetition_penalty": 1.2, "suppress_tokens": [40], "bad_words_ids": [[50, 51], [52]]},
    ],
    ids=str,
)
def test_defaults_of_a_generation_config_are_those_of_transformers(
    tiny_model: TinyModel, tmp_path: Path, config: dict[str, Any]
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    model = HFModel(directory)
    expected = [model.generate(prompt) for prompt in PROMPTS]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = make_llm(str(directory)).generate(PROMPTS, params, use_tqdm=False)
    assert get_token_ids(outputs) == expected


def test_with_generation_config_none_a_request_has_plain_defaults(
    tiny_model: TinyModel, tmp_path: Path, llm: LLM
) -> None:
    directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = directory / "generation_config.json"
    odd = {"do_sample": True, "temperature": 0.1, "top_k": 2, "repetition_penalty": 1.5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd, "suppress_tokens": [40]}))
    silent = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=3)
    free = replace(silent, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
    expected = get_token_ids(llm.generate(PROMPTS, free, use_tqdm=False))
    taken, ignored = (make_llm(str(directory), generation_config=g) for g in ("auto", "none"))
    assert get_token_ids(ignored.generate(PROMPTS, silent, use_tqdm=False)) == expected
    assert get_token_ids(taken.generate(PROMPTS, silent, use_tqdm=False)) != expected
    eos = taken.input_processor.defaults.eos_token_ids
    assert eos
    assert ignored.input_processor.defaults.eos_token_ids == eos


def test_bad_words_are_never_generated(llm: LLM) -> None:
    params = replace(GREEDY, temperature=1.5, max_tokens=60)
    free = llm.generate(PROMPTS, replace(params, seed=5), use_tqdm=False)
    pairs = {output.outputs[0].text[i : i + 2] for output in free for i in range(40)}
    words = [pair for pair in sorted(pairs) if pair.isascii() and pair.strip() == pair][:50]
    banned = llm.generate(PROMPTS, replace(params, seed=5, bad_words=words), use_tqdm=False)
    sequences = llm.input_processor._get_bad_sequences(words)
    for output in banned:
        said = (*output.prompt_token_ids, *output.outputs[0].token_ids)
        first = len(output.prompt_token_ids)
        for end in range(first + 1, len(said) + 1):
            assert not any(said[:end][-len(s) :] == s for s in sequences)
    assert get_token_ids(banned) != get_token_ids(free)


def test_every_parameter_changes_the_tokens(llm: LLM, alone: list[tuple[int, ...]]) -> None:
    neutral = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "min_p": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "allowed_token_ids": None,
        "bad_words": (),
    }
    plain = [replace(params, **neutral) for params in PARAMS]
    tokens = get_token_ids(llm.generate(PROMPTS, plain, use_tqdm=False))
    assert all(ours != theirs for ours, theirs in zip(alone, tokens, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2, "block_size": 4}], ids=str
)
def test_neighbours_chunks_and_cached_prefixes_change_nothing(
    tiny_model: TinyModel, alone: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    llm = make_llm(tiny_model("llama"), **options)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert get_token_ids(outputs) == alone
    assert_nothing_is_left(llm)


def test_preemptions_change_nothing(
    tiny_model: TinyModel, llm: LLM, alone: list[tuple[int, ...]]
) -> None:
    tokenizer = llm.get_tokenizer()
    longest = max(len(tokenizer(p)["input_ids"]) for p in PROMPTS) + NUM_TOKENS
    tight = make_llm(
        tiny_model("llama"),
        max_model_len=longest,
        block_size=4,
        kv_cache_memory_bytes=get_kv_bytes(llm, longest + 16),
    )
    trace = Trace(tight)
    assert get_token_ids(tight.generate(PROMPTS, PARAMS, use_tqdm=False)) == alone
    assert trace.preempted_ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"logit_bias": {5: 1, 100_001: 1, 100_000: 2}},
            r"logit_bias: has token ids outside the model's vocabulary of \d+: 100000, 100001",
        ),
        ({"logit_bias": {2**70: 1}}, "logit_bias: has token ids outside"),
        ({"allowed_token_ids": [1, 99_999]}, "allowed_token_ids: has token ids outside .*: 99999"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(
    neighbours_of: Callable[[str], Neighbours], values: dict[str, Any], message: str
) -> None:
    error = neighbours_of("llama").fail("hello", SamplingParams(**values))
    assert re.search(message, error)


def test_a_request_without_an_allowed_token_fails_alone(
    neighbours_of: Callable[[str], Neighbours],
) -> None:
    neighbours = neighbours_of("llama")
    token_id = neighbours.llm.get_tokenizer()("a")["input_ids"][0]
    params = SamplingParams(allowed_token_ids=[token_id], bad_words=["a"])
    assert "no token is left to choose from" in neighbours.fail("hello", params)


def test_a_request_fails_at_the_token_where_none_is_allowed(llm: LLM) -> None:
    token_id = llm.get_tokenizer()("a")["input_ids"][0]
    params = replace(GREEDY, allowed_token_ids=[token_id], bad_words=["aaa"])
    (output,) = llm.generate("hello", params, use_tqdm=False, return_errors=True)
    with pytest.raises(RequestError, match="no token is left"):
        raise output.error or AssertionError
    assert output.outputs[0].text == "aa"
    assert_nothing_is_left(llm)
