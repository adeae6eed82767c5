"""How the next token is chosen and when to stop, as the caller says it.

Names as in OpenAI's API and vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from sensorium.types.errors import RequestError

MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5  # below this, dividing float32 logits overflows; it means greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the model's `generation_config.json` says where a request is silent."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """`None` for temperature, top_p and top_k means: what the model's generation config says, which
    is greedy unless it has `do_sample`.

    `max_tokens=None` means: until the context is full. `top_k=0` means: no limit. `logprobs` are
    those of the model, before temperature and filters.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        if self.top_k == -1:  # what some clients say for "no limit"
            object.__setattr__(self, "top_k", 0)
        for name, is_valid, rule in _RULES:
            value = getattr(self, name)
            if not is_valid(value):
                raise RequestError(f"{name} must be {rule}, not {value!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, not {self.min_tokens}"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature is not None and self.temperature < GREEDY_TEMPERATURE

    def resolve(self, defaults: GenerationDefaults, *, seed: int) -> SamplingParams:
        """A copy with nothing left open but `max_tokens`.

        `seed` is used when the request has none.
        """
        return replace(
            self,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            seed=seed if self.seed is None else self.seed,
        )


def _as_tuple(value: object) -> object:
    """Text and lists as tuples, `None` as the empty one; what is neither is left to the rules."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list | set | frozenset) else value


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_count(value: object, at_least: int = 0) -> bool:
    return _is_integer(value) and int(value) >= at_least  # type: ignore[call-overload]


def _is_between(value: object, low: float, high: float) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and low <= float(value) <= high


def _is_tuple_of(value: object, is_member: Callable[[object], bool]) -> bool:
    return isinstance(value, tuple) and all(map(is_member, value))


_SMALLEST_TOP_P = 1e-9
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "temperature",
        lambda value: value is None or _is_between(value, 0, 100),
        "a number in [0, 100]",
    ),
    (
        "top_p",
        lambda value: value is None or _is_between(value, _SMALLEST_TOP_P, 1),
        "a number in (0, 1]",
    ),
    ("top_k", lambda value: value is None or _is_count(value), "an integer >= 0 (0: no limit)"),
    ("seed", lambda value: value is None or _is_integer(value), "an integer"),
    ("max_tokens", lambda value: value is None or _is_count(value, 1), "an integer >= 1"),
    ("min_tokens", _is_count, "an integer >= 0"),
    (
        "stop",
        lambda value: _is_tuple_of(value, lambda text: isinstance(text, str) and text != ""),
        "non-empty text or a list of it",
    ),
    ("stop_token_ids", lambda value: _is_tuple_of(value, _is_count), "a list of integers >= 0"),
    (
        "logprobs",
        lambda value: value is None or (_is_count(value) and value <= MAX_LOGPROBS),
        f"an integer in [0, {MAX_LOGPROBS}]",
    ),
)
