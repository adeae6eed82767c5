"""The formats of answers: each in a module of its own, and here in the order of detection.

A new format is a new module and its name in one of these lists. Light: the command line lists the
formats too.
"""

from __future__ import annotations

from sensorium.render.answers.formats import gemma4, hermes, mistral, pythonic, think

# The first format that a model uses is taken.
CALL_FORMATS = (gemma4.CALLS, mistral.CALLS, hermes.CALLS, pythonic.CALLS)
REASONING_FORMATS = (gemma4.REASONING, mistral.REASONING, think.DEEPSEEK_R1, think.QWEN3)

AUTO = "auto"
NONE = "none"
TOOL_CALL_PARSERS = (AUTO, NONE, *(entry.name for entry in CALL_FORMATS))
REASONING_PARSERS = (AUTO, NONE, *(entry.name for entry in REASONING_FORMATS))
