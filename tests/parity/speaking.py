"""Speech models as Transformers runs them, and the requests that an engine is compared on.

No pytest here: the checks on a GPU also use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.types.request import TextPrompt
from tests.parity.cases import Audio, make_audio
from tests.support.engine import make_llm, run_staggered

FAMILIES = ("whisper", "whisper_en", "moonshine")
SECONDS = (1.0, 2.5, 3.0, 0.7, 2.2, 1.4, 2.9, 0.3)
NUM_TOKENS = 20


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A recording with the prompt of its decoder, and what Transformers generates after it."""

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


class SpeechReference:
    """An untouched model of Transformers in float32, asked for its likeliest tokens."""

    def __init__(self, family: str, directory: str, device: str = "cpu") -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        model_class = getattr(transformers, config.architectures[0])
        self.directory = directory
        self.device = device
        self.model = model_class.from_pretrained(directory).eval().to(device)
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        prompts = make_prompts(family)
        self.spoken = [
            self.ask(make_audio(seconds, seed=index), prompts[index % len(prompts)])
            for index, seconds in enumerate(SECONDS)
        ]

    @torch.inference_mode()
    def ask(self, audio: Audio, text: str) -> Spoken:
        extractor = self.processor.feature_extractor
        inputs = extractor(audio, sampling_rate=16_000, return_tensors="pt")
        encoded = self.model.get_encoder()(inputs[self.model.main_input_name].to(self.device))
        prompt = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = prompt or [self.model.config.decoder_start_token_id]
        token_ids = list(prompt)
        for _ in range(NUM_TOKENS):
            output = self.model(
                encoder_outputs=encoded,
                decoder_input_ids=torch.tensor([token_ids], device=self.device),
                use_cache=False,
            )
            token_ids.append(int(output.logits[0, -1].argmax()))
        return Spoken(
            prompt={"prompt": text, "multi_modal_data": {"audio": [(audio, 16_000)]}},
            prompt_token_ids=prompt,
            token_ids=token_ids[len(prompt) :],
        )


def make_engine(directory: str, **options: Any) -> LLM:
    return make_llm(directory, max_model_len=None, generation_config="none", **options)


def get_params(spoken: Spoken) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=len(spoken.token_ids), ignore_eos=True)


def run(llm: LLM, spoken: Sequence[Spoken]) -> list[RequestOutput]:
    """Run requests that arrive one step after the other, because audio takes time to prepare."""
    prompts, params = [entry.prompt for entry in spoken], list(map(get_params, spoken))
    return run_staggered(llm, prompts, params, steps_between=1)


def get_wrong(outputs: Sequence[RequestOutput], spoken: Sequence[Spoken]) -> list[int]:
    """Return the indices of the recordings with other tokens than those of Transformers."""
    wrong = []
    for number, (output, entry) in enumerate(zip(outputs, spoken, strict=True)):
        assert output.error is None
        assert list(output.prompt_token_ids) == entry.prompt_token_ids
        if list(output.outputs[0].token_ids) != entry.token_ids:
            wrong.append(number)
    return wrong
