"""What the HTTP layer needs of the parts around it: the engine, the options, the metrics."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sensorium.engine.chat import Chat
from sensorium.engine.core_messages import CoreInfo
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.prompts import Prompt
from sensorium.types.sampling import SamplingParams


class Engine(Protocol):
    """See `engine.async_engine.AsyncEngine`. The last delta has `final`; closing a stream aborts
    its request.
    """

    @property
    def is_connected(self) -> bool: ...

    @property
    def info(self) -> CoreInfo | None: ...

    @property
    def tokenizer(self) -> Any: ...

    def stream(
        self, prompt: Prompt | Chat, params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[RequestDelta, None]: ...

    async def reset_cache(self, level: str) -> None: ...


class Options(Protocol):
    """See `server.options.ServeOptions`."""

    @property
    def model_names(self) -> tuple[str, ...]: ...

    @property
    def api_key(self) -> tuple[str, ...]: ...

    @property
    def api_server_count(self) -> int: ...

    @property
    def max_concurrent_requests(self) -> int: ...

    @property
    def max_body_mb(self) -> int: ...

    @property
    def allowed_origins(self) -> tuple[str, ...]: ...

    @property
    def trust_request_chat_template(self) -> bool: ...

    @property
    def protect_metrics(self) -> bool: ...


class Clock(Protocol):
    """What is measured of one request of the engine."""

    def mark(self, stage: str) -> None: ...

    def on_tokens(self, index: int, num_tokens: int) -> None: ...

    def on_finish(self, output: RequestOutput) -> None: ...


class Metrics(Protocol):
    """See `server.metrics`."""

    def track_arrival(self) -> AbstractContextManager[Any]: ...

    def count_refusal(self, reason: str) -> None: ...

    def start_request(self, *, arrived: float, params: SamplingParams | None) -> Clock: ...

    def observe_loop_lag(self, seconds: float) -> None: ...

    def render(self) -> tuple[bytes, str]: ...

    def get_load(self) -> int: ...
