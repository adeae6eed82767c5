"""Makes conversations with every kind of media, sends them, and reads the answers."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from openai import OpenAI

from tests.support.media import (
    make_clip,
    make_melody,
    make_pixels,
    write_audio,
    write_image,
    write_video,
)

MODEL = "tiny"
Part = dict[str, Any]
Message = dict[str, Any]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10}


@cache
def make_png(seed: int = 0, height: int = 56, width: int = 84) -> bytes:
    return write_image(make_pixels(height, width, seed=seed), "PNG")


@cache
def make_mp4(seed: int = 0, num_frames: int = 4) -> bytes:
    clip = make_clip(num_frames, 28, 28)
    return write_video((clip // (1 + seed % 3)).astype(clip.dtype), fps=10 + seed)


@cache
def make_wav(seed: int = 0) -> bytes:
    return write_audio(make_melody(4000, pitch=300.0 + 50 * seed), "WAV", "PCM_16")


def as_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def make_url_part(modality: str, url: str, **fields: Any) -> Part:
    return {"type": f"{modality}_url", f"{modality}_url": {"url": url}, **fields}


def make_image_part(seed: int = 0, **fields: Any) -> Part:
    return make_url_part("image", f"data:image/png;base64,{as_base64(make_png(seed))}", **fields)


def make_video_part(seed: int = 0, **fields: Any) -> Part:
    return make_url_part("video", f"data:video/mp4;base64,{as_base64(make_mp4(seed))}", **fields)


def make_audio_part(seed: int = 0, **fields: Any) -> Part:
    audio = {"data": as_base64(make_wav(seed)), "format": "wav"}
    return {"type": "input_audio", "input_audio": audio, **fields}


def make_text_part(text: str = "What is this?") -> Part:
    return {"type": "text", "text": text}


def ask(*parts: Part | str) -> list[Message]:
    """Return a conversation of one user message with these parts."""
    content = [make_text_part(part) if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def make_conversations(seed: int = 0) -> dict[str, list[Message]]:
    """Return a conversation for each modality and for mixtures: name -> messages.

    Conversations of different seeds share no media.
    """
    first, second, third = (make_image_part(10 * seed + index) for index in range(3))
    video, audio = make_video_part(seed), make_audio_part(seed)
    return {
        "text": ask(f"Tell me about the number {seed}."),
        "image": ask(first, "What is this?"),
        "images": ask(first, second, "Which one is", third, "?"),
        "video": ask(video, "What happens?"),
        "audio": ask(audio, "Who speaks?"),
        "mixed": ask("One:", second, "two:", video, "three:", audio, "four:", first),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice as a client receives it. Choices that differ only in logprobs are equal."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: Any
    # Those of the chosen tokens. The last digits depend on the requests that share a step.
    logprobs: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    choices: tuple[Choice, ...]
    usage: Any
    prompt_token_ids: tuple[int, ...]
    trace: Any = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def num_cached_tokens(self) -> int:
        return int(self.usage.prompt_tokens_details.cached_tokens)

    def get_hits(self, level: str) -> list[Any]:
        """Return the trace's entry for this cache level, for each media item."""
        return [item[level] for item in self.trace["items"]]


_OURS = {"return_token_ids": True, "trace": True}
_KINDS = ("image_url", "video_url", "input_audio")


def get_media(messages: list[Message]) -> list[Part]:
    """Return the parts with media, in their order."""
    parts = [part for message in messages for part in message["content"]]
    return [part for part in parts if part["type"] in _KINDS]


def get_content(part: Part) -> bytes:
    """Return the bytes of media that is sent within the request."""
    value = part[part["type"]]
    return base64.b64decode(value["data"] if "data" in value else value["url"].partition(",")[2])


def chat(client: OpenAI, messages: list[Message], /, **fields: Any) -> Answer:
    """Send a chat and return the whole answer. `extra_body` has fields that are not OpenAI's."""
    fields = {**GREEDY, **fields}
    extra = {**_OURS, **fields.pop("extra_body", {})}
    found: Any = client.chat.completions.create(
        model=MODEL, messages=messages, extra_body=extra, **fields
    )
    return Answer(
        choices=tuple(
            Choice(
                text=choice.message.content,
                token_ids=tuple(choice.token_ids),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=_get_logprobs(choice.logprobs),
            )
            for choice in found.choices
        ),
        usage=found.usage,
        prompt_token_ids=tuple(found.prompt_token_ids),
        trace=found.sensorium_trace,
    )


@dataclass(slots=True)
class _Growing:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[float] = field(default_factory=list)


def stream_chat(client: OpenAI, messages: list[Message], /, **fields: Any) -> Answer:
    """Send a chat like `chat`, streamed, and return the answer joined from its chunks."""
    fields = {**GREEDY, **fields}
    extra = {**_OURS, **fields.pop("extra_body", {})}
    chunks: Any = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        extra_body=extra,
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    )
    return join_chunks(chunks)


def join_chunks(chunks: Iterable[Any]) -> Answer:
    choices: dict[int, _Growing] = defaultdict(_Growing)
    prompt_token_ids: tuple[int, ...] = ()
    last: Any = None
    for chunk in chunks:
        last = chunk
        prompt_token_ids = tuple(getattr(chunk, "prompt_token_ids", None) or prompt_token_ids)
        for piece in chunk.choices:
            choice = choices[piece.index]
            assert choice.finish_reason is None, "a choice goes on after its end"
            choice.text += piece.delta.content or ""
            choice.token_ids += getattr(piece, "token_ids", None) or ()
            choice.logprobs += _get_logprobs(piece.logprobs)
            choice.finish_reason = piece.finish_reason
            choice.stop_reason = getattr(piece, "stop_reason", None)
    return Answer(
        choices=tuple(_freeze(choices[index]) for index in sorted(choices)),
        usage=last.usage,
        prompt_token_ids=prompt_token_ids,
        trace=getattr(last, "sensorium_trace", None),
    )


def _freeze(choice: _Growing) -> Choice:
    return Choice(
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=tuple(choice.logprobs),
    )


def _get_logprobs(logprobs: Any) -> tuple[float, ...]:
    return tuple(entry.logprob for entry in logprobs.content) if logprobs is not None else ()
