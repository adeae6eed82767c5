"""Computes alignments and scores for transcripts, in addition to the next token.

An alignment is the attention of a prompt's tokens to the audio, in the model's heads that align
text with audio. A score is the log-probability of one token at one place of a prompt. A prompt may
take several steps, so `RequestState` keeps these results until the first output token is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sensorium.models.hf_model import HfModel
from sensorium.types.request import ALIGNMENT, SCORED_LOGPROB, TensorResult
from sensorium.utils.arrays import Download, to_device
from sensorium.worker.input_batch import Row
from sensorium.worker.request_states import RequestState


class StepResults:
    """Tensors that a step has computed for requests, by request id and name."""

    def __init__(self, tensors: Mapping[tuple[str, str], torch.Tensor]) -> None:
        self._download = Download(tensors)

    def read(self) -> dict[str, dict[str, TensorResult]]:
        """Wait for the device if necessary, and return the results by request id."""
        found: dict[str, dict[str, TensorResult]] = {}
        for (request_id, name), tensor in self._download.read().items():
            values = tensor.float().numpy()
            result = TensorResult(shape=values.shape, values=values.tobytes())
            found.setdefault(request_id, {})[name] = result
        return found


NOTHING_FOUND = StepResults({})


class Aligner:
    """A collector of alignments and scores in the steps of a model with cross-attention."""

    def __init__(self, hf_model: HfModel) -> None:
        self._hf_model = hf_model
        # The index of a layer with cross-attention -> its heads that align text with audio.
        self._heads = {
            index: torch.tensor(heads, device=hf_model.device)
            for index, heads in hf_model.alignment_heads.items()
        }
        self._rows: Sequence[Row] = ()
        self._observed: Sequence[int] = ()

    def begin(self, rows: Sequence[Row]) -> None:
        """Record the requests of a step before the step is computed."""
        self._rows = rows
        self._observed = [
            index
            for index, (_, state) in enumerate(rows)
            if state.params.speech is not None and state.params.speech.needs_alignment
        ]

    def get_observed(self, layer_index: int) -> Sequence[int]:
        """Return the indices of the rows for which this layer's attention is to be kept."""
        return self._observed if layer_index in self._heads else ()

    def observe(
        self,
        layer_index: int,
        scaling: float | None,
        row: int,
        query: torch.Tensor,
        keys: torch.Tensor,
    ) -> None:
        """Keep the attention of a request's tokens [1, H, N, D] to its audio [1, H, S, D]."""
        state, heads = self._rows[row][1], self._heads[layer_index]
        chosen, others = query[0].index_select(0, heads), keys[0].index_select(0, heads)
        scale = chosen.shape[-1] ** -0.5 if scaling is None else scaling
        weights = torch.matmul(chosen.float() * scale, others.float().transpose(1, 2)).softmax(-1)
        state.attention.setdefault(layer_index, []).append(weights)

    def finish(self, hidden: torch.Tensor) -> StepResults:
        """Score tokens from a step's hidden states [N, width], and return the complete results."""
        self._score(hidden)
        tensors: dict[tuple[str, str], torch.Tensor] = {}
        for scheduled, state in self._rows:
            is_first = state.params.speech is not None and state.num_output_tokens == 0
            if is_first and scheduled.num_sampled:
                tensors |= self._take(scheduled.request_id, state)
        return StepResults(tensors) if tensors else NOTHING_FOUND

    def _score(self, hidden: torch.Tensor) -> None:
        """Compute the log-probabilities that requests ask for at positions of this step."""
        places: list[int] = []  # rows of `hidden`
        scored: list[tuple[RequestState, int]] = []
        start = 0
        for scheduled, state in self._rows:
            asked = None if state.params.speech is None else state.params.speech.scored_token
            if asked is not None and state.num_output_tokens == 0:
                offset = asked[0] - scheduled.num_computed_tokens
                if 0 <= offset < scheduled.num_new_tokens:
                    places.append(start + offset)
                    scored.append((state, asked[1]))
            start += scheduled.num_new_tokens
        if not places:
            return
        chosen = hidden.index_select(0, to_device(torch.tensor(places), hidden.device))
        logprobs = self._hf_model.logits(chosen).log_softmax(-1)
        for row, (state, token_id) in enumerate(scored):
            state.scored_logprob = logprobs[row, token_id]

    def _take(self, request_id: str, state: RequestState) -> dict[tuple[str, str], torch.Tensor]:
        tensors = {}
        if state.scored_logprob is not None:
            tensors[request_id, SCORED_LOGPROB] = state.scored_logprob
        if state.attention:
            layers = [torch.cat(parts, dim=1) for _, parts in sorted(state.attention.items())]
            tensors[request_id, ALIGNMENT] = torch.cat(layers)
            state.attention = {}
        return tensors
