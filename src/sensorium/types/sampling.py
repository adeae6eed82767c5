"""The sampling parameters: how tokens are chosen, and when a request stops.

Names are those of OpenAI's API and vLLM. `SamplingParams` is the one declaration of every
parameter: type, bounds and description. The fields of the HTTP requests and the flags of the
command line are made from it (see `list_sampling_fields`), so a new parameter is one line there,
and the code that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_type_hints

from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BIAS = 100
# The parameters that have a default in `GenerationDefaults`.
_OF_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GREEDY_TEMPERATURE = 1e-5  # below this, dividing float32 logits overflows; it means greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBans:
    """A set of tokens and token sequences that the model must never generate."""

    # No sequence is ever completed, even if the prompt ends with its beginning. A sequence of one
    # token is a token that is never chosen.
    sequences: tuple[tuple[int, ...], ...] = ()
    first_token_ids: tuple[int, ...] = ()  # tokens that the answer must not begin with

    def add(self, sequences: tuple[tuple[int, ...], ...]) -> TokenBans:
        return replace(self, sequences=self.sequences + sequences) if sequences else self


NO_BANS = TokenBans()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimestampRules:
    """Whisper's rules for timestamps, which are the tokens from `first_id` on, in order of time.

    Timestamps come in pairs, except right before the end; their times never decrease; the answer
    begins with a timestamp, of at most `max_initial_index` steps; and a timestamp is chosen if all
    timestamps together are likelier than each token of text.
    """

    first_id: int  # the token of the time 0
    no_timestamps_id: int  # the token that asks for a text without timestamps; it is never chosen
    eos_token_id: int
    max_initial_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechRules:
    """What the request for a transcript needs in addition to its other sampling parameters.

    A request with these rules gets log-probabilities after all bans, as Whisper's rules need them.
    """

    timestamps: TimestampRules | None = None
    bans: TokenBans | None = None  # used in place of the model's own bans; None: the model's hold
    # (index, token id): asks for the log-probability of the token right behind the prompt's token
    # at the index (`request.SCORED_LOGPROB`).
    scored_token: tuple[int, int] | None = None
    needs_alignment: bool = False  # asks for the attention of the prompt to its audio


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The defaults for requests from the model's `generation_config.json`.

    A request may override all except the last two; a transcript may have bans of its own.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # The next two hold for every request.
    eos_token_ids: tuple[int, ...] = ()
    bans: TokenBans = NO_BANS


def parameter(default: Any, description: str, **details: Any) -> Any:
    """Return a dataclass field that declares one sampling parameter of `SamplingParams`.

    `details` are further attributes of its `SamplingField`, such as the bounds `least` and `most`.
    """
    metadata = {"description": description, **details}
    if isinstance(default, dict):
        return field(default_factory=dict, hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request: how to choose tokens, and when to stop.

    If temperature, top_p, top_k, min_p or repetition_penalty is `None`, the value of the model's
    generation config is used. If that config does not set `do_sample`, decoding is then greedy.

    The model's logits are changed in this order (see `worker.sampling.sampler`): `logit_bias`;
    `repetition_penalty`; `frequency_penalty` and `presence_penalty`; bans (tokens that are not
    among `allowed_token_ids`, that would complete one of `bad_words`, or that would end the answer
    before `min_tokens`); `temperature`; then the filters `top_k`, `top_p` and `min_p`.
    """

    n: int = parameter(
        1,
        "The number of completions of the prompt. Each has a seed of its own; the first has "
        "`seed`.",
        least=1,
        most=MAX_N,
    )
    temperature: float | None = parameter(
        None, "How random the choice of tokens is. 0 is greedy.", least=0, most=100
    )
    top_p: float | None = parameter(
        None,
        "Choose among the likeliest tokens, until their probabilities reach this sum.",
        least=1e-9,
        most=1,
    )
    top_k: int | None = parameter(
        None, "Choose among this many of the likeliest tokens. 0 or -1: no limit.", least=-1
    )
    min_p: float | None = parameter(
        None,
        "Leave out tokens less likely than this share of the likeliest one's probability.",
        least=0,
        most=1,
    )
    # Beyond this range logits of float32 may stop being numbers.
    repetition_penalty: float | None = parameter(
        None,
        "Above 1, tokens of the prompt and the answer become less likely.",
        least=0.01,
        most=100,
    )
    presence_penalty: float = parameter(
        0.0, "Subtracted from the logit of each token that occurs in the answer.", least=-2, most=2
    )
    frequency_penalty: float = parameter(
        0.0,
        "Subtracted from a token's logit for each time it occurs in the answer.",
        least=-2,
        most=2,
    )
    logit_bias: Mapping[int, float] = parameter(
        {}, f"Token id -> a number in [-{MAX_BIAS}, {MAX_BIAS}] added to its logit."
    )
    bad_words: str | Sequence[str] = parameter(
        (), "Texts that the model never writes.", kind="words"
    )
    allowed_token_ids: Sequence[int] | None = parameter(
        None, "Choose only among these tokens.", min_length=1
    )
    seed: int | None = parameter(None, "Makes sampling repeatable.")
    max_tokens: int | None = parameter(
        16, "The longest answer, in tokens. None: until the context is full.", least=1
    )
    min_tokens: int = parameter(0, "Do not end the answer before it has this many tokens.", least=0)
    stop: str | Sequence[str] = parameter((), "End the answer before one of these texts.")
    stop_token_ids: Sequence[int] = parameter((), "End the answer at one of these tokens.")
    include_stop_str_in_output: bool = parameter(
        False, "Leave the text that ended the answer in it."
    )
    ignore_eos: bool = parameter(False, "Continue after the model's end-of-sequence tokens.")
    logprobs: int | None = parameter(
        None,
        "Return the log-probability of each token of the answer, as the model gave it, and those "
        "of this many of the likeliest tokens.",
        least=0,
        most=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = parameter(
        None, "The same as `logprobs` for the tokens of the prompt.", least=0, most=MAX_LOGPROBS
    )
    structured_outputs: StructuredOutputsParams | None = parameter(
        None, "A constraint on the answer, with exactly one of its fields."
    )
    skip_special_tokens: bool = parameter(True, "Leave special tokens out of the text.")
    kept_special_token_ids: Sequence[int] = parameter(
        (), "Special tokens that stay in the text nevertheless.", is_internal=True
    )
    speech: SpeechRules | None = parameter(
        None, "The rules of a transcript.", kind="speech", is_internal=True
    )

    def __post_init__(self) -> None:
        for declared in list_sampling_fields():
            value = declared.read(getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)
        if self.top_k == -1:  # some clients send it for "no limit"
            object.__setattr__(self, "top_k", 0)
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
        """Return a copy with a value for every parameter that has a default in the model's config.

        `seed` is used if the request has none. `max_tokens` may still be `None`.
        """
        missing = {
            name: getattr(defaults, name) for name in _OF_MODEL if getattr(self, name) is None
        }
        return replace(self, seed=seed if self.seed is None else self.seed, **missing)


Kind = Literal[
    "integer", "number", "flag", "texts", "words", "token_ids", "biases", "structured", "speech"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """The declaration of one sampling parameter: its type, default, bounds and description."""

    name: str
    kind: Kind
    default: Any
    is_optional: bool  # it may be None
    least: float | None = None  # bounds of a number, both included; None: it has no bound
    most: float | None = None
    min_length: int = 0  # of a list
    description: str
    is_internal: bool = False  # set by the server, not by a caller

    @property
    def rule(self) -> str:
        """The condition on a value in words, such as "a number in [0, 1]", for error messages."""
        if self.min_length:
            return "a list of at least one integer >= 0"
        noun, _ = _RULES[self.kind]
        if self.most is not None:
            return f"{noun} in [{self.least:g}, {self.most:g}]"
        return noun if self.least is None else f"{noun} >= {self.least:g}"

    def read(self, value: Any) -> Any:
        """Return a client's value, checked and converted to the type to keep.

        Raise a `RequestError` with the name of the parameter if the value is not valid.
        """
        if value is None and self.is_optional:
            return None
        kept = _convert(value, self.kind)
        _, is_valid = _RULES[self.kind]
        if not is_valid(kept) or not self._is_in_bounds(kept):
            raise RequestError(f"must be {self.rule}, not {_show(kept)}", path=(self.name,))
        return _as_plain(kept)

    def _is_in_bounds(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.min_length == 0 or len(value) >= self.min_length)
        )


@cache
def list_sampling_fields() -> tuple[SamplingField, ...]:
    hints = get_type_hints(SamplingParams)
    return tuple(_read_field(entry, hints[entry.name]) for entry in fields(SamplingParams))


_KINDS: dict[Any, Kind] = {
    int: "integer",
    float: "number",
    bool: "flag",
    str | Sequence[str]: "texts",
    Sequence[int]: "token_ids",
    Mapping[int, float]: "biases",
    StructuredOutputsParams: "structured",
}


def _read_field(entry: Field[Any], hint: Any) -> SamplingField:
    is_optional = type(None) in get_args(hint)
    if is_optional:
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    details = {"kind": _KINDS.get(hint), **entry.metadata}
    return SamplingField(name=entry.name, default=entry.default, is_optional=is_optional, **details)


def _convert(value: Any, kind: Kind) -> Any:
    """Return a client's value as the type that a parameter of this kind is kept in.

    A value of a wrong type is returned unchanged, and refused by the check that follows.
    """
    if kind in ("texts", "words", "token_ids"):
        return _as_tuple(value)
    if kind == "biases":
        return _as_bias(value)
    if kind == "structured" and isinstance(value, Mapping):
        return _as_structured(value)
    return value


def _as_tuple(value: object) -> object:
    """Return text as a tuple of one entry, lists and sets as tuples, and `None` as `()`."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _as_plain(value: Any) -> Any:
    """Return a value in which the numbers of other libraries, such as numpy, are Python's own."""
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
    """Return a `logit_bias` with integers as keys, which JSON has as strings; `None` is empty."""
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
        _is_count(token_id) and _is_number(bias) and -MAX_BIAS <= bias <= MAX_BIAS
        for token_id, bias in value.items()
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_integer(value) and int(value) >= 0  # type: ignore[call-overload]


def _is_tuple_of(is_member: Callable[[object], bool], value: object) -> bool:
    return isinstance(value, tuple) and all(map(is_member, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_word(value: object) -> bool:
    """Return whether a value is text with more than whitespace that can be tokenized."""
    is_filled = isinstance(value, str) and bool(value.strip())
    return is_filled and not any("\ud800" <= c <= "\udfff" for c in str(value))


# Kind -> what a value must be, in words, and the check of a value.
_RULES: dict[Kind, tuple[str, Callable[[Any], bool]]] = {
    "integer": ("an integer", _is_integer),
    "number": ("a number", _is_number),
    "flag": ("true or false", lambda value: isinstance(value, bool)),
    "texts": ("non-empty text or a list of non-empty texts", partial(_is_tuple_of, _is_text)),
    "words": (
        "text with more than whitespace, or a list of such texts",
        partial(_is_tuple_of, _is_word),
    ),
    "token_ids": ("a list of integers >= 0", partial(_is_tuple_of, _is_count)),
    "biases": (f"a mapping of token ids to numbers in [-{MAX_BIAS}, {MAX_BIAS}]", _is_bias),
    "structured": (
        "StructuredOutputsParams, or a mapping with its fields",
        lambda value: isinstance(value, StructuredOutputsParams),
    ),
    "speech": ("SpeechRules", lambda value: isinstance(value, SpeechRules)),
}
