"""Counters of what a scheduler has done since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sensorium.core.request import Request
from sensorium.types.request import FinishReason
from sensorium.types.scheduling import StepMode


@dataclass(slots=True)
class SchedulerCounters:
    """The counters of a scheduler, which only grow.

    A request for several completions is several requests here. Its prompt is counted with the first
    of them only.
    """

    num_scheduled_tokens: int = 0
    # Tokens of prompts are counted when the first token after them was sampled.
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    # Tokens that were looked up in the prefix cache when a request was first scheduled.
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_preemptions: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    steps: Counter[StepMode] = field(default_factory=Counter)

    def add_look_up(self, request: Request, num_cached_tokens: int) -> None:
        self.num_prefix_queries += request.num_prompt_tokens
        self.num_prefix_hits += num_cached_tokens

    def add_token(self, request: Request) -> None:
        """Count the token that was just appended to a request."""
        self.num_sampled_tokens += 1
        if request.num_output_tokens == 1 and request.core_request.completion_index == 0:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_prompt_tokens += request.num_cached_tokens or 0
