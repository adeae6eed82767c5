"""The clients of a soak: each asks one thing after another, and checks every answer.

Bounded in number and in time: no request may take longer than `REQUEST_S`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from soak_requests import RequestMaker, SoakRequest

REQUEST_S = 120.0
BAD_SHARE = 0.2
ABORT_SHARE = 0.15
_LONGEST_STAY_S = 0.6  # of a client that leaves
_MAX_MISTAKES = 50
TokenIds = list[list[int]]


class AnswerError(Exception):
    """An answer is not the expected one."""


@dataclass(slots=True, kw_only=True)
class SoakCounts:
    """What the clients did and got. `mistakes`: answers that were wrong, in words."""

    num_sent: int = 0
    num_aborted: int = 0
    num_aborted_completions: int = 0
    num_ends: Counter[str] = field(default_factory=Counter)  # completions, by finish_reason
    num_tokens: int = 0
    num_answers: Counter[str] = field(default_factory=Counter)  # by kind
    num_statuses: Counter[int] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of whole good answers


class SoakClients:
    def __init__(self, url: str, maker: RequestMaker, *, seed: int) -> None:
        self.counts = SoakCounts()
        self._url = url
        self._maker = maker
        self._random = random.Random(seed)
        self._known: dict[str, TokenIds] = {}

    async def run(self, *, num_clients: int, seconds: float) -> None:
        """Returns when all have their last answers."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(
            max_connections=2 * num_clients, max_keepalive_connections=num_clients
        )
        async with httpx.AsyncClient(
            base_url=self._url, timeout=REQUEST_S, limits=limits
        ) as client:
            await asyncio.gather(*(self._run_client(client, end) for _ in range(num_clients)))

    async def _run_client(self, client: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end and len(self.counts.mistakes) < _MAX_MISTAKES:
            draw = self._random.random()
            is_bad = draw < BAD_SHARE
            request = self._maker.make_bad() if is_bad else self._maker.make_good()
            is_aborted = not is_bad and draw < BAD_SHARE + ABORT_SHARE
            self.counts.num_sent += 1
            try:
                async with asyncio.timeout(REQUEST_S):
                    if is_aborted:
                        await self._ask_and_leave(client, request)
                    else:
                        await self._ask(client, request)
            except (AnswerError, httpx.HTTPError, TimeoutError) as error:
                self.counts.mistakes.append(f"{request.kind}: {type(error).__name__}: {error}")

    async def _ask_and_leave(self, client: httpx.AsyncClient, request: SoakRequest) -> None:
        """Leave at any moment; an answer that comes before must be right."""
        stay_s = self._random.random() ** 2 * _LONGEST_STAY_S
        try:
            async with asyncio.timeout(stay_s):
                await self._ask(client, request)
        except TimeoutError:
            self.counts.num_aborted += 1
            self.counts.num_aborted_completions += request.num_completions

    async def _ask(self, client: httpx.AsyncClient, request: SoakRequest) -> None:
        begun = time.monotonic()
        headers = {"content-type": "application/json"}
        async with client.stream(
            "POST", request.path, content=request.content, headers=headers
        ) as answer:
            content = await answer.aread()
        counts = self.counts
        if answer.status_code != request.status:
            raise AnswerError(
                f"{answer.status_code} instead of {request.status}: {content[:300]!r}"
            )
        counts.num_statuses[answer.status_code] += 1
        counts.num_answers[request.kind] += 1
        if request.status != 200:
            _check_error(content)
            return
        token_ids, ends = read_stream(content) if request.is_streamed else read_answer(content)
        if len(token_ids) != request.num_completions:
            raise AnswerError(f"{len(token_ids)} completions")
        counts.num_ends.update(ends)
        counts.num_tokens += sum(map(len, token_ids))
        counts.seconds.append(time.monotonic() - begun)
        self._compare(request, token_ids)

    def _compare(self, request: SoakRequest, token_ids: TokenIds) -> None:
        if request.key is None:
            return
        first = self._known.setdefault(request.key, token_ids)
        if token_ids != first:
            raise AnswerError(f"{request.key}: {token_ids} instead of {first}")


def read_answer(content: bytes) -> tuple[TokenIds, list[str]]:
    """Return the tokens and the finish reasons of an answer's completions."""
    answer = json.loads(content)
    token_ids = [choice["token_ids"] for choice in answer["choices"]]
    _check_usage(answer["usage"], token_ids)
    return token_ids, [_get_end(choice) for choice in answer["choices"]]


def read_stream(content: bytes) -> tuple[TokenIds, list[str]]:
    """Read a streamed answer and return what `read_answer` returns."""
    frames = content.decode().removesuffix("\n\n").split("\n\n")
    if not frames[-1] == "data: [DONE]":
        raise AnswerError(f"the stream ends with {frames[-1][:200]!r}")
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    token_ids: dict[int, list[int]] = {}
    last: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if "error" in chunk:
            raise AnswerError(f"in a stream: {chunk}")
        for choice in chunk["choices"]:
            index = choice["index"]
            token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            last[index] = choice
    ordered = [token_ids[index] for index in sorted(token_ids)]
    _check_usage(chunks[-1]["usage"], ordered)
    return ordered, [_get_end(choice) for choice in last.values()]


def _get_end(choice: dict[str, Any]) -> str:
    end: str = choice["finish_reason"]
    if end not in ("stop", "length"):
        raise AnswerError(f"finish_reason {end!r}")
    return end


def _check_usage(usage: dict[str, Any], token_ids: TokenIds) -> None:
    num_tokens = sum(map(len, token_ids))
    if usage["completion_tokens"] != num_tokens:
        raise AnswerError(f"usage {usage} for {num_tokens} tokens")


def _check_error(content: bytes) -> None:
    error = json.loads(content)["error"]
    if not error["message"] or error["type"] == "server_error":
        raise AnswerError(f"an error that says nothing: {error}")
