"""The command `deploy`, which runs a model on several engines with Ray Serve.

`build_app` makes the same application from a config file of Ray Serve, where the arguments have the
names of the flags.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from sensorium.checkpoints.first_look import look_into
from sensorium.cli.flags import (
    ENGINE_GROUPS,
    add_server_command,
    get_given,
    look_at_model,
    tell_notes,
)
from sensorium.cli.serve import make_options
from sensorium.scale.options import ScaleOptions
from sensorium.server.options import ServeOptions
from sensorium.server.processes.shared_resources import Address
from sensorium.types.errors import ModelError, RequestError, SensoriumError
from sensorium.types.options import list_options

if TYPE_CHECKING:
    from ray.serve import Application

_ERROR = re.compile(r"(?:[\w.]+\.)?\w+Error: ")  # the last line of a traceback
_PROBE_S = 5.0
_APP = "sensorium"  # the name of the application in Ray Serve
_PATH = "sensorium.cli.deploy:build_app"
_ELSEWHERE = ("port", "ray_address")  # flags that are no arguments of the application
_OPTIONS = tuple(
    each
    for group in (ScaleOptions, ServeOptions, *ENGINE_GROUPS)
    for each in list_options(group)
    if each.flag
)
_COUNTS = frozenset(each.destination for each in _OPTIONS if each.kind == "counts")
_SIZES = frozenset(each.destination for each in _OPTIONS if each.kind == "sizes")
_OFF = frozenset(
    each.destination for each in _OPTIONS if each.kind == "switch" and not each.default
)
_DEPLOY = """Serve a model with several engines, on one machine or on many, with Ray Serve. Equal
media goes to the same engine, so that the whole cluster processes it once. Needs the extra `scale`
of the package. Without --ray-address a Ray is started on this machine, and ends with this command.
On a Ray that runs already, the application continues when this command is interrupted; `serve
shutdown` ends it."""
_EXAMPLES = """examples:
  sensorium deploy --replicas 2 --frontends 2     (sensorium-mini, on this machine)
  sensorium deploy MODEL --replicas 4 --max-replicas 16 --ray-address auto
  sensorium deploy MODEL --replicas 4 --print-config > serve.json && serve deploy serve.json
"""


def add_deploy(commands: Any) -> None:
    parser = add_server_command(
        commands,
        "deploy",
        *(ScaleOptions, ServeOptions, *ENGINE_GROUPS),
        summary="serve a model with several engines, with Ray Serve",
        description=_DEPLOY,
        examples=_EXAMPLES,
        run=_deploy,
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="Print a config file for Ray Serve instead of deploying anything.",
    )


def _deploy(arguments: argparse.Namespace) -> None:
    options, scale = _make_options(arguments)
    tell_notes(arguments)
    if arguments.print_config:
        print(make_config(arguments, options), end="")
        return
    model = options.loading.model
    if scale.ray_address is None:  # else the files are on other machines
        look_at_model(model, arguments)
    _set_variables(scale)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ModelError(
            "`sensorium deploy` needs Ray: install the extra `scale`, as in pip install "
            "'sensorium[scale]'"
        ) from error
    from sensorium.models.checkpoint import find_checkpoint
    from sensorium.scale.deployment import make_application

    port = options.port
    if scale.ray_address is None or not port:
        port = _find_port(options)  # before Ray starts, which takes a while
    if scale.ray_address is None:
        directory = find_checkpoint(  # else each engine would report a wrong name after minutes
            model,
            revision=options.loading.revision,
            trust_remote_code=options.loading.trust_remote_code,
            use_tqdm=options.loading.use_tqdm_on_load,
        )
        look_into(directory, max_model_len=options.engine.max_model_len)
    signals = Signals()
    signals.install()
    _connect(ray, scale)
    signals.install()  # Ray's own handler would abort this process with a dump of its stack
    with _explaining_start():
        serve.start(http_options={"host": options.host, "port": port})
    print(f"Sensorium: starting {scale.replicas} engine(s) of {options.model_label}", flush=True)
    try:
        serve.run(make_application(options, scale), name=_APP, route_prefix="/")
    except RuntimeError as error:  # the words of Ray, with those of the process that failed
        reason = _find_reason(serve) or error
        raise ModelError(f"the application could not be started: {reason}") from error
    signals.end_start()
    print(f"Sensorium is ready: http://{options.host}:{port}", flush=True)
    signals.wait()
    if scale.ray_address is None:
        print("Sensorium: waiting for requests in flight", flush=True)
        _drain(serve, options.shutdown_timeout)
        # All of this Ray ends here. To end Ray Serve before would only make Ray report that a
        # process of its own was killed.
        ray.shutdown()


class Signals:
    """Handlers of SIGINT and SIGTERM, which end the command while it starts, and `wait` later.

    An exception of a handler is lost in a finalizer, and where Ray catches everything. So a signal
    is also noted, and ends the command when the start is over.
    """

    def __init__(self) -> None:
        self._is_starting = True
        self._number: int | None = None  # of the last signal
        self._came = threading.Event()

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, number: int, _: object) -> None:
        self._number = number
        self._came.set()
        if self._is_starting:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def end_start(self) -> None:
        """End the command if there was a signal, and let the next one end `wait`."""
        self._is_starting = False
        if self._number is not None:
            sys.exit(128 + self._number)

    def wait(self) -> None:
        self._came.wait()


def _set_variables(scale: ScaleOptions) -> None:
    """Set what Ray reads from the environment, before it is imported."""
    from sensorium.scale import proxy

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports to its makers
    if scale.ray_address is None:
        # Anyone who reaches a port of Ray can run programs. This makes Ray listen on 127.0.0.1
        # only, for which there is no option.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Ray's proxy, which it starts with this environment, has no limits of its own.
        os.environ.setdefault(proxy.VARIABLE, proxy.PATH)


def _find_reason(serve: Any) -> str | None:
    """Return the error line of a process that did not start, or `None` if Ray reports none."""
    application = serve.status().applications.get(_APP)
    if application is None:
        return None
    lines = [
        line
        for deployment in application.deployments.values()
        for line in deployment.message.splitlines()
        if _ERROR.match(line)
    ]
    return lines[-1] if lines else None


def _check_ray(address: str) -> None:
    """Raise a `RequestError` if nothing listens where Ray should. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return  # "auto", or a kind of address that only Ray understands
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise RequestError(f"there is no Ray at {address!r}: {error}") from error


def _connect(ray: Any, scale: ScaleOptions) -> None:
    if scale.ray_address is not None:
        _check_ray(scale.ray_address)
        try:
            ray.init(address=scale.ray_address, log_to_driver=False)
        except ConnectionError as error:
            raise RequestError(f"there is no Ray at {scale.ray_address!r}: {error}") from error
        return
    # Ray's advice to turn its tokens off, which is useless where they were never turned on.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    most = max(scale.replicas, scale.max_replicas or 0)
    needed = most * scale.engine_cpus + scale.frontends * scale.frontend_cpus
    needed += scale.encoders * scale.encoder_cpus
    with _explaining_start():
        ray.init(
            address="local",  # a new one, whatever else runs here
            num_cpus=max(os.cpu_count() or 1, -int(-needed // 1)),
            include_dashboard=False,
            log_to_driver=True,
        )


@contextmanager
def _explaining_start() -> Iterator[None]:
    """Convert exceptions of Ray's start to a `ModelError` that says what to do.

    Ray raises a plain `Exception` if one of its processes is not there within 30 seconds.
    """
    try:
        yield
    except Exception as error:  # whatever it is, Ray has not started
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"Ray did not start in time, or not at all: {lines[0]} Try again when this machine is "
            "less busy, or start Ray yourself (`ray start --head`) and give --ray-address auto. "
            "Ray's logs are in /tmp/ray/session_latest/logs."
        ) from error


def _drain(serve: Any, timeout_s: float) -> None:
    """End the application first, because ending Ray's proxies breaks off all responses.

    Ray gives each process `timeout_s` seconds and some more, and waits no longer than a minute.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            serve.delete(_APP)
            return
        except TimeoutError:
            if time.monotonic() > deadline:
                return


def _find_port(options: ServeOptions) -> int:
    """Return the port of the options, or a free one if that is 0, because Ray can't choose one."""
    with closing(Address.bind(options.host, options.port)) as address:
        port: int = address.listener.getsockname()[1]
        return port


def build_app(arguments: Mapping[str, Any]) -> Application:
    """Return the application for a config file of Ray Serve.

    `arguments` are those of `sensorium deploy`: `{"model": "org/name", "replicas": 4}`. Flags that
    may be repeated take lists, and switches take true or false.
    """
    from sensorium.scale.deployment import make_application

    return make_application(*_make_options(parse_arguments(arguments)))


def parse_arguments(given: Mapping[str, Any]) -> argparse.Namespace:
    """Return a config file's arguments as a namespace, or raise `RequestError` if one is wrong."""
    parser = _RaisingParser()
    commands = parser.add_subparsers(parser_class=_RaisingParser)
    add_deploy(commands)
    words = ["deploy"]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += _write_switch(name, flag, value=value)
        elif isinstance(value, list | tuple) and name not in _SIZES:
            words += [f"{flag}={each}" for each in value]
        elif value is not None:
            words.append(f"{flag}={_write_value(name, value)}")
    return parser.parse_args(words)


def _write_switch(name: str, flag: str, *, value: bool) -> list[str]:
    """Return the command-line words for a switch: none to turn off one that is off by default."""
    if value:
        return [flag]
    return [] if name in _OFF else [f"--no-{flag[2:]}"]


def _write_value(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping) and name in _COUNTS:
        return ",".join(f"{key}={each}" for key, each in value.items())
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


class _RaisingParser(argparse.ArgumentParser):
    """A parser that raises a `RequestError` instead of ending the process."""

    def error(self, message: str) -> Any:
        raise RequestError(f"the arguments of the application are wrong: {message}")


def _make_options(arguments: argparse.Namespace) -> tuple[ServeOptions, ScaleOptions]:
    try:
        scale = ScaleOptions(**get_given(arguments, ScaleOptions))
        if scale.encoders and getattr(arguments, "encoder", None) is not None:
            raise ModelError("--encoders and --encoder can't be used together: give one of them")
    except SensoriumError as error:
        arguments.refuse(str(error))
        raise
    return make_options(arguments), scale


def make_config(arguments: argparse.Namespace, options: ServeOptions) -> str:
    """Return a config file of Ray Serve, as JSON, with the arguments that were given."""
    given: dict[str, Any] = {"model": options.model}
    for each in _OPTIONS:
        if each.destination not in _ELSEWHERE and hasattr(arguments, each.destination):
            value = getattr(arguments, each.destination)
            is_scaled = each.unit != 1 and isinstance(value, int | float)
            given[each.destination] = value // each.unit if is_scaled else value
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port},
        "applications": [
            {"name": _APP, "route_prefix": "/", "import_path": _PATH, "args": given},
        ],
    }
    return json.dumps(config, indent=2) + "\n"
