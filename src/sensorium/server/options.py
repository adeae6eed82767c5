"""The options of a server and of its engine, as one value that goes to all of its processes.

This module must not import torch, because the parent of the processes imports it and stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.render.answers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from sensorium.types.errors import RequestError
from sensorium.types.options import ONE_MACHINE, SERVE, SERVERS, option
from sensorium.types.sampling import MAX_N

MAX_FRONTENDS = 64
_MAX_TIMEOUT_S = 86_400.0
_MAX_SHM_MEMBERS = 256  # processes that can share the memory of a cache
_option = partial(option, commands=SERVERS)  # an option of `serve` and `render`
_seconds = partial(_option, least=0, most=_MAX_TIMEOUT_S, metavar="SECONDS")

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """All options of a server and of its engine; contradictory ones raise a `RequestError`."""

    loading: LoadingOptions = field(default_factory=LoadingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    is_render_only: bool = False  # there is no core, and no weights are loaded
    frontends_reason: str = ""  # why there are so many frontends, if the user has not said

    host: str = _option(
        "127.0.0.1",
        section="server",
        help="The address to listen on. 127.0.0.1 serves this machine only, 0.0.0.0 everyone.",
    )
    port: int = _option(8000, least=0, most=65_535, help="The port. 0 means any free one.")
    api_server_count: int = _option(
        1,
        default_text="1; with a GPU one for every 4 cores, at most 4, if memory can be shared",
        least=1,
        most=MAX_FRONTENDS,
        metavar="N",
        commands=ONE_MACHINE,
        help="The number of frontends: processes that serve HTTP and process media. With more than "
        "one, processed media is kept in shared memory.",
    )
    api_key: tuple[str, ...] = _option(
        (),
        kind="texts",
        metavar="KEY",
        default_text="$SENSORIUM_API_KEY; else no key is needed",
        is_secret=True,
        help="A key that requests must bring. Every user of the machine can read it in the list of "
        "processes: a file or the variable SENSORIUM_API_KEY hides it.",
    )
    api_key_file: str | None = _option(
        None,
        kind="text",
        metavar="PATH",
        default_text="none",
        help="A file with such keys, one in a line.",
    )
    warmup: bool = _option(
        True,
        help="Process a small item of each modality, let the model compute it, and start the "
        "processes for media before the server is ready.",
    )
    protect_metrics: bool = _option(False, help="Also ask for the key at /metrics.")
    shutdown_timeout: float = _seconds(
        30.0, help="The time that requests have to end after SIGTERM."
    )
    core_stall_timeout: float = _seconds(
        60.0,
        commands=SERVE,
        help="The time without progress of the engine after which /health is 503. After twice that "
        "time the engine is killed and started again. A long step that continues does not count, "
        "nor does compiling kernels. 0 turns this off.",
    )
    allowed_origins: tuple[str, ...] = _option(
        (),
        kind="texts",
        metavar="ORIGIN",
        default_text="only the server's own page",
        help="An origin (https://example.com) of web pages that may send requests, or * for all.",
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        kind="texts",
        metavar="NAME",
        default_text="localhost, 127.0.0.0/8, [::1] and --host where that is this machine only, "
        "else all",
        help="A name by which clients may call the server (the Host header), or * for all. Needed "
        "behind a proxy that forwards its own name to a server on 127.0.0.1.",
    )
    share_uuids: bool = _option(
        False,
        help="Share uuids of media, and hashes that clients chose, among all API keys. Without it "
        "each key has its own.",
    )

    served_model_name: tuple[str, ...] = _option(
        (),
        section="requests",
        kind="names",
        metavar="NAME",
        default_text="MODEL",
        help="What clients may call the model. Answers bear the first of these names.",
    )
    max_concurrent_requests: int = _option(
        512,
        least=1,
        metavar="N",
        help="The most requests at once, in all frontends together (of a cluster: in each). More "
        "are refused with 429.",
    )
    max_body_mb: int = _option(
        512,
        least=1,
        metavar="MIB",
        help="The largest body of a request, in MiB. Media as base64 counts.",
    )
    max_upload_mb: int = _option(
        512,
        least=1,
        metavar="MIB",
        commands=SERVE,
        help="The largest upload to the routes for speech, in MiB. It is kept in the system's "
        "folder for temporary files until it is complete.",
    )
    stream_timeout: float = _seconds(
        60.0,
        commands=ONE_MACHINE,
        help="The time for which a client may read nothing of what waits for it. Then its "
        "connection and its request are ended. 0 turns this off.",
    )
    max_realtime_sessions: int = _option(
        64,
        least=1,
        metavar="N",
        commands=SERVE,
        help="The most sessions at /v1/realtime at once, in all frontends together (of a cluster: "
        "in each). Each also counts as a request. More are refused with 429.",
    )
    realtime_idle_timeout: float = _seconds(
        300.0,
        commands=SERVE,
        help="The time after which a session at /v1/realtime is closed if its client sends nothing "
        "and nothing is sent to it. 0 turns this off.",
    )
    realtime_max_session: float = _seconds(
        21_600.0,
        commands=SERVE,
        help="The longest time of a session at /v1/realtime. What was said by then is still "
        "transcribed. 0 turns this off.",
    )
    chat_template: str | None = _option(
        None,
        kind="file",
        metavar="FILE",
        default_text="the model's own template",
        help="The file of a chat template.",
    )
    trust_request_chat_template: bool = _option(
        False,
        help="Let requests bring a chat template, which is a program. Without it they are refused.",
    )
    head_timeout: float = _seconds(
        30.0,
        least=0.1,
        commands=ONE_MACHINE,
        help="The time for the line and the headers of a request. A connection that has not sent "
        "them by then is closed.",
    )
    body_timeout: float = _seconds(
        600.0, least=0.1, help="The time for the whole body of a request."
    )
    min_body_rate: int = _option(
        8,
        least=1,
        metavar="KIB",
        help="The KiB of a body that must come in each second, on average after the first 30 "
        "seconds.",
    )
    max_unfinished_bodies_mb: int = _option(
        1024,
        least=1,
        metavar="MIB",
        help="The memory of a frontend for bodies that are still coming, in MiB; --max-body-mb at "
        "least. Beyond it the oldest body is refused. Uploads that are still coming may take as "
        "much room on the disk, or --max-upload-mb if that is more.",
    )
    tool_call_parser: str = _option(
        "auto",
        choices=TOOL_CALL_PARSERS,
        metavar="FORMAT",
        help=f"How the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}. With auto it is "
        "found by looking at the model.",
    )
    reasoning_parser: str = _option(
        "auto",
        choices=REASONING_PARSERS,
        metavar="FORMAT",
        help=f"How the model writes its reasoning: {', '.join(REASONING_PARSERS)}. With auto it is "
        "found by looking at the model.",
    )
    max_n: int = _option(
        MAX_N,
        least=1,
        most=MAX_N,
        metavar="N",
        commands=SERVE,
        help="The most completions that a request may ask for with one prompt.",
    )
    trust_injected: bool = _option(
        False,
        commands=SERVE,
        help="Keep processed media that a client sends to /inference/v1/generate under the hash it "
        "came with, for everybody. Without it such media is kept separate from what the server "
        "itself processed.",
    )

    log_format: LogFormat = option(
        "text",
        section="logging",
        choices=("text", "json"),
        commands=(*SERVERS, "encode"),
        help="How log lines are written.",
    )
    log_level: LogLevel = option(
        "info",
        choices=("debug", "info", "warning", "error"),
        commands=(*SERVERS, "encode"),
        help="The least important lines that are logged.",
    )
    access_log: bool = _option(True, help="Log a line for each request.")

    def __post_init__(self) -> None:
        count, media = self.api_server_count, self.media
        if self.is_render_only:
            return
        if count > 1 and media.capacity_bytes and not media.has_shared_memory:
            raise RequestError(
                f"api_server_count={count} needs mm_processor_cache_type=shm, because several "
                "frontends share one cache of media (mm_processor_cache_gb=0 turns the cache off)"
            )
        num_members = count * (media.mm_processor_pool_size + 1) + 1
        if media.has_shared_memory and num_members > _MAX_SHM_MEMBERS:
            raise RequestError(
                f"{num_members} processes would share the cache of media, but only "
                f"{_MAX_SHM_MEMBERS} can: use a smaller mm_processor_pool_size or api_server_count"
            )

    @property
    def model(self) -> str:
        """Return the model as the user named it: a directory, a hub id, or the embedded model."""
        return self.loading.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return the names by which requests may refer to the model; responses have the first."""
        return self.served_model_name or (self.model,)

    @property
    def model_label(self) -> str:
        """Return the model for messages to people, such as "org/model as chat, assistant"."""
        if self.model_names == (self.model,):
            return self.model
        return f"{self.model} as {', '.join(self.model_names)}"

    @property
    def shm_capacity_bytes(self) -> int:
        """Return the size of the shared memory for processed media in bytes, or 0 without any."""
        if self.is_render_only or not self.media.has_shared_memory:
            return 0
        return self.media.capacity_bytes
