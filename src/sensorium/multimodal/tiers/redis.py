"""A store of entries in a Redis, which the servers of several machines may share.

An entry is one string, written by one command, so that it exists as a whole or not at all. It
begins with a checksum of its content and its name, as on disk. Redis itself removes entries that
were not used for long, when its memory is used up (`maxmemory-policy`) or their time to live is
over.

Redis may be gone, slow or full, and another service may be at its address. So every call runs in a
thread of its own, and its caller waits for a limited time only: that bounds the whole call,
including the look-up of the host's name and answers that come byte by byte. After a failure Redis
gets no calls for a while (`breaker`). The texts of its answers are never logged or raised, because
they may repeat a password.
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
    """A thread-safe store of named bytes in a Redis.

    Redis keeps an unused entry for `ttl_s` seconds, without a limit if that is 0. A caller waits
    `patience_s` seconds for an answer.
    """

    level = "remote"

    def __init__(self, address: RemoteAddress, *, ttl_s: int, patience_s: float) -> None:
        """Log a warning if Redis does not answer now; the store works once it does."""
        self._ttl_s = ttl_s
        self._patience_s = patience_s
        self._counts = StoreStatistics()
        self._lock = threading.Lock()  # of the counts
        self._reading = _connect(address, patience_s)
        self._writing = _connect(address, _WRITE_S)
        self._server = Breaker(
            f"the remote cache of media at {address}",
            failed="fails",
            advice="Requests continue without it.",
            back="is back",
        )
        self._room = Breaker(  # for changes: a Redis that refuses them may still be read
            f"the remote cache of media at {address}",
            failed="takes no entries",
            advice="It is still read.",
            back="takes entries again",
        )
        if self._ask(self._reading.ping) is not None:
            logger.info("media is also kept in the remote cache at %s", address)

    def get(self, name: str, max_bytes: int = MAX_ENTRY_BYTES) -> bytearray | None:
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
        """Return True if an entry need not be written: Redis has it, or gets no calls now."""
        if self._server.is_waiting or self._room.is_waiting:
            return True
        return bool(self._ask(lambda: self._reading.exists(_PREFIX + name)))

    def touch(self, name: str) -> None:
        key = _PREFIX + name
        if self._ttl_s:
            self._change(lambda: self._reading.expire(key, self._ttl_s))
        else:
            self._ask(lambda: self._reading.touch(key))

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
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
        with self._lock:
            return replace(self._counts)

    def close(self) -> None:
        for client in (self._reading, self._writing):
            client.close()
            client.connection_pool.disconnect()

    # ---- calls

    def _read(self, key: str, max_bytes: int) -> bytes | redis.ResponseError | None:
        """Return the value of a key, Redis's error if it is no string, or None if it is absent.

        If the value's length can't be that of an entry, only its first bytes are returned.
        """
        looks = self._reading.pipeline(transaction=False)
        looks.strlen(key)
        looks.getrange(key, 0, HEAD_BYTES - 1)
        looks.exists(key)  # because `strlen` is 0 both for no string and for an empty one
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
        if self._ttl_s:  # a read-only Redis refuses this, and still answers the other command
            commands.expire(key, self._ttl_s)
        value: bytes | redis.ResponseError
        value, *_ = commands.execute(raise_on_error=False)
        if isinstance(value, Exception) and not str(value).startswith("WRONGTYPE"):
            raise value
        return value or None  # the entry may have been removed meanwhile

    def _write(self, key: str, value: bytes) -> bool:
        return bool(self._writing.set(key, value, nx=True, ex=self._ttl_s or None))

    def _ask(self, call: Callable[[], _Result]) -> _Result | None:
        """Return the answer of Redis to a call, or None if it fails or gets no calls now."""
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
        """Return the answer of Redis to a change, or None if it fails or gets no changes now.

        A large change goes through the client for writing, and may take `_WRITE_S`. If it times
        out, Redis only gets no changes for a while: it has just answered `has`, so it is not gone.
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
    """Return a client that connects when it is first used, and does not retry failed commands."""
    return redis.Redis.from_url(
        address.url,
        protocol=2,  # which every version of Redis and its relatives understand
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_read_size=_READ_SIZE,
    )


def _wait(client: redis.Redis, call: Callable[[], _Result], timeout_s: float) -> _Result:
    """Return the result of `call`, which uses the client, and runs in a thread of its own.

    Raise `TimeoutError` if the call takes too long. Then all connections of the client are closed,
    so that the thread ends even if the server never stops sending.
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
        with suppress(Exception):  # other threads may be closing the same connections
            client.connection_pool.disconnect()
        raise


def _unpack(name: str, value: bytes) -> bytearray | None:
    content = bytearray(memoryview(value)[HEAD_BYTES:])
    return content if value[:HEAD_BYTES] == make_head(name, [content]) else None


def _explain(error: Exception) -> str:
    """Return why a call failed, in words that repeat no part of an address or an answer."""
    for kinds, reason in _REASONS:
        if isinstance(error, kinds):
            return reason
    return f"it does not answer as a Redis does ({type(error).__name__})"


# The first entry that fits is used, so subclasses stand before their bases.
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
