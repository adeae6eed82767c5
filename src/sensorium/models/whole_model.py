"""Runs a model as Transformers alone would: its own `generate`, its own attention, its own cache.

This is the reference for the engine. The model is forced to generate given tokens, so that both are
compared on the same text at every position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from sensorium.models.hf_model import HfModel

_MAX_ROWS = 64  # the number of positions that have logits in memory at the same time
# A model's own attention -> another one, to measure how much rounding alone changes.
_OTHER_ATTENTIONS = {"sdpa": "eager"}
# The output of the model's processor for a prompt: name -> tensor.
Inputs = Mapping[str, torch.Tensor]
# The tokens to score at each position, from that of the second prompt token to that of the last
# output token.
WantedIds = Sequence[Sequence[int]]


class WholeModel:
    """A model that runs as Transformers wrote it, without this engine, for comparisons."""

    def __init__(self, hf_model: HfModel) -> None:
        self._hf_model = hf_model

    def score(
        self, inputs: Inputs, output_ids: Sequence[int], wanted_ids: WantedIds
    ) -> list[float]:
        """Return the log-probabilities of `wanted_ids`, in this order, for a prompt and output."""
        with self._hf_model.own_attention():
            return self._score(inputs, output_ids, wanted_ids)

    def score_otherwise(
        self, inputs: Inputs, output_ids: Sequence[int], wanted_ids: WantedIds
    ) -> list[float]:
        """Return the same as `score`, computed by the same model with different rounding.

        The difference between both shows how much rounding alone changes. The decoder uses
        Transformers' eager attention instead of PyTorch's. A model that has only the eager one gets
        embeddings that are off by about one rounding error instead.
        """
        other = _OTHER_ATTENTIONS.get(self._hf_model.own_attention_name)
        with ExitStack() as stack:
            stack.enter_context(self._hf_model.own_attention(other))
            if other is None:
                stack.enter_context(_disturb(self._hf_model.embedding))
            return self._score(inputs, output_ids, wanted_ids)

    @torch.inference_mode()
    def _score(
        self, inputs: Inputs, output_ids: Sequence[int], wanted_ids: WantedIds
    ) -> list[float]:
        # A model that draws random numbers must draw the same ones each time: `score_otherwise` is
        # to differ by rounding alone.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            hidden, logits = self._generate(inputs, output_ids)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        found: list[float] = []
        for first in range(0, num_prompt_tokens - 1, _MAX_ROWS):
            # The wrapper's logits equal the model's own, as was checked when it was loaded.
            last = min(first + _MAX_ROWS, num_prompt_tokens - 1)
            found += _pick(self._hf_model.logits(hidden[first:last]), wanted_ids[first:last])
        return found + _pick(logits.float(), wanted_ids[num_prompt_tokens - 1 :])

    def _generate(
        self, inputs: Inputs, output_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prompt's hidden states [P, width] and the output's logits [n, vocab]."""
        hf_model, states = self._hf_model, []
        hf_model.forget_positions()
        model = hf_model.model
        hook = hf_model.decoder.register_forward_hook(
            lambda _module, _inputs, output: states.append(output.last_hidden_state[0])
        )
        eos_token_id = model.generation_config.eos_token_id
        # The output is given to its last token, so an end token must not stop it early.
        model.generation_config.eos_token_id = None
        try:
            output = model.generate(
                **{name: hf_model.to_model(tensor) for name, tensor in inputs.items()},
                max_new_tokens=len(output_ids),
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                logits_processor=LogitsProcessorList(
                    [_Follow(output_ids, num_prompt_tokens=inputs["input_ids"].shape[1])]
                ),
            )
        finally:
            hook.remove()
            model.generation_config.eos_token_id = eos_token_id
        return states[0], torch.cat(output.logits)


class _Follow(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that forces `generate` to choose the given tokens, one after another."""

    def __init__(self, token_ids: Sequence[int], *, num_prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_id = self._token_ids[input_ids.shape[1] - self._num_prompt_tokens]
        followed = torch.full_like(scores, -torch.inf)
        followed[:, token_id] = 0.0
        return followed


def _pick(logits: torch.Tensor, wanted_ids: WantedIds) -> list[float]:
    logprobs = logits.log_softmax(-1)
    rows = [row for row, token_ids in enumerate(wanted_ids) for _ in token_ids]
    columns = [token_id for token_ids in wanted_ids for token_id in token_ids]
    return logprobs[rows, columns].tolist()


@contextmanager
def _disturb(embedding: Any) -> Iterator[None]:
    """Make an embedding's outputs off by about one rounding, always the same, in a `with`."""
    generator = torch.Generator().manual_seed(0)

    def change(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output.device) * 2 - 1
        return output * (1 + signs * torch.finfo(output.dtype).eps).to(output.dtype)

    hook = embedding.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()
