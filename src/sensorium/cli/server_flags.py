"""Flags about the server itself: where it listens, who may ask, how much, and what it logs."""

from __future__ import annotations

import argparse
from typing import Any

from sensorium.cli.parsing import at_least, between, parse_file
from sensorium.render.answers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from sensorium.types.sampling import MAX_N

MAX_FRONTENDS = 64
_MAX_TIMEOUT_S = 86_400.0
_NAMES = (
    "host",
    "port",
    "api_server_count",
    "shutdown_timeout",
    "core_stall_timeout",
    "max_concurrent_requests",
    "max_body_mb",
    "max_n",
    "stream_timeout",
    "head_timeout",
    "body_timeout",
    "min_body_rate",
    "max_unfinished_bodies_mb",
    "share_uuids",
    "chat_template",
    "trust_request_chat_template",
    "trust_injected",
    "warmup",
    "tool_call_parser",
    "reasoning_parser",
    "generation_config",
    "protect_metrics",
    "log_format",
    "log_level",
    "access_log",
)
_LISTS = ("served_model_name", "api_key", "allowed_origins", "allowed_hosts")


def add_server_flags(command: argparse.ArgumentParser, *, has_engine: bool = True) -> None:
    server = command.add_argument_group("server")
    _add_listening(server)
    _add_guards(server)
    requests = command.add_argument_group("requests")
    _add_requests(requests)
    _add_bodies(requests)
    _add_models(requests)
    _add_answers(requests)
    if has_engine:
        _add_watching(server)
        requests.add_argument(
            "--max-n",
            type=at_least(1, MAX_N),
            default=MAX_N,
            metavar="N",
            help=f"completions that a request may ask for of one prompt (default {MAX_N})",
        )
        requests.add_argument(
            "--trust-injected",
            action="store_true",
            help="processed media that a client sends to /inference/v1/generate is kept under the "
            "hash it came with, for everybody (default: apart from what the server itself "
            "processed)",
        )
    _add_logging(command.add_argument_group("logging"))


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine only; 0.0.0.0: everyone)",
    )
    group.add_argument(
        "--port", type=at_least(0, 65_535), default=8000, help="default 8000; 0: any free one"
    )
    group.add_argument(
        "--api-server-count",
        type=at_least(1, MAX_FRONTENDS),
        default=1,
        metavar="N",
        help="processes that serve HTTP and perceive media (default 1; above it, processed media "
        "is kept in shared memory)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="requests must bring it; may be repeated (default: none is needed)",
    )
    group.add_argument(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="perceive something of each kind before the first request (default: yes)",
    )
    group.add_argument("--protect-metrics", action="store_true", help="/metrics needs the key too")
    group.add_argument(
        "--shutdown-timeout",
        type=between(0.0, _MAX_TIMEOUT_S),
        default=30.0,
        metavar="SECONDS",
        help="that requests get to end after SIGTERM (default 30)",
    )


def _add_watching(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--core-stall-timeout",
        type=between(0.0, _MAX_TIMEOUT_S),
        default=60.0,
        metavar="SECONDS",
        help="without progress of the engine after which /health is 503; after twice that the "
        "engine is killed and started again. A step that takes longer but goes on does not count, "
        "nor does compiling kernels (default 60; 0: never)",
    )


def _add_guards(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origins (https://example.com) of web pages that may send requests, * for all; may "
        "be repeated (default: only the server's own page)",
    )
    group.add_argument(
        "--allowed-hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="names by which clients may call the server (the Host header), * for all; may be "
        "repeated. Needed behind a proxy that forwards its own name to a server on 127.0.0.1 "
        "(default: localhost, 127.0.0.0/8, [::1] and --host where that is this machine only; "
        "else all)",
    )
    group.add_argument(
        "--share-uuids",
        action="store_true",
        help="uuids of media and hashes that clients chose are common to all API keys (default: "
        "each key has its own)",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what clients call the model; answers bear the first (default: MODEL)",
    )
    group.add_argument(
        "--max-concurrent-requests",
        type=at_least(1),
        default=512,
        metavar="N",
        help="more are told to come back later (default 512)",
    )
    group.add_argument(
        "--max-body-mb",
        type=at_least(1),
        default=512,
        metavar="MIB",
        help="of one request; media as base64 counts (default 512)",
    )
    group.add_argument(
        "--stream-timeout",
        type=between(0.0, _MAX_TIMEOUT_S),
        default=60.0,
        metavar="SECONDS",
        help="in which a client reads nothing of what waits for it, after which its connection "
        "and its request are ended (default 60; 0: never)",
    )
    group.add_argument(
        "--chat-template",
        type=parse_file,
        metavar="FILE",
        help="instead of the model's own template",
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="requests may bring a template, which is a program (default: they are refused)",
    )


def _add_bodies(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--head-timeout",
        type=between(0.1, _MAX_TIMEOUT_S),
        default=30.0,
        metavar="SECONDS",
        help="for the line and the headers of a request; a connection that has not sent them by "
        "then is closed (default 30)",
    )
    group.add_argument(
        "--body-timeout",
        type=between(0.1, _MAX_TIMEOUT_S),
        default=600.0,
        metavar="SECONDS",
        help="for the whole body of a request (default 600)",
    )
    group.add_argument(
        "--min-body-rate",
        type=at_least(1),
        default=8,
        metavar="KIB",
        help="KiB that must come of a body in each second, on average after the first 30 seconds "
        "(default 8)",
    )
    group.add_argument(
        "--max-unfinished-bodies-mb",
        type=at_least(1),
        default=1024,
        metavar="MIB",
        help="memory for the bodies that are still coming, for each process that serves; at least "
        "--max-body-mb. Beyond it the oldest is refused (default 1024)",
    )


def _add_models(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="whether the model's own defaults for sampling hold (default auto: yes)",
    )


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default="auto",
        metavar="FORMAT",
        help=f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)} (default auto: "
        "found by looking at the model)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        metavar="FORMAT",
        help=f"how the model writes its reasoning: {', '.join(REASONING_PARSERS)} (default auto: "
        "found by looking at the model)",
    )


def _add_logging(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-format", choices=["text", "json"], default="text", help="default text"
    )
    group.add_argument(
        "--log-level",
        choices=["debug", "info", "warning", "error"],
        default="info",
        help="default info",
    )
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line for each request (default: yes)",
    )


def make_server_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServeOptions`."""
    given = {name: getattr(arguments, name) for name in _NAMES if hasattr(arguments, name)}
    return given | {name: tuple(getattr(arguments, name)) for name in _LISTS}
