"""The names of formats, as users of vLLM know them. Light: the command line has them too."""

from __future__ import annotations

AUTO = "auto"
NONE = "none"
TOOL_CALL_PARSERS = (AUTO, NONE, "hermes", "mistral", "gemma4", "pythonic")
REASONING_PARSERS = (AUTO, NONE, "qwen3", "deepseek_r1", "mistral", "gemma4")
