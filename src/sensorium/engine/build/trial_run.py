"""Runs the requests of a trial through the worker, with books of the trial's own.

The scheduler belongs to the trial: the engine's own one never hears of these requests, so its
counters and caches stay as they are. What the worker keeps is dropped at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sensorium.core.scheduler import Scheduler
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.types.errors import ModelError
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from sensorium.types.transfer import Transfer


@dataclass(slots=True)
class TrialAnswer:
    """What an engine said to one request of a trial."""

    token_ids: list[int] = field(default_factory=list)
    # Of every prompt token but the first; empty for a request that did not ask for them.
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


class TrialRun:
    def __init__(self, core: EngineCore, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._core = EngineCore(scheduler, core.runner, core.payloads)

    def ask(self, requests: Sequence[tuple[EngineCoreRequest, Transfer]]) -> list[TrialAnswer]:
        """Run requests together to their ends, and return their answers in the same order."""
        answers = {request.request_id: TrialAnswer() for request, _ in requests}
        for request, transfer in requests:
            self._core.add_request(request, transfer)
        while self._core.has_requests:
            for output in self._core.step():
                answers[output.request_id].add(output)
        return list(answers.values())

    def forget_prefixes(self) -> None:
        """Let the next requests compute their prompts again; encoder outputs are kept."""
        self._scheduler.kv_cache.clear_cache()

    def close(self) -> None:
        """End what is still running, and let the worker drop all that it has of this trial."""
        self._core.abort_requests(list(self._scheduler.requests))
        self._scheduler.encoder_cache.clear_cache()
        self._core.step()
