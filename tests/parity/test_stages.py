"""Each stage against Transformers on its own, so that a difference in tokens can be located."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sensorium import LLM
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.request import EngineCoreRequest
from tests.parity.cases import (
    FAMILIES,
    MODALITIES,
    MROPE_FAMILIES,
    MULTIMODAL_FAMILIES,
    every_fourth,
)
from tests.parity.decoder_inputs import get_decoder_inputs, get_our_decoder_inputs
from tests.parity.reference import GREEDY, Expected, Reference, ReferenceOf
from tests.support.engine import add_with_tensors, make_llm, process_with_tensors

_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@dataclass(frozen=True)
class Processed:
    request: EngineCoreRequest
    payloads: dict[str, MultiModalKwargsItem]


def process(llm: LLM, reference: Reference) -> Iterator[tuple[Processed, Expected]]:
    for entry in reference.expected:
        processed, tensors = process_with_tensors(llm, entry.case.name, entry.prompt, GREEDY)
        yield Processed(processed.request, tensors), entry


@pytest.mark.check("processor")
@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
def test_items_that_are_processed_one_by_one_equal_the_whole_call(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    for processed, entry in process(make_llm(reference.directory), reference):
        items = [processed.payloads[f.mm_hash] for f in processed.request.mm_features]
        names = {name for item in items for name in item}
        assert names == entry.inputs.keys() - _TEXT_KEYS, entry.case.name
        for name in names:
            theirs = entry.inputs[name]
            ours = [item[name] for item in items if name in item]
            assert {tensor.dtype for tensor in ours} == {theirs.dtype}, name
            assert is_joined(ours, theirs), (entry.case.name, name)


def is_joined(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Return whether `whole` is the parts in order, padded with zeros in other dimensions."""
    for dimension in range(min(2, whole.ndim)):
        padded = [pad_like(part, whole, dimension) for part in parts]
        if sum(part.shape[dimension] for part in padded) == whole.shape[dimension]:
            return torch.equal(torch.cat(padded, dimension), whole)
    return False


def pad_like(part: torch.Tensor, whole: torch.Tensor, dimension: int) -> torch.Tensor:
    amounts: list[int] = []
    for d in reversed(range(whole.ndim)):
        amounts += [0, 0 if d == dimension else whole.shape[d] - part.shape[d]]
    return torch.nn.functional.pad(part, amounts)


@pytest.mark.check("prompt")
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_placeholders_equal_the_whole_call(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    config = reference.model.config
    ids = {getattr(config, f"{modality}_token_id", None) for modality in MODALITIES[family]}
    for processed, entry in process(make_llm(reference.directory), reference):
        request, case = processed.request, entry.case
        assert list(request.prompt_token_ids) == entry.prompt_token_ids, case.name
        ours = {
            index
            for feature in request.mm_features
            for start, end in feature.mm_position.extract_embeds_range()
            for index in range(start, end)
        }
        theirs = {i for i, token in enumerate(entry.prompt_token_ids) if token in ids}
        assert ours == theirs, case.name
        counts = Counter(feature.modality for feature in request.mm_features)
        media = {"image": case.images, "video": case.videos, "audio": case.audio}
        assert counts == {name: len(items) for name, items in media.items() if items}, case.name


@pytest.mark.check("decoder inputs")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_decoder_is_given_equals_the_whole_call(
    reference_of: ReferenceOf, family: str
) -> None:
    """Embeddings of text and media, positions, and what the family adds to them."""
    reference = reference_of(family)
    llm = make_llm(
        reference.directory,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=0,
    )
    for entry in reference.expected:
        theirs = get_decoder_inputs(reference, entry)
        embeds, positions, extra = get_our_decoder_inputs(llm, entry)
        torch.testing.assert_close(embeds, theirs["inputs_embeds"], rtol=1e-5, atol=1e-5)
        if theirs["position_ids"] is not None:
            expected = theirs["position_ids"].reshape(-1, embeds.shape[1])[-3:]
            assert torch.equal(positions.reshape(-1, embeds.shape[1]), expected), entry.case.name
        names = {"visual_pos_masks", "deepstack_visual_embeds", "per_layer_inputs"}
        given = {name for name in names if theirs.get(name) is not None}
        assert extra.keys() == given, entry.case.name
        for name in given:
            torch.testing.assert_close(extra[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.check("positions")
@pytest.mark.parametrize("family", MROPE_FAMILIES)
def test_positions_behind_the_prompt_equal_those_of_the_model(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    runner: Any = llm.core.runner
    num_shifted = 0
    for processed, entry in process(llm, reference):
        add_with_tensors(llm, processed.request, processed.payloads)
        delta = runner._mrope[processed.request.request_id].delta
        if not processed.request.mm_features:
            assert not delta.any()
            continue
        theirs = get_decoder_inputs(reference, entry, step=1)["position_ids"]
        ours = len(entry.prompt_token_ids) + delta
        assert ours[:, 0].tolist() == theirs.reshape(-1)[-3:].tolist(), entry.case.name
        num_shifted += bool((delta != 0).any())
    assert num_shifted >= 6


@pytest.mark.check("logits")
@pytest.mark.parametrize("family", every_fourth(FAMILIES, 2))
def test_logits_of_every_generated_token_are_close(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=24)
    hf_model: Any = llm.core.runner._hf_model  # type: ignore[attr-defined]
    compute, seen = hf_model.logits, []

    def compute_and_note(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    monkeypatch.setattr(hf_model, "logits", compute_and_note)
    for entry in reference.expected:
        seen.clear()
        llm.generate(entry.prompt, GREEDY, use_tqdm=False)
        torch.testing.assert_close(torch.cat(seen), entry.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.check("logits")
@pytest.mark.parametrize("family", every_fourth(FAMILIES, 3))
def test_log_probabilities_are_those_of_the_reference_logits(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    params = replace(GREEDY, logprobs=3)
    prompts = [entry.prompt for entry in reference.expected]
    for output, entry in zip(
        llm.generate(prompts, params, use_tqdm=False), reference.expected, strict=True
    ):
        theirs = entry.logits.log_softmax(-1)
        ours = output.outputs[0].logprobs
        assert ours is not None
        for row, entries in zip(theirs, ours, strict=True):
            values, token_ids = row.topk(3)
            assert list(entries) == token_ids.tolist()
            assert [e.logprob for e in entries.values()] == pytest.approx(values.tolist(), abs=1e-4)
