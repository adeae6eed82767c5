"""Which of a model's chat templates is meant."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from sensorium.render.chat_options import ChatOptions
from sensorium.types.errors import RequestError


def find_template(
    processor: Any, tokenizer: Any, options: ChatOptions, modalities: Collection[str]
) -> str:
    """The caller's, else the processor's own, else its tokenizer's. `modalities` are those of the
    conversation.
    """
    own = tokenizer.chat_template if processor is None else processor.chat_template
    if own is None:
        own = tokenizer.chat_template
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {}
    if options.chat_template is not None:
        return named.get(options.chat_template, options.chat_template)
    if type(processor).__name__ == "SmolVLMProcessor" and "video" in modalities:
        # Its checkpoints' templates know no videos: the class brings one that it takes instead.
        template: str = sys.modules[type(processor).__module__].DEFAULT_CHAT_TEMPLATE
        return template
    if named:
        own = named.get("tool_use") if options.tools else None
        own = own or named.get("default")
        if own is None:
            raise RequestError(
                f"must name one of {', '.join(sorted(named))}", path=("chat_template",)
            )
    if own is None:
        raise RequestError("this model has no chat template: give one as chat_template")
    return str(own)


def get_template_text(processor: Any, tokenizer: Any) -> str:
    """All that the model has of templates, to be looked through; empty if it has none."""
    texts: list[str] = []
    for owner in (processor, tokenizer):
        own = None if owner is None else owner.chat_template
        texts += own.values() if isinstance(own, Mapping) else [own or ""]
    return "\n".join(texts)
