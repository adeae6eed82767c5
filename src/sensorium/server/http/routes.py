"""The table of all URLs, from which the application and the OpenAPI document are made."""

from __future__ import annotations

from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import Scope

from sensorium.server.http.administration import (
    get_load,
    get_metrics,
    get_models,
    get_one_model,
    get_version,
    health,
    make_reset,
    ping,
)
from sensorium.server.http.calls import Context
from sensorium.server.http.derender.answers import derender_chat_completion, derender_completions
from sensorium.server.http.errors import ApiError
from sensorium.server.http.middleware.access import METRICS_PATH
from sensorium.server.http.openai.chat import create_chat_completion
from sensorium.server.http.openai.completions import create_completion
from sensorium.server.http.openapi import Route, make_document
from sensorium.server.http.protocol.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    DerenderedChatChunk,
    DerenderedCompletionChunk,
    DetokenizeResponse,
    GenerateResponse,
    ModelCard,
    ModelList,
    RenderedRequest,
    TokenizeResponse,
)
from sensorium.server.http.protocol.requests import (
    ChatCompletionRequest,
    ChatRenderRequest,
    CompletionRenderRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sensorium.server.http.protocol.tokens import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    GenerateRequest,
)
from sensorium.server.http.tokens.generate import generate
from sensorium.server.http.tokens.rendering import (
    detokenize,
    render_chat_completion,
    render_prompts,
    tokenize,
)
from sensorium.server.http.welcome import PAGE_PATHS, get_page

# The errors of routes that need neither media nor an engine.
_LOCAL_ERRORS = (400, 401, 404, 408, 413, 429, 500)
_ERRORS = (400, 401, 404, 408, 409, 413, 422, 429, 500, 503)


def _post(path: str, handler: Any, tag: str, summary: str, request: Any, **more: Any) -> Route:
    options: dict[str, Any] = {"errors": _ERRORS, **more}
    return Route(
        method="POST",
        path=path,
        handler=handler,
        tag=tag,
        summary=summary,
        request=request,
        is_counted=True,
        **options,
    )


def _get(path: str, handler: Any, tag: str = "", summary: str = "", **more: Any) -> Route:
    return Route(method="GET", path=path, handler=handler, tag=tag, summary=summary, **more)


def _reset(level: str, **more: Any) -> Route:
    return Route(
        method="POST",
        path=f"/reset_{level}_cache",
        handler=make_reset(level),
        tag="administration",
        summary="Empty a cache. Running requests keep their entries.",
        name=f"reset_{level}_cache",
        errors=(401, 503),
        **more,
    )


# fmt: off
ROUTES: tuple[Route, ...] = (
    _post("/v1/chat/completions", create_chat_completion, "text", "Answer a conversation.",
          ChatCompletionRequest, answers=(ChatCompletion,), chunk=ChatCompletionChunk,
          needs_engine=True),
    _post("/v1/completions", create_completion, "text", "Continue prompts.",
          CompletionRequest, answers=(Completion,), chunk=Completion, needs_engine=True),
    _post("/inference/v1/generate", generate, "tokens", "Continue tokens.",
          GenerateRequest, answers=(GenerateResponse,), chunk=GenerateResponse,
          takes_msgpack=True, needs_engine=True),
    _post("/v1/chat/completions/render", render_chat_completion, "render",
          "Render a conversation into a request for `/inference/v1/generate`.",
          ChatRenderRequest, answers=(RenderedRequest,), answers_msgpack=True),
    _post("/v1/completions/render", render_prompts, "render",
          "Render prompts into one request for `/inference/v1/generate` each.",
          CompletionRenderRequest, answers=(RenderedRequest,), answers_list=True,
          answers_msgpack=True),
    _post("/tokenize", tokenize, "render", "Tokenize a text, or a conversation with its media.",
          TokenizeRequest, answers=(TokenizeResponse,)),
    _post("/detokenize", detokenize, "render", "Turn tokens into text.",
          DetokenizeRequest, answers=(DetokenizeResponse,), errors=_LOCAL_ERRORS),
    _post("/v1/chat/completions/derender", derender_chat_completion, "render",
          "Turn an answer of `/inference/v1/generate`, or a chunk of one, into that of a chat.",
          DerenderChatRequest, answers=(ChatCompletion, DerenderedChatChunk),
          errors=_LOCAL_ERRORS, takes_msgpack=True, answers_msgpack=True),
    _post("/v1/completions/derender", derender_completions, "render",
          "Turn answers of `/inference/v1/generate`, or a chunk of one, into completions.",
          DerenderCompletionRequest, answers=(Completion, DerenderedCompletionChunk),
          errors=_LOCAL_ERRORS, takes_msgpack=True, answers_msgpack=True),
    _get("/v1/models", get_models, "text", "List the models.", answers=(ModelList,), errors=(401,)),
    _get("/v1/models/{model:path}", get_one_model, "text", "Describe a model.",
         answers=(ModelCard,), errors=(401, 404)),
    _get("/health", health, "health", "Tell whether the engine runs and makes progress.",
         errors=(503,)),
    _get("/ping", ping, "health", "Tell whether this process runs."),
    Route(method="POST", path="/ping", handler=ping, tag="health",
          summary="Tell whether this process runs."),
    _get("/version", get_version, "health", "Tell the version, and the kernels of the engine."),
    _get("/load", get_load, "health",
         "Count the requests for text in all frontends, from their arrival to their last byte.",
         errors=(401,)),
    _get(METRICS_PATH, get_metrics),
    _reset("mm"),
    _reset("encoder", needs_engine=True),
    _reset("prefix", needs_engine=True),
)
# fmt: on
COUNTED_PATHS = frozenset(route.path for route in ROUTES if route.is_counted)


class _AppRoute(StarletteRoute):
    """A route that takes exactly its methods, and that middleware finds in the scope."""

    def __init__(self, path: str, endpoint: Any, methods: set[str]) -> None:
        super().__init__(path, endpoint)
        self.methods = methods  # Starlette would add HEAD to GET

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, child_scope if match is Match.NONE else {**child_scope, "route": self}


def make_routes(context: Context) -> list[StarletteRoute]:
    """Return the routes of the application."""
    options = context.options
    routes = [_make_route(route, context) for route in ROUTES if _is_there(route, context)]
    pages = [path for path in PAGE_PATHS if path == "/docs" or path.startswith("/docs/")]
    if options.is_render_only:
        routes.append(_AppRoute("/", _refuse, {"GET", "HEAD"}))
    else:
        pages = list(PAGE_PATHS)
    routes += [_AppRoute(path, get_page, {"GET", "HEAD"}) for path in pages]

    @cache
    def get_document() -> dict[str, Any]:
        shown = [route for route in ROUTES if not (options.is_render_only and route.needs_engine)]
        return make_document(
            shown, needs_key=bool(options.api_key), model_names=options.model_names
        )

    async def get_openapi(_: Request) -> Response:
        return JSONResponse(get_document())

    async def get_redoc(_: Request) -> Response:
        return RedirectResponse("docs")

    routes.append(_AppRoute("/openapi.json", get_openapi, {"GET", "HEAD"}))
    routes.append(_AppRoute("/redoc", get_redoc, {"GET", "HEAD"}))
    return routes


def _is_there(route: Route, context: Context) -> bool:
    """Return whether the server has a route. A server that only renders has no engine's caches."""
    return not (context.options.is_render_only and route.needs_engine and not route.is_counted)


def _make_route(route: Route, context: Context) -> StarletteRoute:
    async def endpoint(request: Request) -> Response:
        return await route.handler(request, context)

    is_refused = context.options.is_render_only and route.needs_engine
    return _AppRoute(route.path, _refuse if is_refused else endpoint, {route.method})


async def _refuse(request: Request) -> Response:
    """Refuse a request that needs an engine, with a hint to a server that has one."""
    # 404, not 501: clients repeat requests after a server error, which would never help here.
    raise ApiError(
        f"{request.url.path}: this server only renders, no model runs here. Ask a server that "
        "was started with `sensorium serve`",
        status=404,
        code="render_only",
        reason="not_found",
    )
