"""Audio that is being transcribed: its features, and the prompts of its windows.

The features are computed once, and cached under the hash of the audio. A window's name is that hash
and its place, so the encoder's output is found again when the same audio comes again.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sensorium.multimodal.media import MediaItem, ProcessingOptions
from sensorium.multimodal.pipeline import CachedItem, MediaPipeline
from sensorium.multimodal.processing.audio import NUM_SAMPLES, AudioProcessor
from sensorium.multimodal.processing.ctc_transducer import PIECES
from sensorium.speech.frames import Piece
from sensorium.speech.options import SpeechOptions
from sensorium.speech.windows import WindowRequest, WindowResult
from sensorium.types.errors import InvariantError
from sensorium.types.multimodal import PlaceholderRange
from sensorium.types.outputs import RequestOutput
from sensorium.types.request import (
    ALIGNMENT,
    FRAMES,
    SCORED_LOGPROB,
    Prompt,
    RenderedPrompt,
    TensorResult,
)
from sensorium.types.sampling import SamplingParams, SpeechRules
from sensorium.utils.pausing import Pausing

_MODALITY = "audio"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScope:
    """The fields that all prompts of a transcript share: the cache salt and the priority."""

    cache_salt: str | None = None
    priority: int = 0


class AudioSource(Protocol):
    """Audio that is open for one transcript, and makes the prompts of its windows."""

    @property
    def duration_s(self) -> float: ...

    @property
    def num_frames(self) -> int:
        """Return the number of frames, in the unit of the model's rules."""
        ...

    def make_prompt(self, request: WindowRequest) -> Prompt: ...

    def restore_pausing(self, cancelled: Future[None] | None = None, /) -> Pausing[None]:
        """Decode the audio again, after a prompt named media that no cache has any more."""
        ...

    def release(self) -> None:
        """Release the references to cached media. This is called once."""
        ...


class WholeAudio:
    """The features of one audio item, from which the windows of its transcript are cut."""

    def __init__(
        self,
        item: CachedItem,
        processor: AudioProcessor,
        scope: PromptScope,
        pipeline: MediaPipeline,
    ) -> None:
        kwargs = item.handle.kwargs
        if kwargs is None:
            raise InvariantError(f"audio {item.handle.mm_hash} has no features")
        self._item = item
        self._pipeline = pipeline
        self._mm_hash = item.handle.mm_hash
        self._processor = processor
        self._kwargs = kwargs
        self._features: torch.Tensor = kwargs[processor.input_name]
        self._num_samples = int(kwargs[NUM_SAMPLES])
        self._scope = scope

    @property
    def duration_s(self) -> float:
        return self._num_samples / self._processor.sampling_rate

    @property
    def num_frames(self) -> int:
        """Return the number of frames without the padding of short audio."""
        num_frames = math.ceil(self._num_samples / self._processor.samples_per_frame)
        return min(num_frames, self._features.shape[-1])

    @property
    def num_positions(self) -> int:
        return self._processor.count_positions(self._kwargs)

    def get_samples(self) -> npt.NDArray[np.float32]:
        """Return the samples, for a model that takes them unprocessed."""
        return self._features[0].numpy()

    def get_pieces(self) -> list[Piece]:
        return [Piece(*map(int, row)) for row in self._kwargs[PIECES]]

    def make_prompt(self, request: WindowRequest) -> RenderedPrompt:
        window = self._processor.cut_window(self._kwargs, request.first_frame, request.num_frames)
        num_positions = self._processor.count_positions(window)
        prompt: RenderedPrompt = {
            "prompt_token_ids": request.prompt_token_ids,
            "mm_hashes": {_MODALITY: [f"{self._mm_hash}@{request.first_frame}"]},
            "mm_placeholders": {_MODALITY: [PlaceholderRange(0, num_positions)]},
            "mm_kwargs": {_MODALITY: [window]},
            "priority": self._scope.priority,
        }
        if self._scope.cache_salt is not None:
            prompt["cache_salt"] = self._scope.cache_salt
        return prompt

    def restore_pausing(self, _cancelled: Future[None] | None = None, /) -> Pausing[None]:
        """Do nothing, because every prompt brings its tensors."""
        yield from ()

    def release(self) -> None:
        self._pipeline.release([self._item])


class WithAudioProcessor:
    """A base class of models that process audio as a whole, before windows are cut out of it."""

    __slots__ = ()
    processor: AudioProcessor

    def open_pausing(
        self,
        item: MediaItem,
        *,
        pipeline: MediaPipeline,
        scope: PromptScope,
        cancelled: Future[None] | None = None,
    ) -> Pausing[WholeAudio]:
        """Compute the features of an audio item. The caller has to release the result."""
        options = ProcessingOptions(cache_salt=scope.cache_salt)
        (processed,) = yield from pipeline.process_pausing([item], options, cancelled=cancelled)
        return WholeAudio(processed, self.processor, scope, pipeline)


def make_params(request: WindowRequest, options: SpeechOptions) -> SamplingParams:
    """Return the sampling parameters for one window, with those that the caller has chosen."""
    if request.needs_frames:  # nothing is sampled
        return SamplingParams(temperature=0.0, max_tokens=1)
    return replace(
        options.sampling if request.allowed is None else SamplingParams(),
        n=1,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        min_tokens=0,
        allowed_token_ids=request.allowed,
        stop=(),
        logprobs=0,
        prompt_logprobs=None,
        speech=SpeechRules(
            timestamps=request.timestamps,
            bans=request.bans,
            scored_token=request.scored_token,
            needs_alignment=request.needs_alignment,
        ),
    )


def read_result(output: RequestOutput) -> WindowResult:
    (completion,) = output.outputs
    results = {name: _read_tensor(result) for name, result in output.results.items()}
    if (frames := results.get(FRAMES)) is not None:
        return WindowResult(frames=frames)
    logprob = results.get(SCORED_LOGPROB)
    entries = zip(completion.token_ids, completion.logprobs or (), strict=True)
    return WindowResult(
        token_ids=completion.token_ids,
        prompt_token_ids=output.prompt_token_ids,
        logprobs=tuple(entry[token_id].logprob for token_id, entry in entries),
        scored_probability=None if logprob is None else math.exp(logprob),
        alignment=results.get(ALIGNMENT),
    )


def _read_tensor(result: TensorResult) -> npt.NDArray[np.float32]:
    return np.frombuffer(result.values, dtype=np.float32).reshape(result.shape)
