"""Splits a request for `n` completions into `n` requests of the core.

The first completion starts alone; the others start with its first token. By then the prompt is in
the prefix cache and its media in the encoder cache, so that they compute only the prompt's last
tokens. Owns the completions that have not started, with the handles of their media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from sensorium.multimodal.pipeline import PerceivedItem
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason

Items = Sequence[PerceivedItem]


def get_child_ids(request: EngineCoreRequest) -> tuple[str, ...]:
    """Return the core's ids of a request's completions; for a single one, the request's id."""
    n = request.sampling_params.n
    if n == 1:
        return (request.request_id,)
    return tuple(f"{request.request_id}#{index}" for index in range(n))


def make_children(request: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """Return the completions of a request as requests of the core.

    The first has the request's seed, and gives the prompt's log-probabilities.
    """
    params = request.sampling_params
    if params.n == 1:
        return (request,)
    first = replace(params, n=1)
    return tuple(
        replace(
            request,
            request_id=child_id,
            completion_index=index,
            group=request.group or request.request_id,
            sampling_params=first
            if index == 0
            else replace(first, seed=_derive_seed(params.seed, index), prompt_logprobs=None),
        )
        for index, child_id in enumerate(get_child_ids(request))
    )


def _derive_seed(seed: int | None, index: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCompletions:
    """The completions of a request that start after the first one."""

    request_id: str  # of the request
    children: tuple[EngineCoreRequest, ...]
    items: Items


class ParallelSampling:
    """The completions that wait for the first one of their request.

    `release` is called with the items of completions that never start.
    """

    def __init__(self, release: Callable[[Items], None]) -> None:
        self._release = release
        self._waiting: dict[str, WaitingCompletions] = {}  # id of the first completion -> the rest

    def add(self, request: EngineCoreRequest, items: Items) -> tuple[EngineCoreRequest, bool]:
        """Return the completion to start at once, and whether others are kept with the items."""
        first, *rest = make_children(request)
        if rest:
            self._waiting[first.request_id] = WaitingCompletions(
                request_id=request.request_id, children=tuple(rest), items=items
            )
        return first, bool(rest)

    def take_ready(self, outputs: Iterable[EngineCoreOutput]) -> list[WaitingCompletions]:
        """Return the completions to start after these outputs of the core.

        The caller becomes responsible for releasing their items.
        """
        ready: list[WaitingCompletions] = []
        for output in outputs if self._waiting else ():
            if output.new_token_ids:
                waiting = self._waiting.pop(output.request_id, None)
                ready += [] if waiting is None else [waiting]
            elif output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self.drop((output.request_id,))
        return ready

    def drop(self, child_ids: Iterable[str]) -> None:
        """Forget the completions that wait for any of these, and release their items."""
        for child_id in child_ids:
            waiting = self._waiting.pop(child_id, None)
            if waiting is not None:
                self._release(waiting.items)

    def __len__(self) -> int:
        return len(self._waiting)
