"""What happened to one request, for the client who asked (`sensorium_trace`)."""

from __future__ import annotations

from typing import Any

from sensorium.server.interfaces import Clock
from sensorium.types.outputs import RequestOutput


def make_trace(output: RequestOutput, clock: Clock) -> dict[str, Any]:
    del clock
    return {"request_id": output.request_id}
