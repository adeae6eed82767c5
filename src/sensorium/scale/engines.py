"""A frontend's calls to the engines of a cluster: what is sent, and what is retried.

What was streamed to a client is never repeated. Before that, a call is repeated
  - once on another engine, if its engine has ended
  - on another engine, if no engine has accepted it in time, since the one that was asked may hang
  - on the same engine, with all files, if that lacks a file that this frontend expected it to have
  - on engines that have it, one by one, if the engine lacks media that the client only named
"""

from __future__ import annotations

import asyncio
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from contextvars import Context
from typing import Any

import msgspec
import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError, RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle

from sensorium.engine.core_process import CoreInfo
from sensorium.multimodal.media import MediaBytes
from sensorium.scale import messages
from sensorium.scale.placement import get_tally
from sensorium.types.errors import (
    CapacityError,
    EngineLostError,
    MissingMediaError,
    SensoriumError,
    StoppingError,
    make_record,
)
from sensorium.utils.lru import LruCache

_SMALL_BYTES = 2**16  # a file up to this size travels in the message
_MAX_KNOWN = 2**16  # files we know an engine has received
_MAX_ATTEMPTS = 6
_ACCEPT_S = 20.0  # after which a call that no engine has accepted is sent again
_MAX_UNACCEPTED = 3  # times after which it fails
_CONTROL_S = 30.0  # for calls that go to all engines
_READ_S = 10.0  # for the metrics of all processes; Prometheus waits no longer
_LOST = "the engine that had the request has ended: send the request again"
_NONE = "no engine of the cluster takes requests right now: try again later"
CountRetry = Callable[[str], None]


class Replicas:
    """All processes of one deployment of the cluster, for calls that go to each of them."""

    def __init__(self, handle: DeploymentHandle[Any], *, may_be_none: bool = False) -> None:
        self._handle = handle
        self._may_be_none = may_be_none  # it is no error if none of them lives at the moment

    async def call_all(
        self, method: str, *arguments: object, timeout_s: float = _CONTROL_S
    ) -> list[Any]:
        """Call a method of each living process. Raise `EngineLostError` if one does not answer."""
        try:
            response = self._handle.broadcast(method, *arguments)
            answers = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            if self._may_be_none and isinstance(error, DeploymentUnavailableError):
                return []
            raise EngineLostError(
                "a process of the cluster did not answer in time: try again later"
            ) from error
        living = [answer for answer in answers if not isinstance(answer, RayActorError)]
        for answer in living:
            if isinstance(answer, Exception):
                reason = f"a process of the cluster has failed: {answer}"
                raise EngineLostError(reason) from answer
        return living

    async def read_metrics(self) -> list[Any]:
        return await self.call_all("read_metrics", timeout_s=_READ_S)

    async def reset_cache(self, level: str) -> None:
        await self.call_all("reset_cache", level)


class Engines(Replicas):
    """One frontend's access to the engines of a cluster, for use on one event loop.

    `count_retry` is called with the reason for each repeated call: "lost", "missing" or "moved".
    """

    def __init__(self, handle: DeploymentHandle[Any], *, count_retry: CountRetry) -> None:
        super().__init__(handle)
        self.tally = get_tally(handle.deployment_name)
        self._count_retry = count_retry
        self._known: LruCache[str, bool] = LruCache(_MAX_KNOWN)  # digest -> an engine has taken it

    async def describe(self) -> CoreInfo:
        """Return the description of one of the engines, when the first one is ready."""
        return messages.decode_description(await self._handle.describe.remote()).info

    async def run(
        self,
        call: messages.Call,
        *,
        key: str,
        files: Mapping[str, MediaBytes] | None = None,
        uuids: Sequence[messages.UuidKey] = (),
        may_repeat: bool = False,
        replica: str | None = None,
        sends_all: bool = False,
    ) -> AsyncGenerator[messages.Answer, None]:
        """Yield the answers to a call, and raise its error. Closing the generator aborts the call.

        The call goes to the engine `replica` if it lives. Otherwise calls with the same `key` go to
        the same engine if possible. `files` are the call's media by digest. `uuids` name media that
        the client has not sent. The first answer is always `Accepted`; it comes again if the call
        is repeated. With `may_repeat` a call is repeated even if it has had output, which then
        begins anew. With `sends_all` the files are sent even if an engine has had them before.
        """
        attempt = _Attempt(key=key, pinned=replica, sends_all=sends_all)
        async with aclosing(
            self._run_often(call, attempt, files or {}, uuids, may_repeat=may_repeat)
        ) as answers:
            try:
                async for answer in answers:
                    yield answer
            finally:
                if attempt.search is not None:
                    attempt.search.close()

    async def _run_often(
        self,
        call: messages.Call,
        attempt: _Attempt,
        files: Mapping[str, MediaBytes],
        uuids: Sequence[messages.UuidKey],
        *,
        may_repeat: bool,
    ) -> AsyncGenerator[messages.Answer, None]:
        """Send a call until it has its answer or an error that is final, and yield all answers."""
        for _ in range(_MAX_ATTEMPTS):
            has_output, is_complete, failure = False, False, None
            async with aclosing(self._run_once(call, attempt, files)) as answers:
                async for answer in answers:
                    if isinstance(answer, messages.Failure):
                        failure = answer
                        break
                    if isinstance(answer, messages.Accepted):
                        attempt.replica = answer.replica
                    else:
                        has_output = True
                        is_complete = messages.is_last(answer)
                    yield answer
            if is_complete:
                for digest in files:
                    self._known.put(digest, True)
                return
            if failure is None:  # the stream broke off without an error
                failure = messages.Failure(make_record(EngineLostError(_LOST)))
            for digest in failure.lacks:
                self._known.remove(digest)
            error = failure.error.make_error()
            is_final = has_output and not may_repeat
            if is_final or not await self._plan_retry(attempt, failure, error, uuids):
                raise error
        raise CapacityError("the media of this request was lost several times: try again later")

    async def append_audio(self, message: messages.AppendAudio, *, replica: str) -> None:
        """Send more audio to the engine that has its request; raise an error if that is gone."""
        try:
            sent = Context().run(
                self._handle.append_audio.remote,
                messages.encode(message),
                pinned=replica,
                routing_key=replica,
            )
            answer = await asyncio.wait_for(sent, _CONTROL_S)
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineLostError(_LOST) from error
        if answer:
            failure = messages.decode_answer(answer)
            if isinstance(failure, messages.Failure):
                raise failure.error.make_error()

    async def _plan_retry(
        self,
        attempt: _Attempt,
        failure: messages.Failure,
        error: SensoriumError,
        uuids: Sequence[messages.UuidKey],
    ) -> bool:
        """Change how a call is sent after a failure, and return whether to send it again."""
        if attempt.is_unaccepted:
            attempt.num_unaccepted += 1
            attempt.is_unaccepted, attempt.sends_all = False, True
            attempt.avoided = attempt.pinned or self.tally.tried.get(attempt.ticket)
            attempt.pinned = None
            return attempt.num_unaccepted < _MAX_UNACCEPTED
        if failure.lacks:
            attempt.pinned, attempt.sends_all = attempt.replica, True
            self._count_retry("missing")
            return True
        if isinstance(error, EngineLostError | StoppingError) and not attempt.was_lost:
            attempt.was_lost = attempt.sends_all = True
            attempt.pinned, attempt.avoided = None, attempt.replica
            self._count_retry("lost")
            return True
        if isinstance(error, MissingMediaError) and uuids:
            if attempt.search is None:
                encoded = messages.encode(tuple(uuids))
                others = [name for name in self.tally.replicas if name != attempt.replica]
                attempt.search = _Search(self._ask_for(encoded, name) for name in others)
            attempt.pinned = await attempt.search.find_next(without=attempt.replica)
            if attempt.pinned is not None:
                self._count_retry("moved")
                return True
        return False

    async def _ask_for(self, uuids: bytes, replica: str) -> str | None:
        """Return the name of an engine if it has all of these uuids, else None."""
        find = self._handle.find.remote
        try:
            sent = Context().run(find, uuids, pinned=replica, routing_key=replica)
            answer: str | None = await asyncio.wait_for(sent, _CONTROL_S)
        except (RayError, RayServeException, TimeoutError):
            return None
        return answer

    async def _run_once(
        self, call: messages.Call, attempt: _Attempt, files: Mapping[str, MediaBytes]
    ) -> AsyncGenerator[messages.Answer, None]:
        """Send a call once, and yield the answers: at last a `Failure` if the engine has ended."""
        stream: Any = None
        try:
            refs: dict[str, Any] = {}
            wanted = {d: f for d, f in files.items() if attempt.sends_all or not self._known.get(d)}
            small = {d: f.data for d, f in wanted.items() if len(f.data) <= _SMALL_BYTES}
            for digest, file in wanted.items():
                if digest not in small:
                    refs[digest] = await asyncio.to_thread(_put, file.data)
            if small and not isinstance(call, messages.OpenAudio):
                call = msgspec.structs.replace(call, files=small)
            encoded = await messages.run_long(
                messages.has_tensors(call), messages.encode_call, call
            )
            # In a context of its own: Ray would give all calls for one request of a client the same
            # id, and mix them up if they are made at the same time.
            stream = Context().run(
                self._handle.options(stream=True).run.remote,
                encoded,
                refs,
                routing_key=attempt.key,
                pinned=attempt.pinned,
                avoided=attempt.avoided,
                ticket=attempt.ticket,
            )
            try:
                accepted = await asyncio.wait_for(anext(stream), _ACCEPT_S)
            except TimeoutError:
                attempt.is_unaccepted = True
                yield messages.Failure(make_record(CapacityError(_NONE)))
                return
            yield messages.decode_answer(accepted)
            async for answer in stream:
                yield messages.decode_answer(answer)
            stream = None
        except TimeoutError as error:
            raise CapacityError(_NONE) from error
        except (BackPressureError, ObjectStoreFullError) as error:
            raise CapacityError(_NONE) from error
        except (RayError, RayServeException, StopAsyncIteration):  # the last: not even accepted
            yield messages.Failure(make_record(EngineLostError(_LOST)))
        finally:
            if stream is not None:
                stream.cancel()


class _Search:
    """A search for engines that have the media that a client named; all engines are asked at once.

    An engine keeps a name longer than its media, so several may have to be tried. A slow or hanging
    engine is awaited only if no other one has the names.
    """

    def __init__(self, questions: Iterable[Coroutine[Any, Any, str | None]]) -> None:
        self._open = {asyncio.create_task(question) for question in questions}
        self._found: list[str] = []

    async def find_next(self, *, without: str | None) -> str | None:
        """Return the next engine found, except `without`, or `None` if there is no other."""
        while self._open and not self._found:
            done, self._open = await asyncio.wait(self._open, return_when=FIRST_COMPLETED)
            names = {task.result() for task in done} - {None, without}
            self._found += sorted(name for name in names if name is not None)
        return self._found.pop(0) if self._found else None

    def close(self) -> None:
        for task in self._open:
            task.cancel()


class _Attempt:
    """The state of a call: how to send it next, which changes after each failed attempt."""

    def __init__(self, *, key: str, pinned: str | None, sends_all: bool) -> None:
        self.key = key
        self.pinned = pinned  # the engine that must get the call, unless it is gone
        self.replica: str | None = None  # the engine that accepted the call last
        self.avoided: str | None = None  # the engine that should not get the call
        self.sends_all = sends_all  # all files are sent, whatever is known
        self.ticket = uuid.uuid4().hex  # by which the router notes where the call was sent
        self.is_unaccepted = False  # no engine has accepted it in time
        self.num_unaccepted = 0
        self.was_lost = False
        self.search: _Search | None = None  # for media that the client only named


def _put(data: bytes) -> Any:
    return ray.put(np.frombuffer(data, dtype=np.uint8))
