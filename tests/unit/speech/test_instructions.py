"""How families are asked for a transcript, and how their answers are read."""

from __future__ import annotations

from typing import Any

import pytest

from sensorium.speech.instructions import SOUND, Reading, find_instruction
from sensorium.speech.options import SpeechOptions
from sensorium.types.errors import RequestError


def make_text(model_type: str, **options: Any) -> str:
    """Return all text of a conversation, one line for each message."""
    messages = find_instruction(model_type, "any").make_messages(SpeechOptions(**options))
    lines = []
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        words = ["(sound)" if p is SOUND else p if isinstance(p, str) else p["text"] for p in parts]
        lines.append(f"{message['role']}: {' '.join(words)}")
    return "\n".join(lines)


def test_other_chat_models_get_a_plain_instruction() -> None:
    assert make_text("new_model") == (
        "user: (sound) Transcribe the speech in this recording. Write only what is said."
    )
    assert make_text("new_model", language="de", prompt="Ann {x}") == (
        "user: (sound) Transcribe the German speech in this recording. Write only what is said. "
        "Write names and words as in this text: Ann {x}"
    )
    assert "into English" in make_text("new_model", task="translate")
    assert "the French speech" in make_text("new_model", task="translate", language="french")


def test_families_have_the_instructions_of_their_authors() -> None:
    assert make_text("audioflamingo3") == "user: Transcribe the input speech. (sound)"
    assert make_text("granite_speech", prompt="Ann, Bob") == (
        "user: (sound) can you transcribe the speech into a written format? Keywords: Ann, Bob"
    )
    assert make_text("qwen2_5_omni_thinker", prompt="A talk about birds.") == (
        "system: You are a speech recognition model. A talk about birds.\n"
        "user: (sound) Transcribe the audio into text."
    )
    assert make_text("qwen3_asr", language="yue", prompt="Ann") == (
        "system: Ann\nuser: (sound)\nassistant: language Cantonese<asr_text>"
    )


@pytest.mark.parametrize(
    ("model_type", "answer", "reading"),
    [
        ("new_model", " Hello. ", Reading("Hello.")),
        ("new_model", "language English<asr_text>Hi", Reading("language English<asr_text>Hi")),
        ("qwen3_asr", "language English<asr_text>Hello.", Reading("Hello.", "en")),
        ("qwen3_asr", "language None<asr_text>", Reading("")),
        ("qwen3_asr", "Hello.", Reading("Hello.")),
        ("qwen2_audio", "<|zh|>你好。", Reading("你好。", "zh")),
        ("qwen2_audio", "Hello <|zh|>", Reading("Hello <|zh|>")),
        ("audioflamingo3", 'The spoken content of the audio is "Hello.".', Reading("Hello.")),
        ("glmasr", "The transcription of the audio is 'It''s me'", Reading("It''s me")),
        ("glmasr", 'He said "Hello."', Reading('He said "Hello."')),
    ],
)
def test_the_frame_that_a_family_writes_around_a_text_is_removed(
    model_type: str, answer: str, reading: Reading
) -> None:
    assert find_instruction(model_type, "any").read(answer) == reading


@pytest.mark.parametrize(
    ("model_type", "options", "path"),
    [
        ("new_model", {"language": "klingon"}, ("language",)),
        ("glmasr", {"language": "en"}, ("language",)),
        ("glmasr", {"prompt": "Ann"}, ("prompt",)),
        ("qwen3_asr", {"task": "translate"}, ()),
    ],
)
def test_options_that_a_family_does_not_support_are_refused(
    model_type: str, options: dict[str, Any], path: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError) as raised:
        make_text(model_type, **options)
    assert raised.value.path == path


def test_the_embedded_model_transcribes_only_english() -> None:
    embedded = find_instruction("qwen2_5_omni_thinker", "sensorium-mini-f2f1313a196e09f6")
    assert not embedded.can_translate
    assert embedded.find_language(SpeechOptions(language="English")) == "en"
    assert embedded.find_language(SpeechOptions()) == "en"
    with pytest.raises(RequestError, match="en"):
        embedded.find_language(SpeechOptions(language="de"))
