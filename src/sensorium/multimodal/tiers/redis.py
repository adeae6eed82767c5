"""Entries in a Redis, which the servers of several machines may share.

An entry is one string, written by one command, so that it is there as a whole or not at all. It
begins with a checksum of its content and of its name, as on disk. Redis itself removes what was not
used for long, when its memory is used up (`maxmemory-policy`) or when the time to live is over.

Redis may be gone, slow, full, or something else altogether. So every call runs in a thread of its
own, and its caller waits for a limited time only: that bounds all of it, the look-up of the host's
name and answers that come byte by byte too. After a failure Redis is left alone (`breaker`). What a
server answers is never logged or raised, because an answer may repeat a password.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import redis
from redis import exceptions as errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from sensorium.multimodal.tiers.address import RemoteAddress
from sensorium.multimodal.tiers.breaker import Breaker
from sensorium.multimodal.tiers.heads import (
    HEAD_BYTES,
    MAX_ENTRY_BYTES,
    make_head,
    may_begin,
)
from sensorium.multimodal.tiers.interface import StoreStatistics

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_PREFIX = "sensorium:"  # of all keys
_WRITE_S = 10.0  # how long the thread that writes waits for Redis to take an entry
_READ_SIZE = 2**18  # bytes that are received at once


class RedisStore:
    """A store of named bytes in a Redis. Several threads may use it.

    `ttl_s` is how long Redis keeps an entry that is not used; with 0 it has no such limit.
    `patience_s` is how long a caller waits for an answer.
    """

    level = "remote"

    def __init__(self, address: RemoteAddress, *, ttl_s: int, patience_s: float) -> None:
        """Look whether Redis answers, and log a warning if it does not: it may come later."""
        self._ttl_s = ttl_s
        self._patience_s = patience_s
        self._counts = StoreStatistics()
        self._lock = threading.Lock()  # of the counts
        self._reading = _connect(address, patience_s)
        self._writing = _connect(address, _WRITE_S)
        self._server = Breaker(
            f"the remote cache of media at {address}",
            failed="fails",
            advice="Requests go on without it.",
            back="is back",
        )
        self._room = Breaker(  # for what changes entries: a Redis that refuses it can be read
            f"the remote cache of media at {address}",
            failed="takes no entries",
            advice="It is still read.",
            back="takes entries again",
        )
        if self._ask(self._reading.ping) is not None:
            logger.info("media is also kept in the remote cache at %s", address)

    def get(self, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytearray | None:
        """Return the content of an entry, or None if it is absent, damaged or can't be had now.

        A damaged entry is removed. Of one that is longer than it should be, only the head is
        fetched. A whole one is marked as used.
        """
        self._count("num_queries")
        value = self._ask(lambda: self._read(_PREFIX + name, max_bytes))
        if value is None:
            return None
        content = None if isinstance(value, redis.ResponseError) else _unpack(name, value)
        if content is None:
            self.remove(name, is_damaged=True)
            return None
        self._count("num_hits")
        return content

    def has(self, name: str) -> bool:
        """Return whether an entry need not be written.

        That is so if Redis has one of this name, and also while Redis is left alone.
        """
        if self._server.is_waiting or self._room.is_waiting:
            return True
        return bool(self._ask(lambda: self._reading.exists(_PREFIX + name)))

    def touch(self, name: str) -> None:
        """Mark an entry as used, if there is one."""
        key = _PREFIX + name
        if self._ttl_s:
            self._change(lambda: self._reading.expire(key, self._ttl_s))
        else:
            self._ask(lambda: self._reading.touch(key))

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Write an entry, if Redis takes it and has none yet, and return whether it was written."""
        if HEAD_BYTES + sum(len(part) for part in parts) > MAX_ENTRY_BYTES:
            self._count("num_oversize")
            return False
        if self.has(name):
            return False
        value = b"".join([make_head(name, parts), *parts])
        is_new = bool(self._change(lambda: self._write(_PREFIX + name, value), is_large=True))
        self._count("num_writes", is_new)
        return is_new

    def remove(self, name: str, *, is_damaged: bool = False) -> None:
        if is_damaged:
            self._count("num_damaged")
            logger.warning("the entry %s of the remote cache was damaged, and is removed", name)
        self._change(lambda: self._reading.unlink(_PREFIX + name))

    def statistics(self) -> StoreStatistics:
        """Return the counts of this process. What Redis holds is not known here."""
        with self._lock:
            return replace(self._counts)

    def close(self) -> None:
        """Close all connections to Redis, also those in use."""
        for client in (self._reading, self._writing):
            client.close()
            client.connection_pool.disconnect()

    # ---- calls

    def _read(self, key: str, max_bytes: int) -> bytes | redis.ResponseError | None:
        """Return a value, or the error of Redis if the key has something that is no string.

        Only the first bytes are returned of what can't be an entry by its length.
        """
        looks = self._reading.pipeline(transaction=False)
        looks.strlen(key)
        looks.getrange(key, 0, HEAD_BYTES - 1)
        looks.exists(key)  # for Redis, no string and an empty one have the same length
        num_bytes, head, is_there = looks.execute(raise_on_error=False)
        error = next((each for each in (num_bytes, head) if isinstance(each, Exception)), None)
        if isinstance(error, redis.ResponseError) and str(error).startswith("WRONGTYPE"):
            return error
        if error is not None:
            raise error
        if not is_there:
            return None
        if num_bytes > max_bytes or not may_begin(head, num_bytes):
            return bytes(head)
        commands = self._reading.pipeline(transaction=False)
        commands.getrange(key, 0, num_bytes - 1)
        if self._ttl_s:  # a Redis that can only be read refuses this, and serves all the same
            commands.expire(key, self._ttl_s)
        value: bytes | redis.ResponseError
        value, *_ = commands.execute(raise_on_error=False)
        if isinstance(value, Exception) and not str(value).startswith("WRONGTYPE"):
            raise value
        return value or None  # it may have gone meanwhile

    def _write(self, key: str, value: bytes) -> bool:
        return bool(self._writing.set(key, value, nx=True, ex=self._ttl_s or None))

    def _ask(self, call: Callable[[], _Result]) -> _Result | None:
        """Return what Redis answers, or None if it fails or is left alone."""
        token = self._server.enter(self._patience_s)
        if token is None:
            return None
        try:
            answer = _wait(self._reading, call, self._patience_s)
        except Exception as error:  # a server that is no Redis makes the client raise anything
            self._count("num_errors")
            self._server.note_failure(token, _explain(error))
            return None
        self._server.note_success(token)
        return answer

    def _change(self, call: Callable[[], _Result], *, is_large: bool = False) -> _Result | None:
        """Return what Redis answers to a change, or None if it fails or must not be asked now.

        A large change, by the client for writing, may take longer. If it takes too long even so,
        that is no sign that Redis is gone, because Redis has answered a question just before.
        """
        client = self._writing if is_large else self._reading
        limit_s = _WRITE_S if is_large else self._patience_s
        room = self._room.enter(limit_s)
        token = None if room is None else self._server.enter(limit_s)
        if room is None or token is None:
            return None
        try:
            answer = _wait(client, call, limit_s)
        except Exception as error:  # as above
            self._count("num_errors")
            is_late = is_large and isinstance(error, errors.TimeoutError | TimeoutError)
            if is_late or isinstance(error, redis.ResponseError):
                self._room.note_failure(room, _explain(error))
            else:
                self._server.note_failure(token, _explain(error))
            return None
        self._room.note_success(room)
        self._server.note_success(token)
        return answer

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + number)


def _connect(address: RemoteAddress, timeout_s: float) -> redis.Redis:
    """Return a client, which connects when it is first used.

    It speaks the older protocol, which every version of Redis and its relatives understand, and
    does not repeat what failed.
    """
    return redis.Redis.from_url(
        address.url,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_read_size=_READ_SIZE,
    )


def _wait(client: redis.Redis, call: Callable[[], _Result], timeout_s: float) -> _Result:
    """Return the result of a call of a client, which runs in a thread of its own.

    Raises a `TimeoutError` if it takes too long. Then all connections of the client are closed, so
    that the thread ends even if the server never stops sending.
    """
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="redis", daemon=True).start()
    try:
        return future.result(timeout_s)
    except TimeoutError:
        with suppress(Exception):  # its threads may be closing the same connections
            client.connection_pool.disconnect()
        raise


def _unpack(name: str, value: bytes) -> bytearray | None:
    """Return the content of an entry, or None if it is not what was written under its name."""
    content = bytearray(memoryview(value)[HEAD_BYTES:])
    return content if value[:HEAD_BYTES] == make_head(name, [content]) else None


def _explain(error: Exception) -> str:
    """Return why a call failed, in words that repeat nothing of an address or an answer."""
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    return f"it does not answer as a Redis does ({type(error).__name__})"


# The first that fits counts, so subclasses stand before their bases.
_REASONS: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    (
        (errors.AuthenticationError, errors.AuthorizationError),
        "it refuses the user or the password",
    ),
    ((errors.OutOfMemoryError,), "its memory is used up"),
    ((errors.ReadOnlyError,), "it can only be read"),
    ((errors.NoPermissionError,), "it does not permit that to this user"),
    ((errors.ResponseError,), "it answers with an error"),
    ((errors.BusyLoadingError,), "it is still starting"),
    ((errors.TimeoutError, TimeoutError), "it does not answer in time"),
    ((errors.ConnectionError, OSError), "it can't be reached, or closes the connection"),
)
