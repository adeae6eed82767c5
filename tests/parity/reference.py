"""What Transformers itself says: an untouched model, one processor call per prompt, `generate`."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers

from sensorium import RequestOutput, SamplingParams
from tests.parity.cases import MODALITIES, Case, make_cases

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What Transformers makes of a conversation and answers to it."""

    case: Case
    prompt: dict[str, Any]
    inputs: Mapping[str, torch.Tensor]  # what the processor makes of the conversation
    prompt_token_ids: list[int]
    token_ids: list[int]
    logits: torch.Tensor  # [tokens, vocabulary]


class Reference:
    def __init__(self, directory: str, family: str) -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        model_class = getattr(transformers, config.architectures[0])
        is_text_only = not MODALITIES[family]
        auto = transformers.AutoTokenizer if is_text_only else transformers.AutoProcessor
        self.family = family
        self.directory = directory
        self.model: Any = model_class.from_pretrained(directory, dtype=torch.float32).eval()
        self.processor: Any = auto.from_pretrained(directory)

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """Return `NUM_TOKENS` greedy tokens for every case, past the end of sequence."""
        return tuple(self.compute(case) for case in make_cases(self.family))

    def compute(
        self, case: Case, *, num_tokens: int = NUM_TOKENS, **processor_kwargs: Any
    ) -> Expected:
        text, inputs = self._prepare(case, processor_kwargs)
        tokens, logits = self.generate(inputs, max_new_tokens=num_tokens, ignore_eos=True)
        return Expected(
            case=case,
            prompt={**case.make_prompt(text), "mm_processor_kwargs": processor_kwargs},
            inputs=inputs,
            prompt_token_ids=inputs["input_ids"][0].tolist(),
            token_ids=tokens,
            logits=logits,
        )

    def _prepare(
        self, case: Case, processor_kwargs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, torch.Tensor]]:
        """The prompt that the chat template gives, and what the processor makes of it."""
        if self.family == "voxtral":
            # Its processor makes tokens of conversations, and never shows the text between.
            inputs = self.processor.apply_chat_template(make_voxtral_messages(case))
            return make_voxtral_text(case), inputs
        text = self.processor.apply_chat_template(
            case.messages, add_generation_prompt=True, tokenize=False
        )
        return text, self._process(case, text, processor_kwargs)

    def _process(
        self, case: Case, text: str, processor_kwargs: Mapping[str, Any]
    ) -> Mapping[str, torch.Tensor]:
        media: dict[str, Any] = {**processor_kwargs}
        if case.images:
            media["images"] = case.images
        if case.videos:
            media |= {"videos": [case.videos], "do_sample_frames": False}
        if case.audio:
            media |= {"audio": case.audio, "sampling_rate": 16_000}
        inputs: Mapping[str, torch.Tensor] = self.processor(
            text=[text], return_tensors="pt", **media
        )
        return inputs

    @torch.inference_mode()
    def generate(
        self, inputs: Mapping[str, torch.Tensor], *, ignore_eos: bool, **options: Any
    ) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens, and the logits that they were chosen from."""
        if hasattr(self.model.base_model, "rope_deltas"):
            self.model.base_model.rope_deltas = None  # left over from the last call
        config = self.model.generation_config
        eos_token_id = config.eos_token_id
        config.eos_token_id = None if ignore_eos else eos_token_id
        try:
            output = self.model.generate(
                **inputs,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        finally:
            config.eos_token_id = eos_token_id
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens, torch.cat(output.logits)


def make_voxtral_messages(case: Case) -> list[dict[str, Any]]:
    import soundfile

    content = []
    for part in case.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            file = io.BytesIO()
            soundfile.write(file, part, 16_000, format="wav", subtype="FLOAT")
            content.append({"type": "audio", "base64": b64encode(file.getvalue()).decode()})
    return [{"role": "user", "content": content}]


def make_voxtral_text(case: Case) -> str:
    parts = [part if isinstance(part, str) else "[BEGIN_AUDIO][AUDIO]" for part in case.parts]
    return f"<s>[INST]{''.join(parts)}[/INST]"


ReferenceOf = Callable[[str], Reference]


def get_differences(outputs: Sequence[RequestOutput], expected: Sequence[Expected]) -> list[str]:
    """Return the names of the cases that have other tokens than the reference.

    That the prompts are equal and that nothing failed is asserted: a failure is not a difference.
    """
    assert len(outputs) == len(expected)
    names = []
    for output, entry in zip(outputs, expected, strict=True):
        assert output.error is None, entry.case.name
        assert list(output.prompt_token_ids) == entry.prompt_token_ids, entry.case.name
        assert len(output.outputs[0].token_ids) == len(entry.token_ids), entry.case.name
        if list(output.outputs[0].token_ids) != entry.token_ids:
            names.append(entry.case.name)
    return names
