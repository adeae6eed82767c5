"""Runs steps of CTC/transducer models, which only encode.

The encoder's output for an audio item is the whole result. A scheduled request gets this output and
a token that ends the request. No keys and values are kept, and nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.models.ctc_transducer import CtcTransducerModel
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import MultiModalKwargsItem
from sensorium.types.request import FRAMES, EngineCoreRequest
from sensorium.types.scheduling import ModelRunnerOutput, StepMode
from sensorium.worker.alignment import StepResults
from sensorium.worker.encoder_runner import EncoderRunner
from sensorium.worker.input_batch import Row
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.model_runner import LaunchedStep, ModelRunner
from sensorium.worker.request_states import RequestState


class CtcTransducerRunner(ModelRunner):
    """A `ModelRunner` for CTC/transducer models, which handles requests and runs encoders only."""

    def __init__(
        self,
        hf_model: CtcTransducerModel,
        *,
        block_size: int,
        payloads: Mapping[str, MultiModalKwargsItem],
    ) -> None:
        device, dtype = hf_model.device, hf_model.dtype
        super().__init__(
            hf_model,
            kv_cache=KVCache((), (), block_size=block_size, dtype=dtype, device=device),
            groups=(),
            block_size=block_size,
            attention=TorchPagedAttention(block_size=block_size, dtype=dtype),
            payloads=payloads,
        )
        self._blank_id = hf_model.blank_id
        self.encoder_runner = EncoderRunner(
            hf_model, self.encoder_cache, get_batch_key=hf_model.get_batch_key
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Prepare a new request, or raise `RequestError` if it has `logprobs` or a grammar."""
        # The answer would lack what was asked for, because no token is chosen.
        for name in ("logprobs", "structured_outputs"):
            if getattr(request.sampling_params, name) is not None:
                reason = "this model chooses no tokens, it finds what is said: leave it out"
                raise RequestError(reason, path=(name,))
        super().add_request(request)

    def _get_needed_items(self, _entry: object, state: RequestState) -> Sequence[int]:
        return range(len(state.request.mm_features))

    def _find_misfit(self, _state: RequestState, _mm_index: int) -> str | None:
        """Return `None`: any number of embeddings fits."""
        return None

    def _run(self, rows: Sequence[Row], step: LaunchedStep) -> LaunchedStep:
        """Begin to copy the encoder outputs of the scheduled requests to the host."""
        tables = {
            (entry.request_id, FRAMES): self.encoder_cache[state.get_encoder_key(0)]
            for entry, state in rows
        }
        return replace(step, results=StepResults(tables), mode=StepMode.EAGER_NO_GRAPHS)

    def finish(self, step: LaunchedStep) -> ModelRunnerOutput:
        output = super().finish(step)
        return replace(output, token_ids=dict.fromkeys(output.results, (self._blank_id,)))
