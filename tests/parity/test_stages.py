"""Each stage against Transformers on its own, so that a difference in tokens can be located."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sensorium import LLM
from sensorium.engine.input_processor import ProcessedRequest
from tests.parity.cases import FAMILIES, MULTIMODAL_FAMILIES
from tests.parity.driver import make_llm
from tests.parity.reference import GREEDY, Expected, Reference, ReferenceOf

_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def process(llm: LLM, reference: Reference) -> Iterator[tuple[ProcessedRequest, Expected]]:
    for entry in reference.expected:
        yield llm.input_processor.process(entry.case.name, entry.prompt, GREEDY), entry


def get_items(processed: ProcessedRequest, modality: str) -> list[Any]:
    """The tensors of a prompt's items of one modality, in order."""
    features = processed.request.mm_features
    return [processed.payloads[f.mm_hash] for f in features if f.modality == modality]


@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
def test_items_that_are_processed_one_by_one_equal_the_whole_call(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    for processed, entry in process(make_llm(reference.directory), reference):
        ours: dict[str, torch.Tensor] = {}
        for modality in ("image", "video"):
            items = get_items(processed, modality)
            names = items[0].keys() if items else ()
            ours |= {name: torch.cat([item[name] for item in items]) for name in names}
        assert ours.keys() == entry.inputs.keys() - _TEXT_KEYS, entry.case.name
        for name, tensor in ours.items():
            assert tensor.dtype == entry.inputs[name].dtype
            assert torch.equal(tensor, entry.inputs[name]), (entry.case.name, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_placeholders_equal_the_whole_call(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    for processed, entry in process(make_llm(reference.directory), reference):
        request, case = processed.request, entry.case
        assert list(request.prompt_token_ids) == entry.prompt_token_ids, case.name
        placeholders = {"image": set(), "video": set()}
        for feature in request.mm_features:
            for start, end in feature.mm_position.extract_embeds_range():
                placeholders[feature.modality] |= set(range(start, end))
        for modality, positions in placeholders.items():
            token_id = getattr(reference.model.config, f"{modality}_token_id", None)
            theirs = {i for i, token in enumerate(entry.prompt_token_ids) if token == token_id}
            assert positions == theirs, (case.name, modality)
        counts = [len(get_items(processed, m)) for m in placeholders]
        assert counts == [len(case.images), len(case.videos)], case.name


@pytest.mark.parametrize("family", MULTIMODAL_FAMILIES)
@torch.inference_mode()
def test_encoder_outputs_equal_those_of_the_whole_prompt(
    reference_of: ReferenceOf, family: str
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory)
    llm.generate([entry.prompt for entry in reference.expected], GREEDY, use_tqdm=False)
    runner: Any = llm.core.runner
    num_compared = 0
    for processed, entry in process(llm, reference):
        for modality, theirs in get_embeddings(reference, entry).items():
            ours = [
                runner.encoder_cache[feature.mm_hash]
                for feature in processed.request.mm_features
                if feature.modality == modality
            ]
            num_compared += len(ours)
            torch.testing.assert_close(torch.cat(ours), theirs, rtol=1e-5, atol=1e-5)
    assert num_compared == sum(len(e.case.images + e.case.videos) for e in reference.expected)


def get_embeddings(reference: Reference, entry: Expected) -> dict[str, torch.Tensor]:
    """By modality, what the untouched model makes of all items of a prompt in one call."""
    embeddings = {}
    for modality, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels in entry.inputs:
            names = {pixels, f"{modality}_grid_thw"} & entry.inputs.keys()
            function = getattr(reference.model.base_model, f"get_{modality}_features")
            output = function(**{n: entry.inputs[n] for n in names}, return_dict=True)
            parts = list(output.pooler_output)
            embeddings[modality] = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    return embeddings


def test_mrope_positions_equal_those_of_the_whole_prompt(reference_of: ReferenceOf) -> None:
    reference = reference_of("qwen2_5_vl")
    llm = make_llm(reference.directory)
    runner: Any = llm.core.runner
    num_shifted = 0
    for processed, entry in process(llm, reference):
        llm.core.add_request(processed.request, processed.payloads)
        ours = runner._mrope[processed.request.request_id]
        if processed.request.mm_features:
            names = entry.inputs.keys() - {"pixel_values", "pixel_values_videos"}
            arguments = {name: entry.inputs[name] for name in names}
            theirs, delta = reference.model.base_model.get_rope_index(**arguments)
            assert torch.equal(torch.from_numpy(ours.positions), theirs[:, 0]), entry.case.name
            assert ours.delta == int(delta), entry.case.name
            num_shifted += ours.delta != 0
        else:
            plain = torch.arange(len(entry.prompt_token_ids)).expand(3, -1)
            assert torch.equal(torch.from_numpy(ours.positions.copy()), plain)
            assert ours.delta == 0
    assert num_shifted >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_generated_token_are_close(
    reference_of: ReferenceOf, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    llm = make_llm(reference.directory, max_num_batched_tokens=24)
    adapter: Any = llm.core.runner._adapter  # type: ignore[attr-defined]
    compute, seen = adapter.logits, []

    def compute_and_note(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(compute(hidden))
        return seen[-1]

    monkeypatch.setattr(adapter, "logits", compute_and_note)
    for entry in reference.expected:
        seen.clear()
        llm.generate(entry.prompt, GREEDY, use_tqdm=False)
        torch.testing.assert_close(torch.cat(seen), entry.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
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
