"""How the next token is chosen and when to stop, as the caller says it.

Names as in OpenAI's API and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BIAS = 100
GREEDY_TEMPERATURE = 1e-5  # below this, dividing float32 logits overflows; it means greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBans:
    """What is never generated: none of `sequences` is completed, also where the prompt begins it
    (one of a single token is never chosen); none of `first_token_ids` is the first new token.
    """

    sequences: tuple[tuple[int, ...], ...] = ()
    first_token_ids: tuple[int, ...] = ()

    def add(self, sequences: tuple[tuple[int, ...], ...]) -> TokenBans:
        return replace(self, sequences=self.sequences + sequences) if sequences else self


NO_BANS = TokenBans()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the model's `generation_config.json` says where a request is silent.

    `bans` and `eos_token_ids` hold for every request, whatever it says.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    bans: TokenBans = NO_BANS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`None` for temperature, top_p, top_k, min_p and repetition_penalty means: what the model's
    generation config says, which is greedy unless it has `do_sample`.

    What changes the model's logits, in this order (see `worker.sampler`):

    - `logit_bias`: added to the logits of token ids, in [-100, 100];
    - `repetition_penalty`: above 1, tokens of the prompt and the output become less likely;
    - `frequency_penalty`, `presence_penalty`: subtracted for tokens of the output, per occurrence
      and once;
    - bans: what isn't in `allowed_token_ids`, what would complete one of `bad_words`, and what
      would end the request before `min_tokens`;
    - `temperature`, then the filters `top_k` (0: no limit), `top_p`, `min_p` (a share of the
      likeliest token's probability).

    `n` completions are made of one prompt, each with a seed of its own; the first has `seed`.
    `max_tokens=None` means: until the context is full. `logprobs` and `prompt_logprobs` are those
    of the model, before all of this. `structured_outputs`: what the answer must look like.

    Special tokens are left out of the text, unless `skip_special_tokens` is false;
    `kept_special_token_ids` stay in it all the same.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: str | Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    kept_special_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "kept_special_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", _as_structured(self.structured_outputs))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        if self.top_k == -1:  # what some clients say for "no limit"
            object.__setattr__(self, "top_k", 0)
        for name, is_valid, rule in _RULES:
            value = getattr(self, name)
            if not is_valid(value):
                raise RequestError(f"must be {rule}, not {_show(value)}", path=(name,))
            object.__setattr__(self, name, _as_plain(value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"must be at most max_tokens={self.max_tokens}, not {self.min_tokens}",
                path=("min_tokens",),
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty not in (None, 1.0)
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def resolve(self, defaults: GenerationDefaults, *, seed: int) -> SamplingParams:
        """A copy with nothing left open but `max_tokens`.

        `seed` is used when the request has none.
        """
        return replace(
            self,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            repetition_penalty=(
                defaults.repetition_penalty
                if self.repetition_penalty is None
                else self.repetition_penalty
            ),
            seed=seed if self.seed is None else self.seed,
        )


def _as_tuple(value: object) -> object:
    """Text and lists as tuples, `None` as the empty one; what is neither is left to the rules."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _as_plain(value: Any) -> Any:
    """Numbers of other libraries as Python's own."""
    if isinstance(value, tuple):
        return tuple(map(_as_plain, value))
    if isinstance(value, Mapping):
        return {_as_plain(key): _as_plain(entry) for key, entry in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _show(value: object) -> str:
    try:
        return repr(value)[:200]
    except ValueError:  # integers of thousands of digits
        return "a number of thousands of digits"


def _as_structured(value: Mapping[Any, Any]) -> StructuredOutputsParams:
    known = StructuredOutputsParams.__dataclass_fields__
    unknown = sorted(str(name)[:50] for name in value if name not in known)
    if unknown:
        raise RequestError(
            f"unknown field(s) {', '.join(unknown)} (known: {', '.join(known)})",
            path=("structured_outputs",),
        )
    return StructuredOutputsParams(**value)


def _as_bias(value: object) -> object:
    """A copy with integer keys, which JSON makes strings; `None` as the empty one; what is no
    mapping of token ids is left to the rules.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return value
    return {
        int(key) if isinstance(key, str) and key.isdecimal() else key: bias
        for key, bias in value.items()
    }


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_count(token_id) and _is_between(bias, -MAX_BIAS, MAX_BIAS)
        for token_id, bias in value.items()
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: object, at_least: int = 0) -> bool:
    return _is_integer(value) and int(value) >= at_least  # type: ignore[call-overload]


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(low <= value <= high)  # type: ignore[operator]


def _is_tuple_of(value: object, is_member: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(map(is_member, value))


def _or_none(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_word(value: object) -> bool:
    """Half a surrogate pair is no character: no tokenizer takes it."""
    is_filled = isinstance(value, str) and bool(value.strip())
    return is_filled and not any("\ud800" <= c <= "\udfff" for c in str(value))


def _is_logprobs(value: object) -> bool:
    return _is_integer(value) and _is_between(value, 0, MAX_LOGPROBS)


_SMALLEST_TOP_P = 1e-9
_LOGPROBS_RULE = f"an integer in [0, {MAX_LOGPROBS}]"
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("ignore_eos", lambda value: isinstance(value, bool), "true or false"),
    ("include_stop_str_in_output", lambda value: isinstance(value, bool), "true or false"),
    ("n", lambda value: _is_count(value, 1) and value <= MAX_N, f"an integer in [1, {MAX_N}]"),
    ("temperature", _or_none(lambda value: _is_between(value, 0, 100)), "a number in [0, 100]"),
    (
        "top_p",
        _or_none(lambda value: _is_between(value, _SMALLEST_TOP_P, 1)),
        "a number in (0, 1]",
    ),
    ("top_k", _or_none(_is_count), "an integer >= 0 (0: no limit)"),
    ("min_p", _or_none(lambda value: _is_between(value, 0, 1)), "a number in [0, 1]"),
    # Beyond this range logits of float32 may stop being numbers.
    (
        "repetition_penalty",
        _or_none(lambda value: _is_between(value, 0.01, 100)),
        "a number in [0.01, 100]",
    ),
    ("presence_penalty", lambda value: _is_between(value, -2, 2), "a number in [-2, 2]"),
    ("frequency_penalty", lambda value: _is_between(value, -2, 2), "a number in [-2, 2]"),
    (
        "logit_bias",
        _is_bias,
        f"a mapping of token ids to numbers in [-{MAX_BIAS}, {MAX_BIAS}]",
    ),
    (
        "bad_words",
        lambda value: _is_tuple_of(value, _is_word),
        "text that is not blank, or a list of it",
    ),
    (
        "allowed_token_ids",
        _or_none(lambda value: _is_tuple_of(value, _is_count) and len(value) > 0),
        "a list of at least one integer >= 0",
    ),
    ("seed", _or_none(_is_integer), "an integer"),
    ("max_tokens", _or_none(lambda value: _is_count(value, 1)), "an integer >= 1"),
    ("min_tokens", _is_count, "an integer >= 0"),
    ("stop", lambda value: _is_tuple_of(value, _is_text), "non-empty text or a list of it"),
    ("stop_token_ids", lambda value: _is_tuple_of(value, _is_count), "a list of integers >= 0"),
    ("logprobs", _or_none(_is_logprobs), _LOGPROBS_RULE),
    ("prompt_logprobs", _or_none(_is_logprobs), _LOGPROBS_RULE),
    (
        "structured_outputs",
        _or_none(lambda value: isinstance(value, StructuredOutputsParams)),
        "StructuredOutputsParams, or a mapping with its fields",
    ),
    ("skip_special_tokens", lambda value: isinstance(value, bool), "true or false"),
    (
        "kept_special_token_ids",
        lambda value: _is_tuple_of(value, _is_count),
        "a list of integers >= 0",
    ),
)
