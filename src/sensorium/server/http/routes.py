"""The table of all routes, from which the application and the OpenAPI document are made."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Match, WebSocketRoute
from starlette.routing import Route as StarletteRoute
from starlette.types import Scope
from starlette.websockets import WebSocket

from sensorium.server.http.access import METRICS_PATH
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
from sensorium.server.http.errors import ApiError
from sensorium.server.http.middleware import SESSION_PATH
from sensorium.server.http.openai.audio import create_transcription, create_translation
from sensorium.server.http.openai.chat import create_chat_completion
from sensorium.server.http.openai.completions import create_completion
from sensorium.server.http.openapi import Route, make_document
from sensorium.server.http.protocol import answers, requests, speech, tokens
from sensorium.server.http.realtime.route import serve_realtime
from sensorium.server.http.tokens.derendering import derender_chat_completion, derender_completions
from sensorium.server.http.tokens.generate import generate
from sensorium.server.http.tokens.rendering import (
    detokenize,
    render_chat_completion,
    render_prompts,
    tokenize,
)
from sensorium.server.http.welcome import PAGE_PATHS, WELCOME_PATHS, get_page
from sensorium.speech.formats import SpeechAnswer, VerboseSpeechAnswer

# The errors of routes that need neither media nor an engine.
_LOCAL_ERRORS = (400, 401, 404, 408, 413, 429, 500)
_ERRORS = (400, 401, 404, 408, 409, 413, 422, 429, 500, 503)
_UPLOAD_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503, 507)
_VISITS = ("GET", "HEAD")  # the methods of a page


def _post(path: str, handler: Any, tag: str, summary: str, request: Any, **more: Any) -> Route:
    options: dict[str, Any] = {"errors": _ERRORS, "methods": ("POST",), **more}
    return Route(path, handler, tag, summary, request=request, is_counted=True, **options)


def _reset(level: str, **more: Any) -> Route:
    name, summary = f"reset_{level}_cache", "Empty a cache. Running requests keep their entries."
    options: dict[str, Any] = {"methods": ("POST",), "errors": (401, 503), "name": name, **more}
    return Route(f"/{name}", make_reset(level), "administration", summary, **options)


def _speech(path: str, handler: Any, summary: str, request: Any) -> Route:
    return _post(
        path,
        handler,
        "speech",
        summary,
        request,
        answers=(SpeechAnswer, VerboseSpeechAnswer),
        chunk=speech.TranscriptEvent,
        errors=_UPLOAD_ERRORS,
        takes_form=True,
        answers_text=True,
        needs_engine=True,
    )


async def _require_upgrade(_: Request, __: Context) -> Response:
    raise ApiError(
        "This route is a WebSocket: connect to it with ws:// or wss:// in place of http.",
        status=426,
        code="upgrade_required",
        headers={"upgrade": "websocket", "connection": "upgrade"},
    )


# fmt: off
ROUTES: tuple[Route, ...] = (
    _post("/v1/chat/completions", create_chat_completion, "text",
          "Generate the next message of a conversation.",
          requests.ChatCompletionRequest, answers=(answers.ChatCompletion,),
          chunk=answers.ChatCompletionChunk, needs_engine=True),
    _post("/v1/completions", create_completion, "text", "Complete one or more prompts.",
          requests.CompletionRequest, answers=(answers.Completion,), chunk=answers.Completion,
          needs_engine=True),
    _speech("/v1/audio/transcriptions", create_transcription, "Transcribe what is said in audio.",
            speech.TranscriptionRequest),
    _speech("/v1/audio/translations", create_translation,
            "Translate what is said in audio into English.", speech.TranslationRequest),
    Route(SESSION_PATH, _require_upgrade, "speech",
          "Transcribe speech while it is spoken, over a WebSocket.", needs_engine=True,
          is_upgrade=True, queries=("intent", "model", "dialect"),
          errors=(400, 401, 403, 404, 426, 429, 503)),
    _post("/inference/v1/generate", generate, "tokens",
          "Continue a prompt of token ids, and return the generated token ids.",
          tokens.GenerateRequest, answers=(answers.GenerateResponse,),
          chunk=answers.GenerateResponse, takes_msgpack=True, needs_engine=True),
    _post("/v1/chat/completions/render", render_chat_completion, "render",
          "Turn a conversation into a request for `/inference/v1/generate`.",
          requests.ChatRenderRequest, answers=(answers.RenderedRequest,), answers_msgpack=True),
    _post("/v1/completions/render", render_prompts, "render",
          "Turn each prompt into a request for `/inference/v1/generate`.",
          requests.CompletionRenderRequest, answers=(answers.RenderedRequest,), answers_list=True,
          answers_msgpack=True),
    _post("/tokenize", tokenize, "render", "Tokenize a text, or a conversation with its media.",
          requests.TokenizeRequest, answers=(answers.TokenizeResponse,)),
    _post("/detokenize", detokenize, "render", "Turn token ids into text.",
          requests.DetokenizeRequest, answers=(answers.DetokenizeResponse,), errors=_LOCAL_ERRORS),
    _post("/v1/chat/completions/derender", derender_chat_completion, "render",
          "Turn a response of `/inference/v1/generate`, or a chunk of one, into that of a chat.",
          tokens.DerenderChatRequest, answers=(answers.ChatCompletion, answers.DerenderedChatChunk),
          errors=_LOCAL_ERRORS, takes_msgpack=True, answers_msgpack=True),
    _post("/v1/completions/derender", derender_completions, "render",
          "Turn responses of `/inference/v1/generate`, or a chunk of one, into completions.",
          tokens.DerenderCompletionRequest,
          answers=(answers.Completion, answers.DerenderedCompletionChunk), errors=_LOCAL_ERRORS,
          takes_msgpack=True, answers_msgpack=True),
    Route("/v1/models", get_models, "text", "List the models.", answers=(answers.ModelList,),
          errors=(401,)),
    Route("/v1/models/{model:path}", get_one_model, "text", "Describe a model.",
          answers=(answers.ModelCard,), errors=(401, 404)),
    Route("/health", health, "health", "Check whether the engine runs and makes progress.",
          errors=(503,)),
    Route("/ping", ping, "health", "Check whether this process runs.", methods=("GET", "POST")),
    Route("/version", get_version, "health",
          "Return the version of the server, and the kernels that the engine uses."),
    Route("/load", get_load, "health",
          "Return how many requests for text are in progress in all frontend processes.",
          errors=(401,)),
    Route(METRICS_PATH, get_metrics),
    _reset("mm"),
    _reset("encoder", needs_engine=True),
    _reset("prefix", needs_engine=True),
)
# fmt: on
COUNTED_PATHS = frozenset(route.path for route in ROUTES if route.is_counted)


class _AppRoute(StarletteRoute):
    """A Starlette route with exactly the given methods, which middleware finds in the scope."""

    def __init__(self, path: str, endpoint: Any, methods: Iterable[str]) -> None:
        super().__init__(path, endpoint)
        self.methods = set(methods)  # Starlette would add HEAD to GET

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return match, child_scope if match is Match.NONE else {**child_scope, "route": self}


def make_routes(context: Context) -> list[BaseRoute]:
    """Return all routes; if the server only renders, routes that need an engine refuse requests."""
    options = context.options
    is_render_only = options.is_render_only
    # A server that only renders has no caches of an engine, and no welcome page.
    routes: list[BaseRoute] = [
        _make_route(route, context)
        for route in ROUTES
        if not is_render_only or not route.needs_engine or route.is_counted
    ]
    if is_render_only:
        routes.append(_AppRoute("/", _refuse, _VISITS))
    else:
        routes.append(_make_realtime_route(context))
    pages = [path for path in PAGE_PATHS if not is_render_only or path not in WELCOME_PATHS]
    routes += [_AppRoute(path, get_page, _VISITS) for path in pages]

    @cache
    def get_document() -> dict[str, Any]:
        shown = [route for route in ROUTES if not (is_render_only and route.needs_engine)]
        return make_document(
            shown, needs_key=bool(options.api_key), model_names=options.model_names
        )

    async def get_openapi(_: Request) -> Response:
        return JSONResponse(get_document())

    async def get_redoc(_: Request) -> Response:
        return RedirectResponse("docs")

    routes.append(_AppRoute("/openapi.json", get_openapi, _VISITS))
    routes.append(_AppRoute("/redoc", get_redoc, _VISITS))
    return routes


def _make_realtime_route(context: Context) -> WebSocketRoute:
    async def endpoint(websocket: WebSocket) -> None:
        await serve_realtime(websocket, context)

    return WebSocketRoute(SESSION_PATH, endpoint)


def _make_route(route: Route, context: Context) -> StarletteRoute:
    async def endpoint(request: Request) -> Response:
        return await route.handler(request, context)

    is_refused = context.options.is_render_only and route.needs_engine
    return _AppRoute(route.path, _refuse if is_refused else endpoint, route.methods)


async def _refuse(request: Request) -> Response:
    """Raise an `ApiError` that names the command that starts a server with an engine."""
    # 404, not 501: clients repeat requests after a server error, which would never help here.
    raise ApiError(
        f"{request.url.path}: this server only renders prompts and runs no model. Send the request "
        "to a server that was started with `sensorium serve`",
        status=404,
        code="render_only",
        reason="not_found",
    )
