"""A request for `n` completions as `n` requests of the core.

The first child starts alone; the others start with its first token. By then its prompt is in the
prefix cache and its media in the encoder cache, so that they cost a prompt's last tokens only.
Owns the children that have not started, and the handles of their media until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

from sensorium.multimodal.perceiver import PerceivedItem
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest, FinishReason

Items = Sequence[PerceivedItem]


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
            sampling_params=first
            if index == 0
            else replace(first, seed=_derive_seed(params.seed, index), prompt_logprobs=None),
        )
        for index, child_id in enumerate(get_child_ids(request))
    )


def _derive_seed(seed: int | None, index: int) -> int:
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest())


class Siblings:
    """`release` ends the hold on items that were not taken over."""

    def __init__(self, release: Callable[[Items], None]) -> None:
        self._release = release
        self._waiting: dict[str, tuple[tuple[EngineCoreRequest, ...], Items]] = {}

    def add(self, request: EngineCoreRequest, items: Items) -> EngineCoreRequest:
        """The child to start at once: the request itself, if it is the only one. Otherwise the
        others are kept, with the items.
        """
        first, *rest = make_children(request)
        if rest:
            self._waiting[first.request_id] = tuple(rest), items
        return first

    def take_ready(
        self, news: Iterable[EngineCoreOutput]
    ) -> list[tuple[tuple[EngineCoreRequest, ...], Items]]:
        """The children to start after the core's news, with items that the caller releases."""
        ready = []
        for output in news if self._waiting else ():
            if output.new_token_ids and output.request_id in self._waiting:
                ready.append(self._waiting.pop(output.request_id))
            elif output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                self.drop((output.request_id,))
        return ready

    def drop(self, request_ids: Iterable[str]) -> None:
        """The siblings of these children are not wanted any more."""
        for request_id in request_ids:
            if request_id in self._waiting:
                _, items = self._waiting.pop(request_id)
                self._release(items)

    def __len__(self) -> int:
        return len(self._waiting)
