"""How the next token is chosen and when to stop, as the caller says it.

Names as in OpenAI's API and vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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
    """`None` for temperature, top_p and top_k means: what the model's generation config says.

    `max_tokens=None` means: until the context is full. `top_k=0` means: no limit.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for name, problem in self._problems():
            if problem:
                raise RequestError(f"{name} {problem}, not {getattr(self, name)!r}")

    def _problems(self) -> list[tuple[str, str | None]]:
        temperature, top_p, top_k = self.temperature, self.top_p, self.top_k
        return [
            (
                "temperature",
                None if temperature is None or 0 <= temperature <= 100 else "must be in [0, 100]",
            ),
            ("top_p", None if top_p is None or 0 < top_p <= 1 else "must be in (0, 1]"),
            (
                "top_k",
                None
                if top_k is None or _is_count(top_k)
                else "must be an integer >= 0 (0: no limit)",
            ),
            ("seed", None if self.seed is None or _is_int(self.seed) else "must be an integer"),
            (
                "max_tokens",
                None
                if self.max_tokens is None or _is_count(self.max_tokens, 1)
                else "must be an integer >= 1",
            ),
            ("min_tokens", None if _is_count(self.min_tokens) else "must be an integer >= 0"),
            (
                "min_tokens",
                None
                if self.max_tokens is None or self.min_tokens <= self.max_tokens
                else f"must be at most max_tokens={self.max_tokens}",
            ),
            (
                "stop",
                None
                if all(isinstance(s, str) and s for s in self.stop)
                else "must be non-empty strings",
            ),
            (
                "stop_token_ids",
                None
                if all(_is_count(t) for t in self.stop_token_ids)
                else "must be token ids (integers >= 0)",
            ),
            (
                "logprobs",
                None
                if self.logprobs is None
                or (_is_count(self.logprobs) and self.logprobs <= MAX_LOGPROBS)
                else f"must be in [0, {MAX_LOGPROBS}]",
            ),
        ]

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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
