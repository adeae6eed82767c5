"""Reads a model's `generation_config.json`: its values are the defaults, as in `generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from sensorium.checkpoints.files import read_json
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.sampling import GenerationDefaults, SamplingParams, TokenBans

logger = logging.getLogger(__name__)

# Fields that change the tokens and are not supported yet -> the value that has no effect.
_IGNORED_FIELDS: dict[str, object] = {
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "stop_strings": None,
}


def get_generation_defaults(
    model: PreTrainedModel, generation_config: str = "auto"
) -> GenerationDefaults:
    """Return the sampling defaults of a loaded model; greedy unless its config has `do_sample`.

    As in `generate`, temperature and filters apply only with `do_sample`, penalties and bans
    always. With "none" as `generation_config`, only end-of-sequence tokens are read, because no
    answer would end without them. Requests then sample from the model's own distribution, and no
    token is banned.
    """
    return _make_defaults(getattr(model, "generation_config", None), generation_config)


def load_generation_defaults(directory: str, generation_config: str = "auto") -> GenerationDefaults:
    """Return the result of `get_generation_defaults` without loading the model."""
    return _make_defaults(_load(directory), generation_config)


def load_bans(directory: str) -> TokenBans:
    """Return the tokens that a checkpoint bans; transcripts need them also with "none"."""
    config = _load(directory)
    with _blaming_config():
        return _get_bans(config, _as_ids(config.eos_token_id))


def _load(directory: str) -> Any:
    try:
        return GenerationConfig.from_pretrained(directory)
    except OSError:  # it is missing: older checkpoints have its fields in their `config.json`
        return GenerationConfig.from_pretrained(
            directory, config_file_name="config.json", _from_model_config=True
        )


def load_string_limit(directory: str) -> int | None:
    """Return the most characters of a string in structured output, or None if the model sets none.

    The limit holds for strings without one in their JSON schema. `structured_string_limit` in
    `generation_config.json` is a key of this project, for models that don't end such strings by
    themselves. Raise `ModelError` if it is not an integer of at least 1.
    """
    limit = read_json(Path(directory) / "generation_config.json").get("structured_string_limit")
    if limit is None:
        return None
    with _blaming_config():
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            path = ("structured_string_limit",)
            raise RequestError(f"must be an integer >= 1, not {limit!r}", path=path)
    return limit


def _make_defaults(config: Any, generation_config: str) -> GenerationDefaults:
    if config is None:  # the model generates nothing
        return GenerationDefaults()
    eos_token_ids = _as_ids(config.eos_token_id)
    with _blaming_config():
        if generation_config == "none":
            return GenerationDefaults(eos_token_ids=_check_ids("eos_token_id", eos_token_ids))
        return _read_defaults(config, eos_token_ids)


def _read_defaults(config: Any, eos_token_ids: tuple[int, ...]) -> GenerationDefaults:
    """Return a config's sampling defaults, or raise a `RequestError` that names a wrong field."""
    _warn_of_ignored(config)
    temperature = 0.0
    if config.do_sample:
        temperature = 1.0 if config.temperature is None else config.temperature
    checked = SamplingParams(
        temperature=temperature,
        top_p=config.top_p if config.do_sample else None,
        top_k=config.top_k if config.do_sample else None,
        min_p=_get(config, "min_p") if config.do_sample else None,
        repetition_penalty=_get(config, "repetition_penalty"),
        stop_token_ids=eos_token_ids,
    )
    return GenerationDefaults(
        temperature=temperature,
        top_p=1.0 if checked.top_p is None else checked.top_p,
        top_k=checked.top_k or 0,
        min_p=checked.min_p or 0.0,
        repetition_penalty=checked.repetition_penalty or 1.0,
        eos_token_ids=eos_token_ids,
        bans=_get_bans(config, eos_token_ids),
    )


@contextmanager
def _blaming_config() -> Iterator[None]:
    """Turn a `RequestError` inside a `with` into a `ModelError` that names the config file."""
    try:
        yield
    except RequestError as error:
        raise ModelError(f"the model's generation_config.json is wrong: {error}") from error


def _warn_of_ignored(config: Any) -> None:
    for name, neutral in _IGNORED_FIELDS.items():
        value = _get(config, name)
        if value and value != neutral:
            logger.warning(
                "the model's generation config: %s=%s is not supported, so it has no effect",
                name,
                value,
            )


def _get_bans(config: Any, eos_token_ids: tuple[int, ...]) -> TokenBans:
    """Return the tokens and sequences that a config bans; raise `RequestError` if one is wrong."""
    bad_words = [
        _check_ids("bad_words_ids", sequence) for sequence in _as_ids(_get(config, "bad_words_ids"))
    ]
    if not all(bad_words):
        raise RequestError("must be lists of at least one integer >= 0", path=("bad_words_ids",))
    suppressed = _check_ids("suppress_tokens", _get(config, "suppress_tokens") or ())
    return TokenBans(
        sequences=(
            *((token_id,) for token_id in suppressed),
            # As in Transformers, end-of-sequence tokens are dropped from this list only.
            *(s for s in bad_words if len(s) > 1 or s[0] not in eos_token_ids),
        ),
        first_token_ids=_check_ids(
            "begin_suppress_tokens", _get(config, "begin_suppress_tokens") or ()
        ),
    )


def _get(config: Any, name: str) -> Any:
    """Return a field of a config, or None if this version of Transformers does not have it."""
    return getattr(config, name, None)


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _check_ids(name: str, value: Any) -> tuple[int, ...]:
    is_valid = isinstance(value, list | tuple) and all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value
    )
    if not is_valid:
        raise RequestError(f"must be a list of integers >= 0, not {value!r}", path=(name,))
    return tuple(value)
