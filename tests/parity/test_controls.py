"""The comparison can see mistakes: each of these, made on purpose, changes tokens.

A control that finds no difference means that the parity tests would let that mistake pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import sensorium.core.request as core_request
from sensorium import LLM
from sensorium.core.request import Request
from sensorium.layers.kv_layout import LayerSpec
from sensorium.models.hf_model import HfModel
from sensorium.worker.request_states import RequestState
from tests.parity.cases import (
    MAIN_MULTIMODAL_FAMILIES,
    MODALITIES,
    MROPE_FAMILIES,
    MULTIMODAL_FAMILIES,
    Case,
    every_fourth,
    in_turns,
    make_media,
    with_slow_relatives,
)
from tests.parity.reference import GREEDY, Expected, ReferenceOf, get_differences
from tests.support.engine import Trace, get_hf_model, make_llm

pytestmark = pytest.mark.check("controls")


def run(llm: LLM, expected: Sequence[Expected]) -> list[str]:
    """Return the cases with other tokens. A request that fails is no difference, but an error."""
    outputs = llm.generate([entry.prompt for entry in expected], GREEDY, use_tqdm=False)
    return get_differences(outputs, expected)


def test_without_a_mistake_there_is_no_difference(reference_of: ReferenceOf) -> None:
    reference = reference_of("gemma3")
    assert run(make_llm(reference.directory), reference.expected) == []


@pytest.mark.parametrize(
    ("family", "change"),
    in_turns(
        MULTIMODAL_FAMILIES,
        {
            "zeros": torch.zeros_like,
            "rolled": lambda e: e.roll(1, 0),
            "reversed": lambda e: e.flip(0),
        },
        MAIN_MULTIMODAL_FAMILIES[::2],
    ),
)
def test_wrong_embeddings_are_seen(
    reference_of: ReferenceOf, family: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    hf_model = get_hf_model(llm)
    encode = hf_model.encode
    hf_model.encode = lambda *arguments: [change(embeds) for embeds in encode(*arguments)]
    differences = run(llm, reference.expected)
    assert len(differences) >= 2
    assert "6 words" not in differences


@pytest.mark.parametrize("family", with_slow_relatives(MROPE_FAMILIES))
def test_plain_positions_instead_of_mrope_are_seen(reference_of: ReferenceOf, family: str) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    get_hf_model(llm).get_mrope_positions = lambda token_ids, *_: (
        torch.arange(len(token_ids)).expand(3, -1),
        0,
    )
    assert run(llm, reference.expected)


@pytest.mark.parametrize("family", with_slow_relatives(MROPE_FAMILIES))
def test_a_forgotten_mrope_delta_is_seen(reference_of: ReferenceOf, family: str) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    hf_model = get_hf_model(llm)
    get_positions = hf_model.get_mrope_positions
    hf_model.get_mrope_positions = lambda *arguments: (get_positions(*arguments)[0], 0)
    assert run(llm, reference.expected)


@pytest.mark.parametrize("window", [11, 13, None], ids=["short by one", "long by one", "ignored"])
@pytest.mark.parametrize(
    ("family", "is_chunked"), in_turns(["gemma3", "gemma4"], {"whole": False, "chunked": True})
)
def test_a_wrong_sliding_window_is_seen(
    reference_of: ReferenceOf,
    family: str,
    window: int | None,
    is_chunked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = reference_of(family)
    probe_layers = HfModel.probe_layers

    def probe_wrongly(hf_model: HfModel) -> tuple[LayerSpec, ...]:
        layers = probe_layers(hf_model)
        assert {layer.window for layer in layers} == {None, 12}
        return tuple(
            layer if layer.window is None else replace(layer, window=window) for layer in layers
        )

    monkeypatch.setattr(HfModel, "probe_layers", probe_wrongly)
    # At load a window that is too long is noticed by the model's own cache. Here tokens must tell.
    monkeypatch.setattr(HfModel, "find_context_limit", lambda *_: None)
    llm = make_llm(reference.directory, max_num_batched_tokens=24 if is_chunked else 4096)
    assert {group.window for group in llm.config.groups} == {None, window}
    assert run(llm, reference.expected)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_split_bidirectional_span_is_seen(reference_of: ReferenceOf, family: str) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=11)
    scheduler = llm.core.scheduler
    assert scheduler.limits.bidirectional_modalities
    scheduler.limits = replace(scheduler.limits, bidirectional_modalities=frozenset())
    trace = Trace(llm)
    assert run(llm, reference.expected)
    assert trace.num_split_items["image"] > 0


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_causal_image_tokens_are_seen(reference_of: ReferenceOf, family: str) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    runner: Any = llm.core.runner
    modalities = runner._input_batch.bidirectional_modalities
    assert modalities == llm.core.scheduler.limits.bidirectional_modalities != frozenset()
    runner._input_batch = replace(runner._input_batch, bidirectional_modalities=frozenset())
    assert run(llm, reference.expected)


def test_spans_seen_by_layers_without_a_window_are_seen(reference_of: ReferenceOf) -> None:
    """Gemma 4 has them in its other layers only. Text far from a picture would not tell."""
    reference = reference_of("gemma4")
    llm = make_llm(reference.directory)
    runner: Any = llm.core.runner
    assert runner._input_batch.has_causal_full_layers
    params = replace(GREEDY, max_tokens=1, prompt_logprobs=1)
    prompt = reference.expected[1].prompt
    right = llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs
    runner._input_batch = replace(runner._input_batch, has_causal_full_layers=False)
    llm.core.scheduler.kv_cache.clear_cache()
    wrong = llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs
    assert right != wrong


def test_without_deepstack_the_tokens_differ(reference_of: ReferenceOf) -> None:
    reference = reference_of("qwen3_vl")
    llm = make_llm(reference.directory)
    hf_model = get_hf_model(llm)
    embed = hf_model.embed
    hf_model.embed = lambda *arguments: (embed(*arguments)[0], {})
    assert len(run(llm, reference.expected)) >= 3


def test_deepstack_of_the_wrong_layer_is_seen(reference_of: ReferenceOf) -> None:
    reference = reference_of("qwen3_vl")
    llm = make_llm(reference.directory)
    hf_model = get_hf_model(llm)
    split = hf_model.split
    hf_model.split = lambda *arguments: [
        torch.cat([e[:, :64], e[:, 64:].roll(64, 1)], 1) for e in split(*arguments)
    ]
    assert len(run(llm, reference.expected)) >= 3


@pytest.mark.parametrize("family", ["gemma4", "gemma4_causal"])
def test_per_layer_inputs_of_the_raw_placeholders_are_seen(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    hf_model = get_hf_model(llm)
    assert len(hf_model._placeholder_ids) == 3
    hf_model._placeholder_ids = hf_model._placeholder_ids[:0]
    differences = run(llm, reference.expected)
    assert len(differences) >= 3
    assert "6 words" not in differences


@pytest.mark.parametrize("family", ["gemma4", "gemma4_causal"])
def test_a_layer_that_shares_with_the_wrong_one_is_seen(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    probe_layers = HfModel.probe_layers

    def probe_wrongly(hf_model: HfModel) -> tuple[LayerSpec, ...]:
        layers = probe_layers(hf_model)
        assert [layer.source for layer in layers] == [0, 1, 2, 3, 3, 2]
        return tuple(
            replace(layer, source=1) if layer.layer_index == 4 else layer for layer in layers
        )

    monkeypatch.setattr(HfModel, "probe_layers", probe_wrongly)
    assert run(make_llm(reference.directory), reference.expected)


def make_equal_prompts(reference_of: ReferenceOf, family: str) -> list[Expected]:
    """Make prompts of the same words around items of one size: only the media differ."""
    first, *others = (
        reference_of(family).compute(
            Case(
                name=f"item {min(seed, 1)}",
                parts=(make_media(MODALITIES[family][0], seed=30 + seed), "which one is it?"),
            )
        )
        for seed in range(5)
    )
    second = next(other for other in others if other.token_ids != first.token_ids)
    assert first.prompt_token_ids == second.prompt_token_ids
    return [first, second]


@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 0))
def test_an_encoder_cache_that_confuses_two_items_is_seen(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_equal_prompts(reference_of, family)
    llm = make_llm(reference_of(family).directory)
    for owner in (Request, RequestState):
        monkeypatch.setattr(owner, "get_encoder_key", lambda *_: "the only key")
    trace = Trace(llm)
    assert run(llm, expected) == ["item 1"]
    assert trace.num_encoded_items == 1


@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 1))
def test_a_prefix_cache_that_confuses_two_items_is_seen(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_equal_prompts(reference_of, family)
    llm = make_llm(reference_of(family).directory, block_size=4)
    hash_block = core_request.hash_block
    monkeypatch.setattr(
        core_request, "hash_block", lambda parent, token_ids, _: hash_block(parent, token_ids, ())
    )
    assert run(llm, expected[:1]) == []
    assert run(llm, expected[1:]) == ["item 1"]


@pytest.mark.parametrize("family", every_fourth(MULTIMODAL_FAMILIES, 2))
def test_equal_prompts_around_different_items_are_distinguished(
    reference_of: ReferenceOf, family: str
) -> None:
    """The two controls above, without their mistake."""
    expected = make_equal_prompts(reference_of, family)
    llm = make_llm(reference_of(family).directory, block_size=4)
    assert run(llm, expected[:1]) == []
    assert run(llm, expected[1:]) == []
    assert run(llm, expected) == []
