"""The parameters with which a caller controls how tokens are chosen and when to stop.

Names are those of OpenAI's API and vLLM.

`SamplingParams` is the one declaration of every parameter: its type, bounds and description. The
fields of the HTTP requests and the flags of the command line are made from it (see
`list_sampling_fields`), so a new parameter is one line there, and the code that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from sensorium.types.errors import RequestError
from sensorium.types.structured import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_N = 128
MAX_BIAS = 100
GREEDY_TEMPERATURE = 1e-5  # below this, dividing float32 logits overflows; it means greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBans:
    """Tokens and sequences of tokens that are never generated."""

    # No sequence is ever completed, even if the prompt has its beginning. A sequence of one token
    # is a token that is never chosen.
    sequences: tuple[tuple[int, ...], ...] = ()
    first_token_ids: tuple[int, ...] = ()  # none of them is the first new token

    def add(self, sequences: tuple[tuple[int, ...], ...]) -> TokenBans:
        return replace(self, sequences=self.sequences + sequences) if sequences else self


NO_BANS = TokenBans()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The values of the model's `generation_config.json`, for what a request leaves open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    # These two hold for every request, whatever it asks for.
    eos_token_ids: tuple[int, ...] = ()
    bans: TokenBans = NO_BANS


_Logprobs = Annotated[
    int,
    Meta(
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the log-probability of each token of the answer, as the model gave it, "
        "and those of this many of the likeliest tokens.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The parameters of one request.

    `None` for temperature, top_p, top_k, min_p and repetition_penalty means the value of the
    model's generation config, which is greedy unless it has `do_sample`.

    The model's logits are changed in this order (see `worker.sampler`): `logit_bias`;
    `repetition_penalty`; `frequency_penalty` and `presence_penalty`; bans (tokens that are not
    among `allowed_token_ids`, that would complete one of `bad_words`, or that would end the answer
    before `min_tokens`); `temperature`; then the filters `top_k`, `top_p` and `min_p`.
    """

    n: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_N,
            description="The number of completions of the prompt. Each has a seed of its own; the "
            "first has `seed`.",
        ),
    ] = 1
    temperature: (
        Annotated[
            float,
            Meta(ge=0, le=100, description="How random the choice of tokens is. 0 is greedy."),
        ]
        | None
    ) = None
    top_p: (
        Annotated[
            float,
            Meta(
                ge=1e-9,
                le=1,
                description="Choose among the likeliest tokens whose probabilities reach this sum.",
            ),
        ]
        | None
    ) = None
    top_k: (
        Annotated[
            int,
            Meta(
                ge=-1,
                description="Choose among this many of the likeliest tokens. 0 or -1: no limit.",
            ),
        ]
        | None
    ) = None
    min_p: (
        Annotated[
            float,
            Meta(
                ge=0,
                le=1,
                description="Leave out tokens less likely than this share of the likeliest one's "
                "probability.",
            ),
        ]
        | None
    ) = None
    # Beyond this range logits of float32 may stop being numbers.
    repetition_penalty: (
        Annotated[
            float,
            Meta(
                ge=0.01,
                le=100,
                description="Above 1, tokens of the prompt and the answer become less likely.",
            ),
        ]
        | None
    ) = None
    presence_penalty: Annotated[
        float,
        Meta(ge=-2, le=2, description="Subtracted once for each token that the answer has."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Meta(ge=-2, le=2, description="Subtracted for each occurrence of a token in the answer."),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        Meta(description=f"Token id -> a number in [-{MAX_BIAS}, {MAX_BIAS}] added to its logit."),
    ] = field(default_factory=dict, hash=False)
    bad_words: Annotated[
        str | Sequence[str],
        Meta(description="Texts that are never completed.", extra={"kind": "words"}),
    ] = ()
    allowed_token_ids: (
        Annotated[
            Sequence[int],
            Meta(min_length=1, description="Choose only among these tokens."),
        ]
        | None
    ) = None
    seed: Annotated[int, Meta(description="Makes sampling repeatable.")] | None = None
    # None: until the context is full.
    max_tokens: (
        Annotated[
            int,
            Meta(
                ge=1, description="The longest answer, in tokens. None: until the context is full."
            ),
        ]
        | None
    ) = 16
    min_tokens: Annotated[
        int, Meta(ge=0, description="Do not end the answer before it has this many tokens.")
    ] = 0
    stop: Annotated[
        str | Sequence[str], Meta(description="End the answer before one of these texts.")
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int], Meta(description="End the answer at one of these tokens.")
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Meta(description="Leave the text that ended the answer in it.")
    ] = False
    ignore_eos: Annotated[
        bool, Meta(description="Go on after the model's end-of-sequence tokens.")
    ] = False
    logprobs: _Logprobs | None = None
    prompt_logprobs: (
        Annotated[
            int,
            Meta(
                ge=0,
                le=MAX_LOGPROBS,
                description="The same as `logprobs` for the tokens of the prompt.",
            ),
        ]
        | None
    ) = None
    structured_outputs: (
        Annotated[
            StructuredOutputsParams,
            Meta(description="What the answer must look like: exactly one of its fields."),
        ]
        | None
    ) = None
    skip_special_tokens: Annotated[
        bool, Meta(description="Leave special tokens out of the text.")
    ] = True
    kept_special_token_ids: Annotated[
        Sequence[int],
        Meta(
            description="Special tokens that stay in the text even so.", extra={"is_internal": True}
        ),
    ] = ()

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "kept_special_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple(self.allowed_token_ids))
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", _as_structured(self.structured_outputs))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        for declared in list_sampling_fields():
            value = getattr(self, declared.name)
            if not declared.is_valid(value):
                raise RequestError(
                    f"must be {declared.rule}, not {_show(value)}", path=(declared.name,)
                )
            object.__setattr__(self, declared.name, _as_plain(value))
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
        """Return a copy with nothing left open but `max_tokens`.

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


Kind = Literal["integer", "number", "flag", "texts", "words", "token_ids", "biases", "structured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingField:
    """A parameter as `SamplingParams` declares it."""

    name: str
    kind: Kind
    default: Any
    is_optional: bool  # it may be None
    least: float | None  # bounds of a number, both included; None: it has no bound
    most: float | None
    min_length: int  # of a list
    description: str
    is_internal: bool  # set by the server, not by a caller
    is_valid: Callable[[Any], bool]
    rule: str  # what a valid value is, in words


@cache
def list_sampling_fields() -> tuple[SamplingField, ...]:
    """Return the declarations of all parameters, in their order."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    defaults = SamplingParams.__dataclass_fields__
    return tuple(
        _read_field(entry.name, hints[entry.name], defaults[entry.name].default)
        for entry in fields(SamplingParams)
    )


_KINDS: dict[Any, Kind] = {
    int: "integer",
    float: "number",
    bool: "flag",
    str | Sequence[str]: "texts",
    Sequence[int]: "token_ids",
    Mapping[int, float]: "biases",
    StructuredOutputsParams: "structured",
}


def _read_field(name: str, hint: Any, default: Any) -> SamplingField:
    is_optional = get_origin(hint) in (UnionType, Union)
    if is_optional:
        (hint,) = (member for member in get_args(hint) if member is not type(None))
    declared, meta = get_args(hint)
    extra = meta.extra or {}
    kind: Kind = extra.get("kind", _KINDS[declared])
    min_length = meta.min_length or 0
    is_valid, rule = _make_rule(kind, meta.ge, meta.le, min_length)
    return SamplingField(
        name=name,
        kind=kind,
        default=default,
        is_optional=is_optional,
        least=meta.ge,
        most=meta.le,
        min_length=min_length,
        description=meta.description,
        is_internal=extra.get("is_internal", False),
        is_valid=_or_none(is_valid) if is_optional else is_valid,
        rule=rule,
    )


def _make_rule(
    kind: Kind, least: float | None, most: float | None, min_length: int
) -> tuple[Callable[[Any], bool], str]:
    if kind in ("integer", "number"):
        is_member = _is_integer if kind == "integer" else _is_number
        noun = "an integer" if kind == "integer" else "a number"
        if most is not None:
            noun += f" in [{least:g}, {most:g}]"
        elif least is not None:
            noun += f" >= {least:g}"
        low = float("-inf") if least is None else least
        high = float("inf") if most is None else most
        return lambda value: is_member(value) and bool(low <= value <= high), noun
    if kind == "token_ids" and min_length:
        return (
            lambda value: _is_tuple_of(value, _is_count) and len(value) >= min_length,
            "a list of at least one integer >= 0",
        )
    return _RULES[kind]


def _as_tuple(value: object) -> object:
    """Return text and lists as tuples, and `None` as an empty one; the rules refuse the rest."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _as_plain(value: Any) -> Any:
    """Return numbers of other libraries as Python's own."""
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
    """Return a copy with integer keys, which are strings in JSON. `None` becomes an empty one.

    The rules refuse what is no mapping of token ids.
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
        _is_count(token_id) and _is_number(bias) and -MAX_BIAS <= bias <= MAX_BIAS
        for token_id, bias in value.items()
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_integer(value) and int(value) >= 0  # type: ignore[call-overload]


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_tuple_of(value: object, is_member: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(map(is_member, value))


def _or_none(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_valid(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_word(value: object) -> bool:
    """Return whether a value is text that is not blank and that a tokenizer takes.

    No tokenizer takes half of a surrogate pair.
    """
    is_filled = isinstance(value, str) and bool(value.strip())
    return is_filled and not any("\ud800" <= c <= "\udfff" for c in str(value))


_RULES: dict[Kind, tuple[Callable[[Any], bool], str]] = {
    "flag": (_is_flag, "true or false"),
    "texts": (lambda value: _is_tuple_of(value, _is_text), "non-empty text or a list of it"),
    "words": (
        lambda value: _is_tuple_of(value, _is_word),
        "text that is not blank, or a list of it",
    ),
    "token_ids": (lambda value: _is_tuple_of(value, _is_count), "a list of integers >= 0"),
    "biases": (_is_bias, f"a mapping of token ids to numbers in [-{MAX_BIAS}, {MAX_BIAS}]"),
    "structured": (
        lambda value: isinstance(value, StructuredOutputsParams),
        "StructuredOutputsParams, or a mapping with its fields",
    ),
}
