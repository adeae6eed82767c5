"""Where a sequence ends: the end-of-sequence tokens of the model's own generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sensorium import SamplingParams
from tests.parity.cases import FAMILIES, every_fourth
from tests.parity.reference import NUM_TOKENS, Reference, ReferenceOf
from tests.support.engine import make_llm

pytestmark = pytest.mark.check("end")


def choose_eos(reference: Reference) -> list[int]:
    """Two tokens that end two of the cases, neither at their first token nor at their last."""
    chosen: list[int] = []
    for entry in reference.expected:
        tokens = entry.token_ids
        fresh = [t for i, t in enumerate(tokens) if 2 <= i < NUM_TOKENS - 2 and t not in tokens[:i]]
        if fresh and not set(chosen) & set(tokens):
            chosen.append(fresh[0])
    assert len(chosen) >= 2
    return chosen[:2]


def copy_with_eos(reference: Reference, eos: int | list[int], directory: Path) -> Reference:
    shutil.copytree(reference.directory, directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": eos}))
    return Reference(str(directory), reference.family, reference.kept)


@pytest.mark.parametrize("is_list", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", every_fourth(FAMILIES, 3))
def test_end_of_sequence_tokens_of_the_model_are_honoured(
    reference_of: ReferenceOf, family: str, is_list: bool, tmp_path: Path
) -> None:
    stock = reference_of(family)
    eos = choose_eos(stock) if is_list else choose_eos(stock)[:1]
    changed = copy_with_eos(stock, eos if is_list else eos[0], tmp_path / "model")
    llm = make_llm(changed.directory, max_num_batched_tokens=24)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    outputs = llm.generate([entry.prompt for entry in stock.expected], params, use_tqdm=False)
    num_stopped = 0
    for output, entry in zip(outputs, stock.expected, strict=True):
        theirs = changed.get_tokens(entry.inputs, ignore_eos=False, max_new_tokens=NUM_TOKENS)
        completion = output.outputs[0]
        is_stopped = theirs[-1] in eos
        num_stopped += is_stopped
        assert list(completion.token_ids) == theirs, entry.case.name
        assert completion.finish_reason == ("stop" if is_stopped else "length")
        assert completion.stop_reason is None
        shown = theirs[:-1] if is_stopped else theirs
        assert completion.text == llm.get_tokenizer().decode(shown, skip_special_tokens=True)
    assert num_stopped >= len(eos)


@pytest.mark.parametrize("min_tokens", [8, NUM_TOKENS])
def test_min_tokens_keeps_the_end_away_as_the_reference_does(
    reference_of: ReferenceOf, min_tokens: int, tmp_path: Path
) -> None:
    stock = reference_of("llava")
    changed = copy_with_eos(stock, choose_eos(stock), tmp_path / "model")
    llm = make_llm(changed.directory)
    params = SamplingParams(max_tokens=NUM_TOKENS, min_tokens=min_tokens)
    outputs = llm.generate([entry.prompt for entry in stock.expected], params, use_tqdm=False)
    for output, entry in zip(outputs, stock.expected, strict=True):
        theirs = changed.get_tokens(
            entry.inputs, ignore_eos=False, max_new_tokens=NUM_TOKENS, min_new_tokens=min_tokens
        )
        assert list(output.outputs[0].token_ids) == theirs, entry.case.name
        assert len(theirs) >= min_tokens


def test_end_of_sequence_can_be_ignored(reference_of: ReferenceOf, tmp_path: Path) -> None:
    stock = reference_of("llama")
    changed = copy_with_eos(stock, choose_eos(stock), tmp_path / "model")
    llm = make_llm(changed.directory)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([entry.prompt for entry in stock.expected], params, use_tqdm=False)
    for output, entry in zip(outputs, stock.expected, strict=True):
        assert list(output.outputs[0].token_ids) == entry.token_ids, entry.case.name
        assert output.outputs[0].finish_reason == "length"
