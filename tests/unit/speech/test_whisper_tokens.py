from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sensorium.speech.languages import NAMES, find_code
from sensorium.speech.whisper_tokens import (
    WhisperSettings,
    WhisperTokens,
    read_whisper_settings,
    read_whisper_tokens,
)
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.sampling import NO_BANS

CONFIG = {
    "vocab_size": 51865,
    "max_target_positions": 448,
    "max_source_positions": 1500,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
}
# The values of OpenAI's multilingual checkpoints before large-v3.
GENERATION_CONFIG = {
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "no_timestamps_token_id": 50363,
    "lang_to_id": {"<|en|>": 50259, "<|de|>": 50261, "<|haw|>": 50352},
    "task_to_id": {"transcribe": 50359, "translate": 50358},
    "is_multilingual": True,
    "suppress_tokens": [1, 2, 50358, 50359, 50360, 50361, 50362],
    "begin_suppress_tokens": [220, 50257],
    "max_initial_timestamp_index": 50,
    "alignment_heads": [[2, 2], [3, 0]],
}


class Specials:
    """A tokenizer that has special tokens only."""

    def __init__(self, **ids: int) -> None:
        self._ids = {f"<|{name}|>": token_id for name, token_id in ids.items()}

    def encode(self, text: str) -> Sequence[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    def get_bytes(self, token_id: int) -> bytes:
        raise NotImplementedError

    def get_id(self, token: str) -> int | None:
        return self._ids.get(token)


def read(*missing: str, specials: Specials | None = None, **changes: Any) -> WhisperTokens:
    given = {**GENERATION_CONFIG, **changes}
    for name in missing:
        del given[name]
    return read_whisper_tokens(given, CONFIG, specials or Specials(), NO_BANS)


def test_a_generation_config_has_all_that_is_needed() -> None:
    tokens = read()
    assert (tokens.start_id, tokens.end_id, tokens.previous_id) == (50258, 50257, 50361)
    assert (tokens.no_speech_id, tokens.first_timestamp_id) == (50362, 50364)
    assert tokens.language_ids == {"en": 50259, "de": 50261, "haw": 50352}
    assert tokens.task_ids == {"transcribe": 50359, "translate": 50358}
    assert tokens.alignment_heads == ((2, 2), (3, 0))
    assert (tokens.num_window_frames, tokens.max_positions) == (3000, 448)
    assert tokens.median_filter_width == 7
    assert tokens.is_text(50256)
    assert not any(map(tokens.is_text, (50257, 50261, 50361, 50363, 50364, 51864)))


def test_the_tokenizer_has_what_an_old_generation_config_lacks() -> None:
    specials = Specials(
        notimestamps=50363, startofprev=50361, en=50259, transcribe=50359, translate=50358
    )
    names = ("no_timestamps_token_id", "lang_to_id", "task_to_id", "is_multilingual")
    tokens = read(*names, specials=specials, suppress_tokens=[])
    assert tokens.is_multilingual
    assert tokens.language_ids == {"en": 50259}
    assert tokens.previous_id == 50361
    assert tokens.no_timestamps_id == 50363


def test_a_named_previous_token_comes_before_the_one_that_is_guessed() -> None:
    assert read(prev_sot_token_id=50360).previous_id == 50360


def test_without_named_heads_the_last_half_of_the_layers_is_used() -> None:
    heads = read("alignment_heads").alignment_heads
    assert heads == tuple((layer, head) for layer in (2, 3) for head in range(6))


@pytest.mark.parametrize(
    ("missing", "changes"),
    [
        (("no_timestamps_token_id",), {}),
        (("decoder_start_token_id",), {}),
        (("lang_to_id",), {}),
        ((), {"suppress_tokens": []}),
        ((), {"eos_token_id": 60000}),
        ((), {"alignment_heads": [[4, 0]]}),
    ],
)
def test_what_is_missing_or_wrong_is_a_model_error(
    missing: tuple[str, ...], changes: dict[str, Any]
) -> None:
    with pytest.raises(ModelError):
        read(*missing, **changes)


def test_a_config_without_sizes_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="max_target_positions"):
        read_whisper_tokens(
            GENERATION_CONFIG, {**CONFIG, "max_target_positions": None}, Specials(), NO_BANS
        )


@pytest.mark.parametrize("name", ["de", "DE", "german", "German", " de "])
def test_languages_have_names_and_codes(name: str) -> None:
    assert read().find_language(name) == "de"


@pytest.mark.parametrize("name", ["fr", "klingon", "", "<|de|>"])
def test_an_unknown_language_is_an_error_with_the_known_ones(name: str) -> None:
    with pytest.raises(RequestError, match="de, en, haw") as caught:
        read().find_language(name)
    assert caught.value.path == ("language",)


def test_an_english_only_model_has_english_and_does_not_translate() -> None:
    tokens = read("lang_to_id", "task_to_id", is_multilingual=False)
    assert tokens.find_language("English") == "en"
    tokens.check_task("transcribe")
    with pytest.raises(RequestError, match="This model has: en"):
        tokens.find_language("de")
    with pytest.raises(RequestError, match="translate"):
        tokens.check_task("translate")


def test_languages_are_those_of_transformers() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    assert NAMES == LANGUAGES
    assert {name: find_code(name.upper()) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE


def test_settings_are_openais_unless_the_checkpoint_has_others() -> None:
    assert read_whisper_settings({"logprob_threshold": None}) == WhisperSettings()
    given = {"no_speech_threshold": 0.3, "condition_on_prev_tokens": True}
    settings = read_whisper_settings(given)
    assert settings == WhisperSettings(max_no_speech_prob=0.3, condition_on_prev_tokens=True)
    lengths = {"max_length": 448, "max_new_tokens": 9}
    assert read_whisper_settings(lengths) == WhisperSettings(**lengths)


@pytest.mark.parametrize("name", ["max_length", "max_new_tokens"])
@pytest.mark.parametrize("value", [0, -1, "9", 2.5])
def test_a_length_that_is_none_is_a_model_error(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"no valid {name}: {value!r}"):
        read_whisper_settings({name: value})
