"""The routes for operators of the server: models, health, load, metrics and caches."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sensorium import __version__
from sensorium.server.http.bodies.reading import make_response
from sensorium.server.http.calls import Context, Handler, check_model
from sensorium.server.http.errors import RETRY_AFTER_S, ApiError
from sensorium.server.http.protocol.answers import ModelCard, ModelList


async def get_models(_: Request, context: Context) -> Response:
    cards = [_make_card(context, name) for name in context.options.model_names]
    return make_response(ModelList(data=cards))


async def get_one_model(http_request: Request, context: Context) -> Response:
    name = http_request.path_params["model"]
    check_model(name, context.options.model_names)
    return make_response(_make_card(context, name))


async def health(_: Request, context: Context) -> Response:
    if not context.engine.is_connected:
        raise _make_unhealthy("The engine is not connected. Retry later.", code="engine_lost")
    if context.engine.is_stalled:
        words = "The engine makes no progress. It is restarted if that continues."
        raise _make_unhealthy(words, code="engine_stalled")
    return JSONResponse({})


async def ping(_: Request, __: Context) -> Response:
    return JSONResponse({})


async def get_version(_: Request, context: Context) -> Response:
    info = context.engine.info
    kernels = {} if info is None else info.kernels
    return JSONResponse({"version": __version__, **({"kernels": kernels} if kernels else {})})


async def get_load(_: Request, context: Context) -> Response:
    others = await context.metrics.read_others()
    load = await asyncio.to_thread(context.metrics.get_load, others)
    return JSONResponse({"server_load": load})


async def get_metrics(_: Request, context: Context) -> Response:
    others = await context.metrics.read_others()
    body, content_type = await asyncio.to_thread(context.metrics.render, others)
    return Response(body, headers={"content-type": content_type})


def make_reset(level: str) -> Handler:
    """Return a handler that empties a cache ("mm", "encoder", "prefix"), except entries in use."""

    async def reset_cache(_: Request, context: Context) -> Response:
        await context.engine.reset_cache(level)
        return JSONResponse({})

    return reset_cache


def _make_card(context: Context, name: str) -> ModelCard:
    info = context.engine.info
    return ModelCard(
        id=name,
        created=context.started,
        root=context.options.model_names[0],
        max_model_len=None if info is None else info.max_model_len,
        modalities=["text", *context.engine.modalities],
        capabilities=context.capabilities,
        switched_off=context.engine.switched_off,
        only_one=context.engine.only_one,
    )


def _make_unhealthy(message: str, *, code: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(message, status=503, code=code, reason=None, headers=headers)
