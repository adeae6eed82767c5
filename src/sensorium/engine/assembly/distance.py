"""Judges a trial: how far the engine's log-probabilities are from those of the model alone.

The model is computed twice without the engine, by two forms of attention, to measure what rounding
alone changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sensorium.types.errors import ModelError
from sensorium.types.request import EngineCoreOutput, TokenLogprobs

# The engine's distance may be this many times the distance of rounding. Tiny models that the engine
# computes correctly reach at most 1.7 times at the worst position and 0.9 times overall. Models
# that it computes wrongly reach at least 17 times and 11 times (ADR 22).
_WORST_FACTOR = 5.0
_OVERALL_FACTOR = 2.5
# A smaller distance by rounding counts as this much, because both forms of attention may happen to
# round in the same way.
_LEAST_ROUNDING = {torch.float32: 1e-4, torch.float16: 3e-4, torch.bfloat16: 2e-3}
# A model is not compared if its two forms of attention differ by more than this. Correct models
# reach at most 4e-6, 0.0073 and 0.064 (ADR 46). A larger difference in float32 can't be rounding:
# the two forms attend to different tokens, and it is unknown which the model was trained with. The
# smallest such difference, of models with random weights, is 0.24.
_MOST_ROUNDING = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}


@dataclass(slots=True)
class TrialAnswer:
    """The tokens and log-probabilities that the engine computed for one request of a trial."""

    token_ids: list[int] = field(default_factory=list)
    # Of every prompt token except the first; empty if the request did not ask for them.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_encoder_hits: int = 0

    def add(self, output: EngineCoreOutput) -> None:
        if output.error is not None:
            raise ModelError(str(output.error.make_error()))
        self.token_ids += output.new_token_ids
        self.prompt_logprobs += output.prompt_logprobs
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.num_cached_tokens = output.num_cached_tokens
            self.num_encoder_hits = output.num_encoder_hits


def collect_logprobs(answers: Sequence[TrialAnswer]) -> tuple[list[float], list[list[int]]]:
    """Return the engine's log-probabilities as one list, and their token ids by text position.

    All answers are to the same prompt. Because of rounding, a later answer may choose another token
    than the first answer. Its log-probabilities after that token are left out, because they belong
    to another text.
    """
    first = answers[0]
    scored = [answer.prompt_logprobs for answer in answers if answer.prompt_logprobs]
    rows = [list(entries) for entries in zip(*scored, strict=True)]
    for index in range(len(first.token_ids)):
        before = first.token_ids[:index]
        rows.append([a.logprobs[index] for a in answers if a.token_ids[:index] == before])
    ours = [value for row in rows for entry in row for value in entry.top_logprobs]
    wanted = [[token_id for entry in row for token_id in entry.top_token_ids] for row in rows]
    return ours, wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """The difference between two lists of log-probabilities, as root mean squares."""

    overall: float  # over all values
    worst: float  # over the tokens of the position with the largest distance

    @staticmethod
    def measure(some: Sequence[float], others: Sequence[float], lengths: Sequence[int]) -> Distance:
        """Return how much two lists of log-probabilities of the same tokens differ.

        Both lists have the values of one text position after another, and `lengths` has the number
        of values at each position. If a value is NaN, `worst` is NaN.
        """
        squares = (torch.tensor(some) - torch.tensor(others)).square()
        positions = [float(part.mean().sqrt()) for part in torch.split(squares, list(lengths))]
        # `max` may lose a NaN, which must fail the trial.
        worst = max(positions) if all(value >= 0 for value in positions) else float("nan")
        return Distance(overall=float(squares.mean().sqrt()), worst=worst)


def find_fault(ours: Distance, rounding: Distance, dtype: torch.dtype) -> str | None:
    """Return why the engine differs from the model by more than `rounding` explains, or `None`."""
    if not rounding.overall <= _MOST_ROUNDING[dtype]:
        return _explain_yardstick(rounding, dtype)
    least = _LEAST_ROUNDING[dtype]
    is_overall_right = ours.overall <= _OVERALL_FACTOR * max(least, rounding.overall)
    if is_overall_right and ours.worst <= _WORST_FACTOR * max(least, rounding.worst):
        return None
    return (
        "the engine's log-probabilities are not those of the model on its own (they differ by "
        f"{ours.worst:.2g} at the worst position, rounding alone by {rounding.worst:.2g}): the "
        "model or its processor has a step before the logits that this engine does not support"
    )


def _explain_yardstick(rounding: Distance, dtype: torch.dtype) -> str:
    """Return an error text: the model differs too much from itself to be compared."""
    advice = "" if dtype == torch.float32 else "; in float32 it may be served (--dtype float32)"
    return (
        "the model can't be compared with itself: computed twice without this engine, by "
        f"Transformers' two forms of attention, its log-probabilities differ by "
        f"{rounding.overall:.2g}, and rounding in {str(dtype).removeprefix('torch.')} explains "
        f"{_MOST_ROUNDING[dtype]:.2g} at most{advice}"
    )
