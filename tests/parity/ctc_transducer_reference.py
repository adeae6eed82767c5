"""CTC/transducer models as Transformers runs them, and what an engine is compared on.

No pytest here: the checks on a GPU also use it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.multimodal.processing.ctc_transducer import CtcTransducerParts
from sensorium.types.request import FRAMES
from tests.parity.cases import Audio, make_audio
from tests.support.engine import make_llm

LETTERS = (
    "wav2vec2",
    "wav2vec2_layer",
    "wav2vec2-bert",
    "wav2vec2-conformer",
    "hubert",
    "wavlm",
    "data2vec-audio",
    "unispeech",
    "unispeech-sat",
    "sew",
)
CTC = (*LETTERS, "parakeet_ctc")
TRANSDUCERS = ("parakeet_tdt", "parakeet_rnnt")
FAMILIES = (*CTC, *TRANSDUCERS)
# Padding changes these models' output: one has no mask, the others ignore it in some layers.
WITHOUT_PADDING = ("wav2vec2", "wav2vec2-conformer", "data2vec-audio", "sew")
SECONDS = (1.0, 2.5, 3.0, 0.7, 2.2, 1.4, 2.9, 2.5)
RATE = 16_000

Rows = list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A recording, and what Transformers finds in it."""

    audio: Audio
    text: str
    # CTC: the token of each frame. Transducers: the id, first frame and frames of each token.
    rows: Rows
    scores: list[float]  # of the rows of a CTC model; a transducer returns none


class CtcTransducerReference:
    """An untouched model of Transformers in float32."""

    def __init__(self, directory: str, device: str = "cpu") -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        self.directory = directory
        self.device = device
        self.model = getattr(transformers, config.architectures[0]).from_pretrained(directory)
        self.model.eval().to(device)
        parts = CtcTransducerParts.from_pretrained(directory, trust_remote_code=False)
        self.extractor, self.tokenizer = parts.feature_extractor, parts.tokenizer

    @cached_property
    def spoken(self) -> list[Spoken]:
        audios = [make_audio(seconds, seed=index) for index, seconds in enumerate(SECONDS)]
        return [self.transcribe(audio) for audio in audios]

    @torch.inference_mode()
    def transcribe(self, audio: Audio) -> Spoken:
        inputs = self.extractor(audio, sampling_rate=RATE, return_tensors="pt").to(self.device)
        if hasattr(self.model, "joint"):
            return self._transduce(audio, inputs)
        scores = self.model(**inputs).logits[0].log_softmax(-1).cpu()
        best, token_ids = scores[: self._count_frames(inputs, len(scores))].max(-1)
        return Spoken(
            audio=audio,
            text=self.tokenizer.decode(token_ids),
            rows=[(token_id,) for token_id in token_ids.tolist()],
            scores=best.tolist(),
        )

    def _count_frames(self, inputs: Any, num_frames: int) -> int:
        """Return the number of frames without the padding, which some extractors add."""
        mask = inputs.get("attention_mask")
        if mask is None:
            return num_frames
        if hasattr(self.model, "_get_output_attention_mask"):
            return int(self.model._get_output_attention_mask(mask, num_frames).sum())
        return int(self.model._get_feat_extract_output_lengths(mask.sum(-1)))

    def _transduce(self, audio: Audio, inputs: Any) -> Spoken:
        output = self._generate(inputs)
        sequence, durations = output.sequences[0].tolist(), output.durations[0].tolist()
        starts = np.cumsum([0, *durations[:-1]]).tolist()
        config = self.model.config
        ignored = {config.blank_token_id, config.pad_token_id}
        rows = zip(sequence, starts, durations, strict=True)
        return Spoken(
            audio=audio,
            text=self.tokenizer.decode(sequence, group_tokens=False, skip_special_tokens=True),
            rows=[row for row in rows if row[0] not in ignored],
            scores=[],
        )

    def _generate(self, inputs: Any) -> Any:
        with warnings.catch_warnings():  # its own limit is the one that is wanted
            warnings.filterwarnings("ignore", "Using the model-agnostic default `max_length`")
            return self.model.generate(**inputs)

    @torch.inference_mode()
    def get_times(self, audio: Audio, head: str) -> list[tuple[float, float]]:
        """Return the times of each token of a transducer, as Transformers' processor has them."""
        processor: Any = transformers.ParakeetProcessor.__new__(transformers.ParakeetProcessor)
        processor.feature_extractor, processor.tokenizer = self.extractor, self.tokenizer
        processor.blank_token, processor.decoder_type = "<blank>", head
        processor.blank_token_id = self.model.config.blank_token_id
        inputs = self.extractor(audio, sampling_rate=RATE, return_tensors="pt").to(self.device)
        output = self._generate(inputs)
        _, (times,) = processor.decode(
            output.sequences, durations=output.durations, skip_special_tokens=True
        )
        return [(entry["start"], entry["end"]) for entry in times]


def make_endless(source: str, directory: Path, **limits: int) -> str:
    """Make a copy of a transducer that never says that a frame is over.

    It emits a token at every step, and a TDT advances by no frames. `limits` are added to its
    generation config.
    """
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    bias = weights["joint.head.bias"]
    bias[config["blank_token_id"]] = -1e3
    bias[config["vocab_size"] :][:1] = 1e3  # of a duration of 0 frames, if it has durations
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **limits}))
    return str(directory)


def make_engine(directory: str, **options: Any) -> LLM:
    return make_llm(directory, max_model_len=None, **options)


def run(llm: LLM, spoken: Sequence[Spoken]) -> list[RequestOutput]:
    """Run a request for each recording, all of them together."""
    prompts = [
        {"prompt_token_ids": [0], "multi_modal_data": {"audio": [(entry.audio, RATE)]}}
        for entry in spoken
    ]
    request_ids = [llm._add(prompt, SamplingParams(max_tokens=1)) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    while llm.core.has_requests:
        outputs |= {output.request_id: output for output in llm._step()}
    return [outputs[request_id] for request_id in request_ids]


def read_rows(output: RequestOutput) -> tuple[Rows, list[float]]:
    """Return the rows of an engine's table, without the log-probabilities, and these."""
    assert output.error is None
    frames = output.results[FRAMES]
    table = np.frombuffer(frames.values, np.float32).reshape(frames.shape)
    rows = np.delete(table, 1, axis=1).astype(int).tolist()
    return [tuple(row) for row in rows], table[:, 1].tolist()


def get_wrong(outputs: Sequence[RequestOutput], spoken: Sequence[Spoken]) -> list[int]:
    """Return the indices of the recordings with other results than those of Transformers."""
    wrong = []
    for number, (output, entry) in enumerate(zip(outputs, spoken, strict=True)):
        rows, scores = read_rows(output)
        is_equal = rows == entry.rows
        if not is_equal or (entry.scores and not np.allclose(scores, entry.scores, atol=1e-4)):
            wrong.append(number)
    return wrong
