"""`/v1/models`: the names under which the model is served."""

from __future__ import annotations

from sensorium.server.http.calls import Context, check_model
from sensorium.server.http.protocol.answers import ModelCard, ModelList


def list_models(context: Context) -> ModelList:
    return ModelList(data=[_make_card(context, name) for name in context.options.model_names])


def get_model(context: Context, name: str) -> ModelCard:
    check_model(name, context.options.model_names)
    return _make_card(context, name)


def _make_card(context: Context, name: str) -> ModelCard:
    info = context.engine.info
    return ModelCard(
        id=name,
        created=context.started,
        root=context.options.model_names[0],
        max_model_len=None if info is None else info.max_model_len,
        modalities=["text", *context.engine.modalities],
        switched_off=context.engine.switched_off,
    )
