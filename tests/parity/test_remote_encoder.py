"""Engines with a remote encoder: the same tokens, and no tower runs in the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sensorium import SamplingParams
from sensorium.models.loading import load_config, load_model
from sensorium.multimodal.processing.remote_encoder_backend import count_bytes
from tests.parity.cases import MULTIMODAL_FAMILIES
from tests.parity.reference import NUM_TOKENS, ReferenceOf
from tests.support.encoder import encoding_here
from tests.support.engine import get_token_ids, make_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# A grid and video; attention in both directions; audio. The others are alike for this.
CHOSEN = ("qwen2_5_vl", "gemma3", "qwen2_audio")
FAMILIES = [
    pytest.param(family, marks=() if family in CHOSEN else pytest.mark.slow)
    for family in MULTIMODAL_FAMILIES
]
CACHES = ("lru", "shm")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_with_everything_encoded_remotely(
    family: str, tiny_model: Callable[[str], str], reference_of: ReferenceOf
) -> None:
    model, expected = tiny_model(family), reference_of(family).expected
    prompts = [each.prompt for each in expected]
    with encoding_here(model) as encoder:
        for cache_type in CACHES:
            options = {"mm_processor_cache_type": cache_type, "mm_processor_cache_gb": 0.1}
            with make_llm(model, encoder=encoder.address, **options) as llm:
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                runner = llm.core.runner.encoder_runner
            assert [list(ids) for ids in get_token_ids(outputs)] == [e.token_ids for e in expected]
            assert runner.num_encoded == 0
            assert runner.num_loaded > 0
        counts = encoder.get_counts()
    assert counts.num_encoded == counts.num_processed > 0
    assert counts.num_kept == counts.num_processed, "the second engine was given what was kept"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_with_large_items_encoded_remotely_and_small_ones_here(
    family: str, tiny_model: Callable[[str], str], reference_of: ReferenceOf
) -> None:
    model, expected = tiny_model(family), reference_of(family).expected
    prompts = [each.prompt for each in expected]
    media = [item for p in prompts for items in p["multi_modal_data"].values() for item in items]
    sizes = sorted({count_bytes(item) for item in media})
    middle = sizes[len(sizes) // 2 - 1]
    with (
        encoding_here(model) as encoder,
        make_llm(model, encoder=encoder.address, encode_above=middle) as llm,
    ):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        runner = llm.core.runner.encoder_runner
        num_apart = encoder.get_counts().num_encoded
    assert [list(ids) for ids in get_token_ids(outputs)] == [e.token_ids for e in expected]
    assert runner.num_encoded > 0
    assert runner.num_loaded >= num_apart > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_towers_alone_have_exactly_the_weights_of_the_whole_model(
    family: str, tiny_model: Callable[[str], str]
) -> None:
    model = tiny_model(family)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    whole = load_model(model, load_config(model), **options)
    towers = load_model(model, load_config(model), towers_only=True, **options)
    language = {id(each) for each in whole.decoder.parameters()}
    language |= {id(each) for each in whole.model.get_output_embeddings().parameters()}
    expected = {
        name: tensor
        for name, tensor in whole.model.named_parameters()
        if id(tensor) not in language
    }
    found = dict(towers.model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    buffers = dict(whole.model.named_buffers())
    assert all(torch.equal(t, buffers[name]) for name, t in towers.model.named_buffers())
    assert found
    assert language
