"""Speech models: the tokens of Transformers, however requests are batched, cached and preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.request import Request
from sensorium.types.request import TextPrompt
from sensorium.worker.input_batch import InputBatch
from tests.parity.cases import Audio, make_audio
from tests.parity.graph_parts import use_graphs
from tests.support.engine import Trace, assert_nothing_is_left, make_llm, run_staggered

FAMILIES = ("whisper", "whisper_en", "moonshine")
SECONDS = (1.0, 2.5, 3.0, 0.7, 2.2, 1.4, 2.9, 0.3)
NUM_TOKENS = 20
BUDGETS = (7, 24, 4096)  # tokens of a step

TinyModel = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A sound with the prompt of its decoder, and what Transformers says after it."""

    prompt: TextPrompt
    prompt_token_ids: list[int]
    token_ids: list[int]


def make_prompts(family: str) -> list[str]:
    """Return prompts of different lengths: with and without times, a text before, a translation."""
    if family == "moonshine":
        return ["", "<s>", "<s>the quick", "<s> brown fox jumps over"]
    first = "<|startoftranscript|>"
    if family == "whisper_en":
        first, tasks = f"{first}", ("", "", "", "")
    else:
        tasks = ("<|en|><|transcribe|>", "<|de|><|translate|>", "<|zh|><|transcribe|>", "<|fr|>")
    texts = ("", "<|startofprev|> the quick brown fox", "", "<|startofprev|> hello world")
    ends = ("<|notimestamps|>", "", "<|notimestamps|> the lazy", "")
    return [text + first + task + end for text, task, end in zip(texts, tasks, ends, strict=True)]


class Reference:
    """An untouched model of Transformers in float32, asked for its likeliest tokens."""

    def __init__(self, family: str, directory: str) -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        model_class = getattr(transformers, config.architectures[0])
        self.directory = directory
        self.model = model_class.from_pretrained(directory).eval()
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        prompts = make_prompts(family)
        self.spoken = [
            self._ask(make_audio(seconds, seed=index), prompts[index % len(prompts)])
            for index, seconds in enumerate(SECONDS)
        ]

    @torch.inference_mode()
    def _ask(self, sound: Audio, text: str) -> Spoken:
        extractor = self.processor.feature_extractor
        inputs = extractor(sound, sampling_rate=16_000, return_tensors="pt")
        encoded = self.model.get_encoder()(inputs[self.model.main_input_name])
        prompt = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = prompt or [self.model.config.decoder_start_token_id]
        token_ids = list(prompt)
        for _ in range(NUM_TOKENS):
            output = self.model(
                encoder_outputs=encoded,
                decoder_input_ids=torch.tensor([token_ids]),
                use_cache=False,
            )
            token_ids.append(int(output.logits[0, -1].argmax()))
        return Spoken(
            prompt={"prompt": text, "multi_modal_data": {"audio": [(sound, 16_000)]}},
            prompt_token_ids=prompt,
            token_ids=token_ids[len(prompt) :],
        )


@pytest.fixture(scope="session")
def reference_of(tiny_model: TinyModel) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in known:
            known[family] = Reference(family, tiny_model(family))
        return known[family]

    return get


ReferenceOf = Callable[[str], Reference]


def make_engine(directory: str, **options: Any) -> LLM:
    return make_llm(directory, max_model_len=None, generation_config="none", **options)


def get_params(spoken: Spoken) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=len(spoken.token_ids), ignore_eos=True)


def run(llm: LLM, spoken: Sequence[Spoken]) -> list[RequestOutput]:
    """Run requests that arrive one step after the other, because sounds take time to prepare."""
    prompts, params = [entry.prompt for entry in spoken], list(map(get_params, spoken))
    return run_staggered(llm, prompts, params, steps_between=1)


def get_wrong(outputs: Sequence[RequestOutput], spoken: Sequence[Spoken]) -> list[int]:
    """Return the numbers of the sounds with other tokens than those of Transformers."""
    wrong = []
    for number, (output, entry) in enumerate(zip(outputs, spoken, strict=True)):
        assert output.error is None
        assert list(output.prompt_token_ids) == entry.prompt_token_ids
        if list(output.outputs[0].token_ids) != entry.token_ids:
            wrong.append(number)
    return wrong


def test_the_reference_is_sensitive(reference_of: ReferenceOf) -> None:
    """Sounds have different answers, so that a request with the sound of another would be seen."""
    for family in FAMILIES:
        answers = [tuple(entry.token_ids) for entry in reference_of(family).spoken]
        assert len(set(answers)) >= len(answers) - 1


@pytest.mark.check("alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_one_request_at_a_time(family: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(family)
    llm = make_engine(reference.directory, max_num_seqs=1)
    assert get_wrong(run(llm, reference.spoken), reference.spoken) == []
    assert_nothing_is_left(llm)


@pytest.mark.check("batched")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_requests_with_different_ends(
    family: str, budget: int, reference_of: ReferenceOf
) -> None:
    reference = reference_of(family)
    spoken = [
        replace(entry, token_ids=entry.token_ids[: NUM_TOKENS - 2 * number])
        for number, entry in enumerate(reference.spoken)
    ]
    llm = make_engine(reference.directory, max_num_batched_tokens=budget, max_num_seqs=8)
    trace = Trace(llm)
    assert get_wrong(run(llm, spoken), spoken) == []
    # In small steps, encoders rest after each sound, so that those who decode need not wait.
    assert trace.most_requests_in_a_step > {7: 0, 24: 2, 4096: 4}[budget]
    assert_nothing_is_left(llm)


@pytest.mark.check("encoder hits")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sound_that_was_encoded_before(family: str, reference_of: ReferenceOf) -> None:
    reference = reference_of(family)
    llm = make_engine(reference.directory)
    run(llm, reference.spoken)
    trace = Trace(llm)
    outputs = run(llm, reference.spoken)
    assert get_wrong(outputs, reference.spoken) == []
    assert trace.num_encoded_items == 0
    assert all(output.num_encoder_hits == 1 for output in outputs)


@pytest.mark.check("preempted")
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_are_preempted(family: str, reference_of: ReferenceOf) -> None:
    """The keys and values of a sound are computed again, and so are those of its tokens."""
    reference = reference_of(family)
    llm = make_engine(reference.directory, block_size=8, max_num_seqs=8)
    trace = Trace(llm)
    (pool,) = [
        pool
        for pool, group in zip(
            llm.core.scheduler.kv_cache._pools, llm.core.scheduler.kv_cache.groups, strict=True
        )
        if not group.is_cross
    ]
    held = pool.allocate(pool.num_free - 14)
    assert get_wrong(run(llm, reference.spoken), reference.spoken) == []
    assert trace.num_preemptions > 0
    pool.release(held)
    assert_nothing_is_left(llm)


@pytest.mark.check("graphs")
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps(
    family: str, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = reference_of(family)
    recorders = use_graphs(monkeypatch)
    llm = make_engine(reference.directory, max_num_seqs=8)
    assert get_wrong(run(llm, reference.spoken), reference.spoken) == []
    assert recorders.decoding.num_replays > NUM_TOKENS / 2


def test_equal_prompts_over_different_sounds_share_nothing(reference_of: ReferenceOf) -> None:
    """Prompts of whole blocks, which a decoder alone would take from its prefix cache."""
    reference = reference_of("whisper")
    long = "<|startofprev|>" + " the quick brown fox jumps over the lazy dog." * 2
    text = f"{long}<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    spoken = [reference._ask(make_audio(2.0, seed=50 + number), text) for number in range(3)]
    assert len({tuple(entry.token_ids) for entry in spoken}) == 3
    assert len(spoken[0].prompt_token_ids) > 2 * 8
    llm = make_engine(reference.directory, block_size=8)
    for entry in [*spoken, *spoken]:
        outputs = run(llm, [entry])
        assert get_wrong(outputs, [entry]) == []
        assert outputs[0].num_cached_tokens == 0


def test_block_hashes_carry_the_sound(
    reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tokens under other sounds have other hashes, under the same sound the same."""
    reference = reference_of("whisper")
    hashes: list[list[bytes]] = []
    commit = KVCacheManager.commit

    def note(self: KVCacheManager, request: Request) -> None:
        commit(self, request)
        hashes.append([request.block_hash(0)])

    monkeypatch.setattr(KVCacheManager, "commit", note)
    llm = make_engine(reference.directory, block_size=8)
    text = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|> hello world hello world"
    for seed in (1, 2, 1):
        run(llm, [replace(reference._ask(make_audio(1.0, seed=seed), text), token_ids=[0])])
    first, second, third = (set(entry) for entry in hashes[:3])
    assert first
    assert first & third
    assert not first & second


# ---- deliberate mistakes, which must be seen


def _hear_another_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = InputBatch._gather_new_sounds

    def roll(self: InputBatch, rows: Any) -> list[torch.Tensor]:
        return [sound.roll(1, -1) for sound in gather(self, rows)]

    monkeypatch.setattr(InputBatch, "_gather_new_sounds", roll)


def _hear_less(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tables = InputBatch._make_cross_tables

    def cut(self: InputBatch, *arguments: Any) -> Any:
        tables = make_tables(self, *arguments)
        rows = [replace(row, num_positions=row.num_positions // 2) for row in tables.rows]
        return replace(tables, rows=rows)

    monkeypatch.setattr(InputBatch, "_make_cross_tables", cut)


@pytest.mark.check("controls")
@pytest.mark.parametrize("mistake", [_hear_another_sound, _hear_less])
@pytest.mark.parametrize("family", FAMILIES)
def test_mistakes_are_seen(
    family: str,
    mistake: Callable[[pytest.MonkeyPatch], None],
    reference_of: ReferenceOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = reference_of(family)
    mistake(monkeypatch)
    assert get_wrong(run(make_engine(reference.directory), reference.spoken), reference.spoken)
