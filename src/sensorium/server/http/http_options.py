"""What the HTTP layer needs to know of `server.options.ServeOptions`."""

from __future__ import annotations

from typing import Protocol


class HttpOptions(Protocol):
    """`model_names`: what requests may call the model; the first is what answers call it."""

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
    def max_n(self) -> int: ...

    @property
    def body_timeout(self) -> float: ...

    @property
    def min_body_rate(self) -> int: ...

    @property
    def max_unfinished_bodies_mb(self) -> int: ...

    @property
    def host(self) -> str: ...

    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...

    @property
    def share_uuids(self) -> bool: ...

    @property
    def allowed_origins(self) -> tuple[str, ...]: ...

    @property
    def trust_request_chat_template(self) -> bool: ...

    @property
    def trust_injected(self) -> bool: ...

    @property
    def is_render_only(self) -> bool: ...

    @property
    def tool_call_parser(self) -> str: ...

    @property
    def reasoning_parser(self) -> str: ...

    @property
    def protect_metrics(self) -> bool: ...
