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
from sensorium.models.adapter import ModelAdapter
from sensorium.worker.request_states import RequestState
from tests.parity.cases import MULTIMODAL_FAMILIES, Case, make_image
from tests.parity.driver import Trace, make_llm
from tests.parity.reference import GREEDY, Expected, ReferenceOf, get_differences


def run(llm: LLM, expected: Sequence[Expected]) -> list[str]:
    """The cases whose tokens differ. A request that fails is not a difference: it is an error."""
    outputs = llm.generate([entry.prompt for entry in expected], GREEDY, use_tqdm=False)
    return get_differences(outputs, expected)


def get_adapter(llm: LLM) -> Any:
    return llm.core.runner._adapter  # type: ignore[attr-defined]


def test_without_a_mistake_there_is_no_difference(reference_of: ReferenceOf) -> None:
    reference = reference_of("gemma3")
    assert run(make_llm(reference.directory), reference.expected) == []


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, lambda e: e.roll(1, 0), lambda e: e.flip(0)],
    ids=["zeros", "rolled", "reversed"],
)
@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
def test_wrong_embeddings_are_seen(
    reference_of: ReferenceOf, family: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    adapter = get_adapter(llm)
    encode = adapter.encode
    adapter.encode = lambda *arguments: [change(embeds) for embeds in encode(*arguments)]
    differences = run(llm, reference.expected)
    assert len(differences) >= 3
    assert "6 words" not in differences


def test_plain_positions_instead_of_mrope_are_seen(reference_of: ReferenceOf) -> None:
    reference = reference_of("qwen2_5_vl")
    llm = make_llm(reference.directory)
    get_adapter(llm).get_mrope_positions = lambda token_ids, *_: (
        torch.arange(len(token_ids)).expand(3, -1),
        0,
    )
    assert run(llm, reference.expected)


def test_a_forgotten_mrope_delta_is_seen(reference_of: ReferenceOf) -> None:
    reference = reference_of("qwen2_5_vl")
    llm = make_llm(reference.directory)
    adapter = get_adapter(llm)
    get_positions = adapter.get_mrope_positions
    adapter.get_mrope_positions = lambda *arguments: (get_positions(*arguments)[0], 0)
    assert run(llm, reference.expected)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("window", [11, 13, None], ids=["short by one", "long by one", "ignored"])
def test_a_wrong_sliding_window_is_seen(
    reference_of: ReferenceOf,
    window: int | None,
    is_chunked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = reference_of("gemma3")
    probe_layers = ModelAdapter.probe_layers

    def probe_wrongly(adapter: ModelAdapter) -> tuple[LayerSpec, ...]:
        layers = probe_layers(adapter)
        assert {layer.window for layer in layers} == {None, 12}
        return tuple(
            layer if layer.window is None else replace(layer, window=window) for layer in layers
        )

    monkeypatch.setattr(ModelAdapter, "probe_layers", probe_wrongly)
    llm = make_llm(reference.directory, max_num_batched_tokens=24 if is_chunked else 4096)
    assert {group.window for group in llm.config.groups} == {None, window}
    assert run(llm, reference.expected)


def test_a_split_bidirectional_span_is_seen(reference_of: ReferenceOf) -> None:
    reference = reference_of("gemma3")
    llm = make_llm(reference.directory, max_num_batched_tokens=11)
    scheduler = llm.core.scheduler
    assert scheduler.limits.bidirectional_modalities
    scheduler.limits = replace(scheduler.limits, bidirectional_modalities=frozenset())
    trace = Trace(llm)
    assert run(llm, reference.expected)
    assert trace.num_split_items > 0


def test_causal_image_tokens_are_seen(reference_of: ReferenceOf) -> None:
    reference = reference_of("gemma3")
    llm = make_llm(reference.directory)
    batch: Any = llm.core.runner._input_batch  # type: ignore[attr-defined]
    assert batch._bidirectional_modalities
    batch._bidirectional_modalities = frozenset()
    assert run(llm, reference.expected)


def make_equal_prompts(reference_of: ReferenceOf, family: str) -> list[Expected]:
    """The same words around two images of one size: the media alone tell them apart."""
    images = [make_image(84, 84, seed=seed) for seed in (31, 32)]
    expected = [
        reference_of(family).compute(Case(name=f"image {i}", parts=(image, "which one is it?")))
        for i, image in enumerate(images)
    ]
    assert expected[0].prompt_token_ids == expected[1].prompt_token_ids
    assert expected[0].token_ids != expected[1].token_ids
    return expected


@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
def test_an_encoder_cache_that_confuses_two_images_is_seen(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_equal_prompts(reference_of, family)
    llm = make_llm(reference_of(family).directory)
    for owner in (Request, RequestState):
        monkeypatch.setattr(owner, "get_encoder_key", lambda *_: "the only key")
    trace = Trace(llm)
    assert run(llm, expected) == ["image 1"]
    assert trace.num_encoded_items == 1


@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
def test_a_prefix_cache_that_confuses_two_images_is_seen(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_equal_prompts(reference_of, family)
    llm = make_llm(reference_of(family).directory, block_size=4)
    hash_block = core_request.hash_block
    monkeypatch.setattr(
        core_request, "hash_block", lambda parent, token_ids, _: hash_block(parent, token_ids, ())
    )
    assert run(llm, expected[:1]) == []
    assert run(llm, expected[1:]) == ["image 1"]


@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
def test_equal_prompts_around_different_images_are_kept_apart(
    reference_of: ReferenceOf, family: str
) -> None:
    """The two controls above, without their mistake."""
    expected = make_equal_prompts(reference_of, family)
    llm = make_llm(reference_of(family).directory, block_size=4)
    assert run(llm, expected[:1]) == []
    assert run(llm, expected[1:]) == []
    assert run(llm, expected) == []
