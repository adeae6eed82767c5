"""A request for `n` completions as `n` requests of the core.

The first child starts alone; the others start with its first token. By then its prompt is in the
prefix cache and its media in the encoder cache, so that they cost a prompt's last tokens only.
Owns the children that have not started, with what leads to their media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

from sensorium.multimodal.pipeline import PerceivedItem
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason

Items = Sequence[PerceivedItem]
_Waiting = tuple[tuple[EngineCoreRequest, ...], Items]


def get_child_ids(request: EngineCoreRequest) -> tuple[str, ...]:
    """The ids that a request has in the core, by index; its own if it wants one completion."""
    n = request.sampling_params.n
    if n == 1:
        return (request.request_id,)
    return tuple(f"{request.request_id}#{index}" for index in range(n))


def make_children(request: EngineCoreRequest) -> tuple[EngineCoreRequest, ...]:
    """The first has the request's seed, and gives the prompt's log-probabilities."""
    params = request.sampling_params
    if params.n == 1:
        return (request,)
    first = replace(params, n=1)
    return tuple(
        replace(
            request,
            request_id=child_id,
            sibling=index,
            group=request.group or request.request_id,
            sampling_params=first
            if index == 0
            else replace(first, seed=_derive_seed(params.seed, index), prompt_logprobs=None),
        )
        for index, child_id in enumerate(get_child_ids(request))
    )


def _derive_seed(seed: int | None, index: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest())


class ParallelSampling:
    """`release` is called with the items of siblings that never start."""

    def __init__(self, release: Callable[[Items], None]) -> None:
        self._release = release
        self._waiting: dict[str, _Waiting] = {}

    def add(self, request: EngineCoreRequest, items: Items) -> tuple[EngineCoreRequest, bool]:
        """The child to start at once, and whether others are kept, with the items."""
        first, *rest = make_children(request)
        if rest:
            self._waiting[first.request_id] = tuple(rest), items
        return first, bool(rest)

    def take_ready(self, news: Iterable[EngineCoreOutput]) -> list[_Waiting]:
        """The children to start after the core's news, with their items: the caller's from now
        on.
        """
        ready: list[_Waiting] = []
        for output in news if self._waiting else ():
            if output.new_token_ids:
                waiting = self._waiting.pop(output.request_id, None)
                ready += [] if waiting is None else [waiting]
            elif output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self.drop((output.request_id,))
        return ready

    def drop(self, request_ids: Iterable[str]) -> None:
        """The siblings of these children are not wanted any more."""
        for request_id in request_ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                self._release(waiting[1])

    def __len__(self) -> int:
        return len(self._waiting)
