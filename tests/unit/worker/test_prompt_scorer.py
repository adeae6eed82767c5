"""Prompt tokens are scored where they stand in the batch, and only those that are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from sensorium.worker import prompt_scorer
from sensorium.worker.input_batch import Row
from sensorium.worker.prompt_scorer import PromptScorer

from .factories import GREEDY, make_request, make_scheduled, make_state

VOCAB_SIZE = 6


class PlainHead:
    """The hidden states are the logits."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(hidden))
        return hidden


def make_hidden(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


def make_row(
    name: str,
    prompt: Sequence[int],
    window: tuple[int, int],
    count: int | None,
    output: tuple[int, ...] = (),
) -> Row:
    params = replace(GREEDY, prompt_logprobs=count)
    request = make_request(tuple(prompt), request_id=name, params=params)
    state = make_state(request, output_token_ids=output)
    return make_scheduled(name, *window), state


@pytest.mark.parametrize("max_rows", [1, 2, 128])
def test_each_position_scores_the_next_token(
    monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    monkeypatch.setattr(prompt_scorer, "MAX_ROWS", max_rows)
    head = PlainHead()
    rows = [
        make_row("decoding", (1, 2), (3, 4), 2, output=(5, 5)),
        make_row("silent", (1, 2, 3), (0, 3), None),
        make_row("whole", (1, 2, 3), (0, 3), 2),
        make_row("chunk", (5, 4, 3, 2, 1), (1, 3), 0),
    ]
    hidden = make_hidden(1 + 3 + 3 + 2)
    entries = PromptScorer(head).score(hidden, rows).read()  # type: ignore[arg-type]
    logprobs = hidden.log_softmax(-1)
    found = {name: [e.logprob for e in scored] for name, scored in entries.items()}
    assert found.keys() == {"whole", "chunk"}
    assert found["whole"] == pytest.approx([float(logprobs[4, 2]), float(logprobs[5, 3])])
    assert found["chunk"] == pytest.approx([float(logprobs[7, 3]), float(logprobs[8, 2])])
    assert [e.top_token_ids for e in entries["whole"]] == [
        tuple(logprobs[row].topk(2).indices.tolist()) for row in (4, 5)
    ]
    assert all(e.top_token_ids == () for e in entries["chunk"])
    assert max(head.sizes) <= max_rows


def test_no_logits_are_computed_without_a_request_for_scores() -> None:
    head = PlainHead()
    rows = [make_row("a", (1, 2), (0, 2), None), make_row("b", (1,), (0, 1), 3)]
    assert PromptScorer(head).score(make_hidden(3), rows).read() == {}  # type: ignore[arg-type]
    assert head.sizes == []


def test_a_placeholder_outside_the_vocabulary_has_no_probability() -> None:
    row = make_row("r", (1, 99, 2), (0, 3), 1)
    entries = PromptScorer(PlainHead()).score(make_hidden(3), [row]).read()["r"]  # type: ignore[arg-type]
    assert (entries[0].logprob, entries[0].rank) == (-math.inf, VOCAB_SIZE + 1)
    assert math.isfinite(entries[1].logprob)
