"""The options for rendering a conversation, with the names of vLLM and Transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.types.errors import RequestError

_TEMPLATE, _KWARGS = ("chat_template",), ("chat_template_kwargs",)
# Variables that the renderer sets, so that a caller may not.
_RESERVED = frozenset(
    {
        "messages",
        "conversations",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenize",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options for one conversation."""

    # The text of a template, or the name of one of the model's; never a file.
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise RequestError("must be a string", path=_TEMPLATE)
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise RequestError("must be an object", path=_KWARGS)
        taken = sorted(_RESERVED.intersection(self.chat_template_kwargs))
        if taken:
            raise RequestError(f"can't set {', '.join(taken)}", path=_KWARGS)
        if not all(isinstance(name, str) for name in self.chat_template_kwargs):
            raise RequestError("must have strings as names", path=_KWARGS)
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "needs add_generation_prompt=False: either the last message goes on, or a new "
                "one begins",
                path=("continue_final_message",),
            )
        self._check_tools()

    def _check_tools(self) -> None:
        if self.tools is None:
            return
        if not isinstance(self.tools, list | tuple):
            raise RequestError(f"must be a list, not {type(self.tools).__name__}", path=("tools",))
        for index, tool in enumerate(self.tools):
            if not isinstance(tool, Mapping):
                raise RequestError(
                    f"must be an object, not {type(tool).__name__}", path=("tools", index)
                )


def load_chat_template(chat_template: str | os.PathLike[str] | None) -> str | None:
    """Return a template that was given as text, as the path of a file or by its name.

    Only for callers who may read this machine's files.
    """
    if chat_template is None:
        return None
    if not isinstance(chat_template, str | os.PathLike) or not os.fspath(chat_template):
        raise RequestError("must be a template, its file or its name", path=_TEMPLATE)
    text = os.fspath(chat_template)
    if isinstance(chat_template, str) and any(character in text for character in "{}\n"):
        return text
    path = Path(text)
    if isinstance(chat_template, str) and not _exists(path):
        if path.suffix or len(path.parts) > 1:
            raise RequestError(f"there is no file {text!r}", path=_TEMPLATE)
        return text  # the name of one of the model's templates
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{text!r} can't be read: {error}", path=_TEMPLATE) from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False
