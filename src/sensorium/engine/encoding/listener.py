"""Listens on a Unix socket for engines that want media encoded.

Each connection has a thread that answers one question after the other. The socket belongs to its
user alone, and is removed at the end.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from sensorium.engine.encoding.service import EncodingService
from sensorium.engine.encoding.wire import (
    PROTOCOL,
    Counted,
    Encode,
    Encoded,
    Failed,
    FromEncoder,
    Hello,
    Identity,
    Refused,
    check_path,
    decode_question,
    encode_message,
    is_trusted,
)
from sensorium.multimodal.item_codec import as_buffers, encode_header
from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.pool.channel import NOT_PROCESSED, Buffer, Channel, ChannelError
from sensorium.multimodal.processing.item_backend import decode_job
from sensorium.types.errors import (
    CapacityError,
    FailedRequestError,
    InvariantError,
    ModelError,
    RequestError,
    StoppingError,
    make_record,
)
from sensorium.types.multimodal import ProcessedItem

logger = logging.getLogger(__name__)
_BACKLOG = 128
_SEND_S = 30.0  # an engine that does not read what it asked for loses its connection
_PROBE_S = 1.0
_LOCK_S, _LOCK_POLL_S = 3.0, 0.01  # for the encoders that start at the same time
_PAUSE_S = 0.2  # after an error of the system, such as too many open files


class EncoderListener:
    """A socket with a thread for each engine's connection, at most `max_connections` at once.

    Raise a `ModelError` if the socket can't be made, such as when another encoder listens there.
    """

    def __init__(
        self, path: str, service: EncodingService, identity: Identity, *, max_connections: int
    ) -> None:
        self._service = service
        self._hello = encode_message(Hello(PROTOCOL, identity))
        self._max_connections = max_connections
        self._path = Path(check_path(path))
        self._socket, self._inode = _listen(self._path)
        self._lock = threading.Condition()  # of the fields below
        self._open: dict[socket.socket, bool] = {}  # connection -> whether it has a question
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept_all, name="accept", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Remove the socket, answer questions in flight for `timeout_s`, and close connections."""
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:  # no other one was put there
                self._path.unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            for connection, is_busy in self._open.items():
                if not is_busy:
                    _shut_down(connection)
            self._lock.wait_for(lambda: not self._open, max(0.0, deadline - time.monotonic()))
            for connection in self._open:
                _shut_down(connection)
            self._lock.wait_for(lambda: not self._open, _PROBE_S)
        self._thread.join()
        self._socket.close()

    def _accept_all(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed or self._socket.fileno() < 0:
                    return
                logger.debug("no connection can be accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                is_full = len(self._open) >= self._max_connections
                is_taken = is_trusted(connection) and not is_full and not self._is_closed
                if is_taken:
                    self._open[connection] = False
            if is_taken:
                self._begin(connection)
                continue
            if is_full:
                _refuse(connection)
            connection.close()

    def _begin(self, connection: socket.socket) -> None:
        """Start a thread for a connection, or close it if the system has no thread left."""
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except RuntimeError as error:
            logger.warning("a connection can't be served, and is closed: %s", error)
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            del self._open[connection]
            self._lock.notify_all()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            channel.send(self._hello, deadline=time.monotonic() + _SEND_S)
            while not self._is_closed:
                self._serve_one(channel, connection)
        except (ChannelError, OSError, TimeoutError) as error:
            logger.debug("a connection has ended: %s", error)
        except Exception:
            logger.exception("a connection has failed, and is closed")
        finally:
            self._end(connection)

    def _serve_one(self, channel: Channel, connection: socket.socket) -> None:
        """Answer a question, in its own function so that no tensors stay in memory afterwards."""
        frame, block = channel.receive()
        self._mark(connection, is_busy=True)
        answer, blocks = self._answer(frame, block)
        del block  # the memory of the media is not needed any more
        channel.send(encode_message(answer), blocks, deadline=time.monotonic() + _SEND_S)
        self._mark(connection, is_busy=False)

    def _mark(self, connection: socket.socket, *, is_busy: bool) -> None:
        with self._lock:
            self._open[connection] = is_busy

    def _answer(self, frame: bytes, block: memoryview) -> tuple[FromEncoder, list[Buffer]]:
        try:
            question = decode_question(frame)
            if not isinstance(question, Encode):
                return Counted(self._service.get_counts()), []
            if self._is_closed:
                raise StoppingError("the encoder is stopping: try again later")
            return answer_job(self._service, question.job, block)
        except CapacityError as error:
            return Failed(make_record(error)), []
        except msgspec.MsgspecError as error:
            raise ChannelError(f"an engine has sent a message that is none: {error}") from error


def answer_job(
    service: EncodingService, message: bytes, block: memoryview
) -> tuple[Encoded | Failed, list[Buffer]]:
    """Encode the item in a message of `encode_job`; return the answer and its tensors' block."""
    try:
        job, media, _ = decode_job(message, block)
        source = MediaBytes(media) if isinstance(media, bytes) else media
        finished = service.encode(job, source)
        item = finished.result
        if not isinstance(item, ProcessedItem) or item.layout is None:
            raise InvariantError("an encoded item has no tensors or no layout")
        header = encode_header(item.kwargs)
        return Encoded(item.layout, header, finished.times), [*as_buffers(item.kwargs)]
    except (RequestError, CapacityError) as error:
        return Failed(make_record(error)), []
    except msgspec.MsgspecError:  # the message is invalid
        raise
    except Exception:
        logger.exception("a media item could not be encoded")
        return Failed(make_record(FailedRequestError(NOT_PROCESSED))), []


def _listen(path: Path) -> tuple[socket.socket, int]:
    """Return a socket that listens at a path, and the inode of its file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locking(path.parent):
            _remove_stale(path)
            # A new socket has the rights that the mask leaves, so that it is private from its first
            # moment.
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            listener.listen(_BACKLOG)
            return listener, path.lstat().st_ino
    except OSError as error:
        listener.close()
        raise ModelError(
            f"the encoder can't listen at {str(path)!r}: {error.strerror or error}"
        ) from error
    except BaseException:
        listener.close()
        raise


@contextmanager
def _locking(folder: Path) -> Iterator[None]:
    """Lock a folder while an encoder starts, so that no two remove each other's sockets."""
    with ExitStack() as stack:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            deadline = time.monotonic() + _LOCK_S
            # If the lock can't be had soon, do without it: other programs may hold it for other
            # reasons.
            while not _try_lock(descriptor) and time.monotonic() < deadline:
                time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(path: Path) -> None:
    """Remove the socket of an encoder that was killed. Raise `ModelError` if one listens there."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ModelError(f"{str(path)!r} exists and is no socket: give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except (TimeoutError, BlockingIOError):
            pass  # it is too busy to answer, but it is there
    raise ModelError(f"another process listens at {str(path)!r}: stop it or give another path")


def _refuse(connection: socket.socket) -> None:
    error = CapacityError("the encoder has too many connections: try again later")
    message = encode_message(Refused(make_record(error)))
    with suppress(OSError):
        Channel(connection).send(message, deadline=time.monotonic() + _PROBE_S)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
