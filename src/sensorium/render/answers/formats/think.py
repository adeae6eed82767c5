"""Reasoning between `<think>` and `</think>`, as Qwen, DeepSeek and many others write it."""

from __future__ import annotations

from sensorium.render.answers.syntax import ReasoningFormat
from sensorium.render.answers.vocabulary import Vocabulary

_OPEN = "<think>"
_CLOSE = "</think>"
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"


def _is_used_by(vocabulary: Vocabulary, template: str) -> bool:  # noqa: ARG001
    return _OPEN in template or _CLOSE in template


_QWEN3 = ReasoningFormat(
    name="qwen3",
    open=_OPEN,
    close=_CLOSE,
    is_used_by=_is_used_by,
    special_tokens=(_OPEN, _CLOSE),
)
_DEEPSEEK_R1 = ReasoningFormat(
    name="deepseek_r1",
    open=_OPEN,
    close=_CLOSE,
    is_used_by=lambda vocabulary, template: (
        _DEEPSEEK_TURN in template and _is_used_by(vocabulary, template)
    ),
    is_assumed=True,
    special_tokens=(_OPEN, _CLOSE),
)
REASONING = (_DEEPSEEK_R1, _QWEN3)
