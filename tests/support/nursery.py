"""Starts processes that need not load PyTorch and Transformers: forks of one that has loaded them.

Each process of a server that starts by itself loads these libraries, which takes it five seconds of
a core. Tests start hundreds of such processes. So the processes of the tests share a process, the
nursery, that has loaded the libraries and computed nothing. A server under test is a fork of it,
and so are the processes that it starts with `python -m sensorium...`: instead of running another
interpreter, the fork forgets what was imported since, and runs that module. All else is as in a
server that a user starts: processes, parents, descriptors, environments and signals.

    python nursery.py DESCRIPTOR

runs the nursery, which is asked over connections to the socket with this descriptor. When a
connection ends, the nursery kills what it has started for it. It ends with the last connection.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import json
import logging
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

_LIBRARIES = (
    "sensorium.cli.serve",
    "sensorium.server.processes.core_app",
    "sensorium.server.processes.frontend_app",
    "sensorium.multimodal.processing.item_backend",
    "av",
    "soxr",
    # What Transformers loads for the models that servers are tested with.
    "transformers.tokenization_mistral_common",
    "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
    "transformers.models.qwen2_5_omni.processing_qwen2_5_omni",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen2_vl.video_processing_qwen2_vl",
    "transformers.models.whisper.feature_extraction_whisper",
)
_START_S = 240.0  # long, because the machine may be busy
_LINGER_S = 3.0  # from the end of the last connection to the end of the nursery


class NurseryProcess:
    """A process that was started by a nursery. Its methods are those of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int, stdout: IO[str] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._nursery = nursery

    def poll(self) -> int | None:
        with self._nursery.changed:
            self.returncode = self._nursery.statuses.get(self.pid, self.returncode)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._nursery.changed:
            self._nursery.changed.wait_for(lambda: self.pid in self._nursery.statuses, timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a server under test", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The connection to a process that has loaded all libraries, and forks at request."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}  # exit statuses of processes that have ended
        self.changed = threading.Condition()
        self._num_requests = 0
        self._pids: list[int] = []  # of processes that were started, in the order of the requests
        self._connection = self._connect()
        threading.Thread(target=self._read, daemon=True).start()

    def _connect(self) -> socket.socket:
        """Connect to the nursery of this run of the tests. Start it if there is none."""
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        address = f"\0sensorium-nursery-{run}"  # no file: it vanishes with the nursery
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with socket.socket(socket.AF_UNIX) as listener:
                try:
                    listener.bind(address)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # another process of the tests has it
                        raise
                else:
                    listener.listen()
                    self._start_process(listener)
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(address)
            except ConnectionRefusedError:  # it is bound and does not listen yet, or it has ended
                connection.close()
                time.sleep(0.01)
            else:
                assert _is_of_this_user(connection)
                return connection
        raise AssertionError("the nursery can't be reached")

    def _start_process(self, listener: socket.socket) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
            start_new_session=True,  # it ends with its connections, and not by Ctrl-C
        )

    def start(
        self,
        code: str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> NurseryProcess:
        """Run Python code in a session of its own, with the arguments in `sys.argv`.

        Without descriptors for stdout and stderr, both are one pipe, which the result has.
        """
        with ExitStack() as stack:
            reading = None
            if stdout is None:
                ours, stdout = os.pipe()
                stack.callback(os.close, stdout)
                reading = os.fdopen(ours)
            pid = self._request(
                [code, [*arguments], dict(env), os.getcwd()], stdout, stderr or stdout
            )
        return NurseryProcess(self, pid, reading)

    def _request(self, request: Any, *descriptors: int) -> int:
        """Send a request, and return the id of the process that was started for it."""
        content = json.dumps(request).encode()
        with self.changed:  # requests of several threads are sent and answered in one order
            number = self._num_requests
            self._num_requests += 1
            socket.send_fds(self._connection, [len(content).to_bytes(4, "little")], descriptors)
            self._connection.sendall(content)
            if not self.changed.wait_for(lambda: len(self._pids) > number, timeout=_START_S):
                raise AssertionError("the nursery does not answer")
            return self._pids[number]

    def run(
        self, code: str, arguments: Sequence[str] = (), *, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code to its end, and return its exit status and what it printed."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            streams = {"stdout": out.fileno(), "stderr": errors.fileno()}
            process = self.start(code, arguments, env=env, **streams)
            try:
                status = process.wait(timeout)
            finally:
                process.kill()
            texts = [Path(f"/proc/self/fd/{file.fileno()}").read_text() for file in (out, errors)]
        return subprocess.CompletedProcess(code, status, *texts)

    def _read(self) -> None:
        with self._connection.makefile() as lines:
            for line in lines:
                pid, status = json.loads(line)
                with self.changed:
                    if status is None:
                        self._pids.append(pid)
                        self.statuses.pop(pid, None)  # the system gives ids again
                    else:
                        self.statuses[pid] = status
                    self.changed.notify_all()


@cache
def get_nursery() -> Nursery:
    """Return the connection to the nursery, which is started when it is first needed."""
    return Nursery()


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(listener.fileno(), False)
    gc.disable()
    for name in _LIBRARIES:
        importlib.import_module(name)
    importlib.import_module("tests.support.overlap").apply()
    # The modules of the server have a state of their own in each process.
    _forget(
        name
        for name in set(sys.modules)
        if name.startswith(("sensorium.server", "prometheus_client"))
    )
    gc.freeze()
    gc.enable()
    with selectors.DefaultSelector() as selector:
        _Service(selector, listener).run()


class _Service:
    """What the nursery does for each of its connections: it starts processes and awaits them."""

    def __init__(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        self._fork = _Fork()
        self._selector = selector
        # connection -> its processes: descriptor -> id
        self._children: dict[socket.socket, dict[int, int]] = {}
        selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def run(self) -> None:
        """Serve until there has been no connection for a while."""
        while ready := self._selector.select(None if self._children else _LINGER_S):
            for key, _ in ready:
                if self._selector.get_map().get(key.fd) is key:  # not ended by one before it
                    key.data()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if not _is_of_this_user(connection):
            connection.close()
            return
        self._children[connection] = {}
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._start(connection))

    def _start(self, connection: socket.socket) -> None:
        """Start a process, or kill those of a connection that has ended."""
        try:
            header, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
            if not header:
                raise EOFError
            request = json.loads(_receive(connection, int.from_bytes(header, "little")))
        except (EOFError, ConnectionError):
            self._end(connection)
            return
        pid = self._fork.run_code(*request, *descriptors)
        for opened in descriptors:
            os.close(opened)
        descriptor = os.pidfd_open(pid)
        self._children[connection][descriptor] = pid
        self._selector.register(
            descriptor, selectors.EVENT_READ, lambda: self._await(connection, descriptor)
        )
        _send(connection, pid, None)

    def _await(self, connection: socket.socket, descriptor: int) -> None:
        """Tell how a process has ended."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        pid, status = os.waitpid(self._children[connection].pop(descriptor), 0)
        _send(connection, pid, os.waitstatus_to_exitcode(status))

    def _end(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        for descriptor, pid in self._children.pop(connection).items():
            self._selector.unregister(descriptor)
            os.close(descriptor)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        connection.close()


def _send(connection: socket.socket, pid: int, status: int | None) -> None:
    with suppress(ConnectionError):
        connection.sendall(json.dumps([pid, status]).encode() + b"\n")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        piece = connection.recv(num_bytes - len(received))
        if not piece:
            raise EOFError("the tests ended in the middle of a request")
        received += piece
    return received


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end may run code here."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user_id, _ = struct.unpack("3i", credentials)
    return bool(user_id == os.getuid())


class _Fork:
    """Forks of this process, each as if it were a fresh interpreter with some modules loaded."""

    def __init__(self) -> None:
        self._modules = frozenset(sys.modules)
        self._execute: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
        subprocess._fork_exec = self._fork_or_execute  # type: ignore[attr-defined]

    def run_code(
        self,
        code: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        directory: str,
        stdout: int,
        stderr: int,
    ) -> int:
        def run() -> None:
            os.chdir(directory)
            sys.argv = ["-c", *arguments]
            exec(code, {"__name__": "__main__"})

        pid = os.fork()
        if not pid:
            nothing = os.open(os.devnull, os.O_RDONLY)
            self._become(run, env, {0: nothing, 1: stdout, 2: stderr})
        return pid

    def _fork_or_execute(self, *given: Any) -> int:
        """Replace the function with which `subprocess` starts all processes."""
        command = [os.fsdecode(word) for word in given[0]]
        program, *words = [word for word in command if word != "-P"]
        is_ours = words[:1] == ["-m"] and words[1].split(".")[0] == "sensorium"
        if program != sys.executable or not is_ours:
            return self._execute(*given)
        _, _, _, kept, _, variables, stdin, _, _, stdout, _, stderr, _, errors = given[:14]
        name, *arguments = words[1:]

        def run() -> None:
            sys.argv = [name, *arguments]
            runpy.run_module(name, run_name="__main__", alter_sys=True)

        pid = os.fork()
        if not pid:
            Path("/proc/self/comm").write_text(name[-15:])  # for `get_command` and `ps`
            env = dict(os.environ)
            if variables is not None:
                env = dict(os.fsdecode(pair).split("=", 1) for pair in variables)
            streams = {0: stdin, 1: stdout, 2: stderr}
            streams = {to: fd for to, fd in streams.items() if fd >= 0}
            # What is read from `errors` is why a program could not be run: here nothing.
            self._become(run, env, streams, set(kept) - {errors})
        return pid

    def _become(
        self,
        run: Callable[[], None],
        env: Mapping[str, str],
        streams: Mapping[int, int],
        kept: Collection[int] = (),
    ) -> NoReturn:
        """Run a program in this process, and end the process with it."""
        status = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                signal.signal(number, default)
            for to, descriptor in streams.items():
                os.dup2(descriptor, to)
            _close_all_but(kept)
            asyncio._set_running_loop(None)
            asyncio.set_event_loop_policy(None)
            os.environ.clear()
            os.environ.update(env)
            tempfile.tempdir = None
            logging.captureWarnings(False)
            logging.basicConfig(level=logging.WARNING, handlers=[], force=True)
            _forget(set(sys.modules) - self._modules)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
            if "OMP_NUM_THREADS" in env:
                sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
            run()
            status = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # as an interpreter does: print it, and end with status 1
            traceback.print_exc()
        finally:
            with suppress(Exception):
                threading._shutdown()  # type: ignore[attr-defined]
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)


def _forget(modules: Iterable[str]) -> None:
    """Make this process load modules of ours anew. Libraries in C can be loaded once only."""
    for name in modules:
        if name.startswith(("sensorium", "prometheus_client")):
            del sys.modules[name]


def _close_all_but(kept: Collection[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in kept:
            with suppress(OSError):
                os.close(descriptor)


if __name__ == "__main__":
    main()
