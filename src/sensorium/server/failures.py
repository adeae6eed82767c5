"""What failed, written down: counted, logged if it is our bug, and told to the client."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.requests import Request

from sensorium.server.errors import ErrorAnswer, make_answer
from sensorium.server.interfaces import Metrics
from sensorium.server.protocol.chat import ChatCompletionRequest
from sensorium.server.protocol.completions import CompletionRequest

logger = logging.getLogger(__name__)
_FIELDS = frozenset({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})


class FailureLog:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def report(self, error: Exception, request_id: str) -> ErrorAnswer:
        answer = make_answer(error, fields=_FIELDS)
        self._metrics.count_refusal(answer.reason)
        if answer.is_bug:
            logger.error("request %s failed", request_id, exc_info=error)
        return answer

    def make_reporter(self, request: Request) -> Callable[[Exception], bytes]:
        """For a failure after the status was sent."""
        request_id: str = request.state.request_id
        return lambda error: self.report(error, request_id).make_body()
