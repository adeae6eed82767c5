"""One call of a route for text, from its HTTP request to the engine's requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from starlette.requests import Request

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.inputs.chat_batch import Chat
from sensorium.render.answers.format import AnswerFormat
from sensorium.server.http.bodies.body import read_body
from sensorium.server.http.bodies.body_intake import BodyIntake
from sensorium.server.http.errors import ApiError
from sensorium.server.http.generation import Generation
from sensorium.server.http.http_options import HttpOptions
from sensorium.server.http.middleware.authentication import get_uuid_scope
from sensorium.server.http.protocol.generating import GeneratingRequest
from sensorium.server.http.protocol.reading import read_request
from sensorium.server.http.protocol.token_wire import GenerateRequest
from sensorium.server.http.wire_paths import WirePaths
from sensorium.server.metrics.frontend import FrontendMetrics
from sensorium.server.trace import make_trace
from sensorium.types.outputs import RequestOutput
from sensorium.types.prompts import Prompt, TextPrompt
from sensorium.types.sampling import SamplingParams

TRACE_HEADER = "x-sensorium-trace"
_PROMPT_FIELDS = ("mm_processor_kwargs", "media_io_kwargs", "cache_salt", "priority")
_Wire = TypeVar("_Wire", bound=GeneratingRequest | GenerateRequest)
Work = tuple[Sequence[Prompt | Chat], SamplingParams]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every route has at hand. `started`: seconds since 1970. `answers`: how the model's
    answers are read. `bodies` receives those of all requests.
    """

    engine: AsyncEngine
    answers: AnswerFormat
    options: HttpOptions
    metrics: FrontendMetrics
    bodies: BodyIntake
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[_Wire]):
    """`model` is what the answer calls the model; `created` in seconds since 1970."""

    request: _Wire
    generation: Generation
    model: str
    created: int
    has_trace: bool

    @property
    def id(self) -> str:
        return self.generation.request_id

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.generation.params.n

    def make_trace(self) -> Any:
        """Of the prompt, or a list for several."""
        generation = self.generation
        traces = [
            make_trace(output, generation.clocks[index])
            for index, output in enumerate(generation.get_outputs())
        ]
        return traces[0] if len(traces) == 1 else traces


async def receive_call(
    http_request: Request,
    context: Context,
    kind: type[_Wire],
    prepare: Callable[[_Wire], Work],
    *,
    id_prefix: str,
    make_paths: Callable[[_Wire], WirePaths],
    takes_msgpack: bool = False,
) -> Call[_Wire]:
    """Read and check the request. `prepare` makes prompts and parameters of it."""

    def parse(body: dict[str, Any]) -> tuple[_Wire, Work]:
        request = read_request(kind, body)
        check_model(request.model, context.options.model_names)
        prompts, params = prepare(request)
        check_n(params.n, context.options.max_n, is_nested=isinstance(request, GenerateRequest))
        return request, (prompts, params)

    request, (prompts, params) = await read_body(
        http_request, parse, intake=context.bodies, takes_msgpack=takes_msgpack
    )
    http_request.state.paths = make_paths(request)
    generation = Generation(
        engine=context.engine,
        metrics=context.metrics,
        request_id=f"{id_prefix}-{uuid.uuid4().hex}",
        prompts=set_uuid_scope(prompts, http_request),
        params=params,
        arrived=http_request.state.arrived,
    )
    return Call(
        request=request,
        generation=generation,
        model=request.model or context.options.model_names[0],
        created=int(time.time()),
        has_trace=bool(request.trace) or http_request.headers.get(TRACE_HEADER) == "1",
    )


def set_uuid_scope(
    prompts: Sequence[Prompt | Chat], http_request: Request
) -> Sequence[Prompt | Chat]:
    """Return the prompts with the scope of the client's uuids: its API key, where it has one."""
    scope = get_uuid_scope(http_request.scope["state"])
    return prompts if scope is None else [_with_scope(prompt, scope) for prompt in prompts]


def _with_scope(prompt: Prompt | Chat, scope: str) -> Prompt | Chat:
    if isinstance(prompt, Chat):
        return replace(prompt, fields={**prompt.fields, "uuid_scope": scope})
    if isinstance(prompt, Mapping):
        return cast(Prompt, {**prompt, "uuid_scope": scope})
    return prompt


def check_model(name: str | None, names: Sequence[str]) -> None:
    """A request without a name means the model that is served."""
    if name is not None and name not in names:
        raise ApiError(
            f"the model {name[:200]!r} is not served here (served: {', '.join(names)})",
            status=404,
            param="model",
            code="model_not_found",
            reason="not_found",
        )


def check_n(n: int, max_n: int, *, is_nested: bool) -> None:
    """Raise an `ApiError` if more completions of a prompt are asked for than the server makes."""
    if n > max_n:
        param = "sampling_params.n" if is_nested else "n"
        raise ApiError(
            f"{param} is {n}: this server makes {max_n} completions of a prompt at most (--max-n)",
            param=param,
        )


def get_prompt_fields(request: GeneratingRequest) -> TextPrompt:
    """What goes with a prompt, whatever its kind."""
    values = ((name, getattr(request, name)) for name in _PROMPT_FIELDS)
    return cast(TextPrompt, {name: value for name, value in values if value is not None})


def get_finish_reason(output: RequestOutput, index: int) -> str:
    """A completion that ended with its siblings has one, too."""
    return str(output.outputs[index].finish_reason or "abort")
