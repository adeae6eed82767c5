"""What failed, written down: counted, logged if it is our bug, and told to the client."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from sensorium.server.http.errors import ErrorResponse, make_answer
from sensorium.server.http.input_paths import RequestInput
from sensorium.server.http.openai.structured import rename_structured
from sensorium.server.http.protocol.chat import ChatCompletionRequest
from sensorium.server.http.protocol.completions import CompletionRequest
from sensorium.server.http.protocol.token_wire import GenerateRequest
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.types.errors import FailedRequestError, RequestError

logger = logging.getLogger(__name__)
_FIELDS = frozenset(
    {
        *ChatCompletionRequest.model_fields,
        *CompletionRequest.model_fields,
        *GenerateRequest.model_fields,
    }
)


class FailureLog:
    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def report(self, error: Exception, state: Mapping[str, Any]) -> ErrorResponse:
        """`state` is that of the request, with its `request_id` and, once it was read, its
        `input`.
        """
        answer = make_answer(error, fields=_FIELDS)
        given: RequestInput | None = state.get("input")
        if given is not None and given.structured_path is not None:
            message, param = rename_structured(answer.message, given.structured_path)
            answer = replace(answer, message=message, param=param or answer.param)
        if given is not None and _is_of_input(error):
            param = answer.param
            path = given.find_path(answer.message) if param is None else given.qualify(param)
            answer = replace(answer, param=path)
        if answer.reason is not None:
            self._metrics.count_refusal(answer.reason)
        if answer.is_bug:
            logger.error("request %s failed", state["request_id"], exc_info=error)
        return answer

    def make_reporter(self, request: Request) -> Callable[[Exception], bytes]:
        """For a failure after the status was sent."""
        state: Mapping[str, Any] = request.scope["state"]
        return lambda error: self.report(error, state).make_body()


def _is_of_input(error: Exception) -> bool:
    return isinstance(error, RequestError) and not isinstance(error, FailedRequestError)
