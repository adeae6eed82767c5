"""What Transformers itself says: an untouched model, one processor call per prompt, `generate`."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from sensorium import RequestOutput, SamplingParams
from tests.parity.cases import MODALITIES, Case, make_cases
from tests.parity.kept_tokens import KeptTokens, digest_question

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What Transformers makes of a conversation."""

    case: Case
    prompt: dict[str, Any]  # what `LLM.generate` takes
    inputs: Mapping[str, torch.Tensor]  # all that the processor made of the conversation
    prompt_token_ids: list[int]
    token_ids: list[int]
    compute_logits: Callable[[], torch.Tensor]

    @cached_property
    def logits(self) -> torch.Tensor:
        """[tokens, vocabulary]. They are computed when they are first asked for."""
        return self.compute_logits()


class Reference:
    """An untouched model of Transformers with its processor, in float32.

    Without `kept` everything is computed.
    """

    def __init__(self, directory: str, family: str, kept: KeptTokens | None = None) -> None:
        is_text_only = not MODALITIES[family]
        auto = transformers.AutoTokenizer if is_text_only else transformers.AutoProcessor
        self.family = family
        self.directory = directory
        self.kept = kept
        self.processor: Any = auto.from_pretrained(directory)

    @cached_property
    def model(self) -> Any:
        return self._load(torch.float32)

    def _load(self, dtype: torch.dtype) -> Any:
        config = transformers.AutoConfig.from_pretrained(self.directory)
        model_class = getattr(transformers, config.architectures[0])
        return model_class.from_pretrained(self.directory, dtype=dtype).eval()

    @cached_property
    def expected(self) -> tuple[Expected, ...]:
        """Return `NUM_TOKENS` greedy tokens for every case, past the end of sequence."""
        return tuple(self.compute(case) for case in make_cases(self.family))

    def compute(
        self, case: Case, *, num_tokens: int = NUM_TOKENS, **processor_kwargs: Any
    ) -> Expected:
        text, inputs = self._prepare(case, processor_kwargs)
        options = {"ignore_eos": True, "max_new_tokens": num_tokens}
        return Expected(
            case=case,
            prompt={**case.make_prompt(text), "mm_processor_kwargs": processor_kwargs},
            inputs=inputs,
            prompt_token_ids=inputs["input_ids"][0].tolist(),
            token_ids=self.get_tokens(inputs, **options),
            compute_logits=lambda: self.generate(inputs, **options)[1],
        )

    def get_tokens(self, inputs: Mapping[str, torch.Tensor], **options: Any) -> list[int]:
        """Return what `generate` does without the logits, from the file if it is there."""
        if self.kept is None:
            return self.generate(inputs, **options)[0]
        digest = digest_question(Path(self.directory), inputs, options)
        return self.kept.get(digest, lambda: self._generate(inputs, **options)[0])

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

    def generate(
        self, inputs: Mapping[str, torch.Tensor], **options: Any
    ) -> tuple[list[int], torch.Tensor]:
        """Return greedy tokens, and the logits that they were chosen from.

        Kept tokens of the same question must be equal.
        """
        token_ids, logits = self._generate(inputs, **options)
        if self.kept is not None:
            self.kept.check(digest_question(Path(self.directory), inputs, options), token_ids)
        return token_ids, logits

    @torch.inference_mode()
    def _generate(
        self, inputs: Mapping[str, torch.Tensor], *, ignore_eos: bool, **options: Any
    ) -> tuple[list[int], torch.Tensor]:
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
