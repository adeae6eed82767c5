"""The tokens, windows and thresholds of a Whisper checkpoint, read from its config files.

The values come from `generation_config.json` and `config.json`, where Transformers looks for them.
Old checkpoints lack some of them; then the tokens are found by the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sensorium.speech.languages import NAMES, find_code
from sensorium.speech.transcript import Task
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.sampling import TokenBans

FRAMES_PER_POSITION = 2  # audio frames per encoder position
_FIRST_MULTILINGUAL_VOCAB_SIZE = 51_865  # OpenAI's English-only checkpoints have one token less
_MEDIAN_FILTER_WIDTH = 7
_TASKS: tuple[Task, ...] = ("transcribe", "translate")


class SpeechTokenizer(Protocol):
    """The part of a tokenizer that the rules of speech models need."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text, without tokens that a template would add."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of text tokens, with a replacement character for broken UTF-8."""

    def get_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a text token stands for."""

    def get_id(self, token: str) -> int | None:
        """Return the id of a special token such as `<|en|>`, or None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperTokens:
    """The special tokens of a Whisper checkpoint, and the sizes of its windows."""

    vocab_size: int
    start_id: int  # start of a transcript
    end_id: int
    previous_id: int  # begins the text that comes before the transcript
    no_timestamps_id: int
    language_ids: Mapping[str, int]  # code (no brackets) -> token; empty for English-only models
    task_ids: Mapping[Task, int]  # empty for English-only models
    is_multilingual: bool
    special_ids: frozenset[int]  # all special tokens before the timestamps
    bans: TokenBans  # tokens that a text never has, or does not begin with
    max_initial_index: int | None  # the latest timestamp that a window may begin with
    alignment_heads: tuple[tuple[int, int], ...]  # (layer of the decoder, head)
    max_positions: int  # of the decoder
    num_window_frames: int
    median_filter_width: int

    @property
    def first_timestamp_id(self) -> int:
        return self.no_timestamps_id + 1

    @property
    def no_speech_id(self) -> int:
        # Its name differs between checkpoints, its place does not.
        return self.no_timestamps_id - 1

    def is_text(self, token_id: int) -> bool:
        return token_id < self.first_timestamp_id and token_id not in self.special_ids

    def find_language(self, language: str) -> str:
        """Return the code of a language, or raise `RequestError` if the model lacks it."""
        code = find_code(language)
        known = self.language_ids if self.is_multilingual else {"en": 0}
        if code not in known:
            raise RequestError(
                f"Unknown language {language!r}. This model has: {', '.join(sorted(known))}.",
                path=("language",),
            )
        return code

    def check_task(self, task: Task) -> None:
        """Raise `RequestError` if the model can't do this task."""
        is_known = task in self.task_ids if self.is_multilingual else task == "transcribe"
        if not is_known:
            raise RequestError(f"This model can't {task}.", path=("model",))


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperSettings:
    """The thresholds for accepting the text of a window, and whether the next window continues it.

    A window is decoded again at the next temperature if its tokens repeat themselves too much or
    are too unlikely. None turns a threshold off. The thresholds are those of OpenAI's code, except
    for the compression ratio: it is measured on token ids, as in Transformers, and not on text.
    """

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    max_compression_ratio: float | None = 1.35
    min_avg_logprob: float | None = -1.0
    # A window is silent if this probability is exceeded and its text is too unlikely as well.
    max_no_speech_prob: float | None = 0.6
    # A window is given the text before it. Not by default, because Whisper then tends to continue
    # that text instead of listening: a mistake in one window leads to mistakes in all later ones.
    condition_on_prev_tokens: bool = False
    # The most tokens of a window's text. None: what the decoder has room for. If both are given,
    # the first counts. The second grows by the prompt of each window, as in Transformers.
    max_new_tokens: int | None = None
    max_length: int | None = None


def read_whisper_settings(generation_config: Mapping[str, Any]) -> WhisperSettings:
    """Return the default settings, overridden by those of a generation config."""
    names = {
        "compression_ratio_threshold": "max_compression_ratio",
        "logprob_threshold": "min_avg_logprob",
        "no_speech_threshold": "max_no_speech_prob",
        "condition_on_prev_tokens": "condition_on_prev_tokens",
    }
    lengths = ("max_new_tokens", "max_length")
    names |= {name: name for name in lengths}
    found = {
        ours: generation_config[theirs]
        for theirs, ours in names.items()
        if generation_config.get(theirs) is not None
    }
    for name in lengths:
        if name in found:
            _read_size(found, name)
    return WhisperSettings(**found)


def read_whisper_tokens(
    generation_config: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: SpeechTokenizer,
    bans: TokenBans,
) -> WhisperTokens:
    """Return the special tokens of a checkpoint, or raise `ModelError` if some are missing."""
    vocab_size = _read_size(config, "vocab_size")
    suppressed = _read_ids(generation_config, config, "suppress_tokens")
    no_timestamps_id = _first(
        generation_config.get("no_timestamps_token_id"), tokenizer.get_id("<|notimestamps|>")
    )
    previous_id = _first(
        generation_config.get("prev_sot_token_id"),
        tokenizer.get_id("<|startofprev|>"),
        suppressed[-2] if len(suppressed) >= 2 else None,  # as in Transformers
    )
    is_multilingual = generation_config.get("is_multilingual")
    if is_multilingual is None:
        has_languages = bool(generation_config.get("lang_to_id"))
        is_multilingual = has_languages or vocab_size >= _FIRST_MULTILINGUAL_VOCAB_SIZE
    languages = _read_languages(generation_config, tokenizer)
    tasks = _read_tasks(generation_config, tokenizer)
    ids = {
        "the start of a transcript": _read_id(generation_config, config, "decoder_start_token_id"),
        "the end of a text": _read_id(generation_config, config, "eos_token_id"),
        "the previous text": previous_id,
        "no timestamps": no_timestamps_id,
    }
    start_id, end_id, previous_id, no_timestamps_id = (
        _check_id(name, value, vocab_size) for name, value in ids.items()
    )
    if is_multilingual and not (languages and tasks):
        raise ModelError("The generation config has no tokens of languages and tasks.")
    special_ids = {start_id, end_id, previous_id, no_timestamps_id, no_timestamps_id - 1}
    special_ids |= {*languages.values(), *tasks.values(), *_list_other_specials(tokenizer)}
    return WhisperTokens(
        vocab_size=vocab_size,
        start_id=start_id,
        end_id=end_id,
        previous_id=previous_id,
        no_timestamps_id=no_timestamps_id,
        language_ids=languages if is_multilingual else {},
        task_ids=tasks if is_multilingual else {},
        is_multilingual=is_multilingual,
        special_ids=frozenset(special_ids),
        bans=bans,
        max_initial_index=generation_config.get("max_initial_timestamp_index"),
        alignment_heads=_read_heads(generation_config, config),
        max_positions=_read_size(config, "max_target_positions"),
        num_window_frames=FRAMES_PER_POSITION * _read_size(config, "max_source_positions"),
        median_filter_width=config.get("median_filter_width") or _MEDIAN_FILTER_WIDTH,
    )


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _read_size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"The config has no valid {name}: {value!r}.")
    return value


def _read_id(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> int | None:
    value = generation_config.get(name)
    value = config.get(name) if value is None else value
    if isinstance(value, list | tuple):
        return value[0] if value else None
    return value


def _check_id(name: str, value: int | None, vocab_size: int) -> int:
    if value is None:
        raise ModelError(
            f"Neither the generation config nor the tokenizer has the token of {name}."
        )
    if not 0 <= value < vocab_size:
        raise ModelError(f"The token of {name}, {value}, is not in the vocabulary.")
    return value


def _read_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], name: str
) -> tuple[int, ...]:
    value = generation_config.get(name)
    return tuple((config.get(name) if value is None else value) or ())


def _read_languages(
    generation_config: Mapping[str, Any], tokenizer: SpeechTokenizer
) -> dict[str, int]:
    given = generation_config.get("lang_to_id")
    if given:
        return {token.removeprefix("<|").removesuffix("|>"): given[token] for token in given}
    found = {code: tokenizer.get_id(f"<|{code}|>") for code in NAMES}
    return {code: token_id for code, token_id in found.items() if token_id is not None}


def _read_tasks(
    generation_config: Mapping[str, Any], tokenizer: SpeechTokenizer
) -> dict[Task, int]:
    given = generation_config.get("task_to_id") or {}
    found = {task: _first(given.get(task), tokenizer.get_id(f"<|{task}|>")) for task in _TASKS}
    return {task: token_id for task, token_id in found.items() if token_id is not None}


def _list_other_specials(tokenizer: SpeechTokenizer) -> list[int]:
    """Return special tokens that no config names, such as the languages of English-only models."""
    names = ["startoflm", "startofprev", "nospeech", "nocaptions", *NAMES]
    found = (tokenizer.get_id(f"<|{name}|>") for name in names)
    return [token_id for token_id in found if token_id is not None]


def _read_heads(
    generation_config: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[int, int], ...]:
    """Return the alignment heads; by default all heads in the last half of the layers."""
    num_layers = _read_size(config, "decoder_layers")
    num_heads = _read_size(config, "decoder_attention_heads")
    given = generation_config.get("alignment_heads")
    if not given:
        layers = range(num_layers // 2, num_layers)
        return tuple((layer, head) for layer in layers for head in range(num_heads))
    heads = tuple((int(layer), int(head)) for layer, head in given)
    if not all(0 <= layer < num_layers and 0 <= head < num_heads for layer, head in heads):
        raise ModelError("The alignment heads are not all heads of the decoder.")
    return heads
