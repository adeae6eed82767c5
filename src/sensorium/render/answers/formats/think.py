"""Reasoning between `<think>` and `</think>`, as Qwen, DeepSeek and many others write it."""

from __future__ import annotations

from dataclasses import replace

from sensorium.render.answers.syntax import ReasoningFormat

_OPEN = "<think>"
_CLOSE = "</think>"
_DEEPSEEK_TURN = "<\uff5cAssistant\uff5c>"


_QWEN3 = ReasoningFormat(
    name="qwen3",
    open=_OPEN,
    close=_CLOSE,
    is_used_by=lambda _, template: _OPEN in template or _CLOSE in template,
    special_tokens=(_OPEN, _CLOSE),
)
_DEEPSEEK_R1 = replace(
    _QWEN3,
    name="deepseek_r1",
    is_used_by=lambda _, template: (
        _DEEPSEEK_TURN in template and (_OPEN in template or _CLOSE in template)
    ),
    is_assumed=True,
)
REASONING = (_DEEPSEEK_R1, _QWEN3)
