"""Runs steps of models that take streaming audio, such as Voxtral-Realtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sensorium.models.streaming import StreamingModel
from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest
from sensorium.types.scheduling import ScheduledRequest, SchedulerOutput
from sensorium.worker.audio_queues import AudioQueue, encode_audios
from sensorium.worker.model_runner import ModelRunner


class StreamingRunner(ModelRunner):
    """A runner of steps in which every token has a part of the request's audio.

    A request brings all of its audio with it, or `append_audio` adds it part by part.
    """

    def __init__(self, hf_model: StreamingModel, **parts: Any) -> None:
        super().__init__(hf_model, **parts)
        self._streaming = hf_model
        self._audios: dict[str, AudioQueue] = {}
        self._input_batch = replace(self._input_batch, audios=self._audios)

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.stream is None:
            raise RequestError("this model needs audio: send it with the prompt")
        super().add_request(request)
        self._audios[request.request_id] = AudioQueue()

    def append_audio(self, request_id: str, features: torch.Tensor) -> int:
        self._audios[request_id].append(features)
        return features.shape[-1] // self._streaming.frames_per_token

    def forget_request(self, request_id: str) -> None:
        super().forget_request(request_id)
        self._audios.pop(request_id, None)

    def _apply_changes(self, output: SchedulerOutput) -> None:
        for request_id, count in output.dropped_tokens:
            if request_id in self._states:  # it may have ended since
                self._states[request_id].drop_tokens(count, self._block_size)
                self._audios[request_id].renumber(count)
        super()._apply_changes(output)
        for started in output.started:
            self._load_whole(started.request)

    def _load_whole(self, request: EngineCoreRequest) -> None:
        """Take the audio that a request brought with it, from its beginning."""
        if request.mm_features:
            item = self._payloads[request.mm_features[0].mm_hash]
            queue = self._audios[request.request_id] = AudioQueue()
            queue.append(item["input_features"][0])

    def _get_left_out(
        self, scheduled: Sequence[ScheduledRequest], failed: Mapping[str, str]
    ) -> dict[str, RequestError]:
        del failed  # streaming audio is never in the encoder cache
        wanted = {
            entry.request_id: (
                self._audios[entry.request_id],
                entry.num_computed_tokens + entry.num_new_tokens,
            )
            for entry in scheduled
            if self._states[entry.request_id].failure is None
        }
        errors = encode_audios(self._streaming, wanted)
        left_out: dict[str, RequestError] = {}
        for entry in scheduled:
            state = self._states[entry.request_id]
            state.failure = state.failure or errors.get(entry.request_id)
            if state.failure is not None:
                left_out[entry.request_id] = state.failure
        return left_out
