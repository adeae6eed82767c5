"""A request: the caller's prompt, the form in which the core gets it, and the core's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypedDict

import msgspec

from sensorium.types.errors import ErrorRecord
from sensorium.types.multimodal import MultiModalFeatureSpec
from sensorium.types.sampling import NO_BANS, SamplingParams, TokenBans


class TextPrompt(TypedDict, total=False):
    """A prompt of text or token ids, with media that still has to be processed."""

    # Either text, with the model's own marker for each media item, or token ids.
    prompt: str
    prompt_token_ids: Sequence[int]
    # modality -> an item or a list of items, e.g. `{"image": [image, image]}`. An item is an
    # address (`data:`, `https:`, `file:`), the bytes of a file, or a PIL image, array or tensor
    # (pixel values are 0 to 255).
    multi_modal_data: Mapping[str, Any]
    # modality -> the caller's own names for the items in their order, or `None`. An item that was
    # sent under its uuid before may be left out as `None`.
    multi_modal_uuids: Mapping[str, Sequence[str | None]]
    mm_processor_kwargs: Mapping[str, Any]  # for the model's processor, with every item
    media_io_kwargs: Mapping[str, Mapping[str, Any]]  # modality -> options for decoding
    # Whether the tokenizer adds the tokens that begin a text (default: yes). A chat template may
    # have written them.
    add_special_tokens: bool
    cache_salt: str  # requests with different salts share no cache
    uuid_scope: str  # requests with different scopes share no uuids
    priority: int  # a lower one runs first, where the scheduling policy is "priority"


class RenderedPrompt(TypedDict, total=False):
    """A prompt of token ids with placeholders of media that this or another server processed."""

    prompt_token_ids: Sequence[int]
    # The next four: modality -> a list with one entry per item.
    mm_hashes: Mapping[str, Sequence[str]]  # the names of the items in every cache
    # A `PlaceholderRange`, or a mapping with `offset`, `length` and `is_embed`.
    mm_placeholders: Mapping[str, Sequence[Any]]
    mm_kwargs: Mapping[str, Sequence[Any]]  # tensors by name, or `None` if they are cached
    # An `ItemLayout`, or `None`. With one, later prompts of text can also use the item.
    mm_layouts: Mapping[str, Sequence[Any]]
    # The hashes come from another machine. Its items must not replace those of other clients, so
    # they get new hashes, unless the engine was configured to trust the given ones.
    is_external: bool
    cache_salt: str
    uuid_scope: str
    priority: int


Prompt = str | Sequence[int] | TextPrompt | RenderedPrompt


class FinishReason(str, Enum):
    """The reason why a request ended; every accepted request ends with exactly one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # it could not be computed; the output carries the reason

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How a request to a streaming model gets its audio, which may arrive while it runs.

    Each position needs the embedding of a part of the audio. `num_received` positions have their
    embeddings when the request begins; with `is_open`, more follow.
    """

    num_delay_tokens: int  # how far the text is behind the audio
    num_received: int = 0
    is_open: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request as the engine core gets it: token ids and metadata, without text and tensors."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams  # with the defaults of the model filled in
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()  # sorted by offset
    eos_token_ids: tuple[int, ...] = ()  # tokens that end it, unless its parameters ignore them
    bans: TokenBans = NO_BANS  # tokens that it never generates
    # KV blocks and encoder outputs are shared only by requests with the same salt and adapter.
    cache_salt: str | None = None
    lora_id: str | None = None
    priority: int = 0  # lower runs first
    completion_index: int = 0  # among the completions of one prompt
    # The id of the client's call that it belongs to with other prompts or completions; None if the
    # call has only this one.
    group: str | None = None
    stream: StreamSpec | None = None  # for streaming models

    @property
    def is_live(self) -> bool:
        """Whether audio arrives while the request runs, so that it can't be computed again."""
        return self.stream is not None and self.stream.is_open

    @property
    def encoder_key_suffix(self) -> str:
        """The text that is appended to an item's `mm_hash` to get its encoder cache key.

        It keeps requests with different cache salts or adapters from sharing encoder outputs.
        """
        if self.cache_salt is None and self.lora_id is None:
            return ""
        return f"/{self.lora_id!r}/{self.cache_salt!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTimes:
    """The times at which a request reached each stage in the core; `None`: it has not reached it.

    The times are seconds of the machine's monotonic clock, which all its processes share.
    """

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    encode_s: float = 0.0  # how long the steps that encoded its media spent on encoding


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log-probabilities at one position: of the token there, and of the likeliest tokens."""

    logprob: float  # of the token that stands there: sampled, or of the prompt
    rank: int  # of that token; 1 is the likeliest
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class TensorResult(msgspec.Struct, frozen=True, array_like=True):
    """A float32 tensor that a step has computed for a request, besides its tokens."""

    shape: tuple[int, ...]
    values: bytes


# Name -> tensor.
Results = Mapping[str, TensorResult]
NO_RESULTS: Results = MappingProxyType({})
# The names of results for transcripts, which the `SpeechRules` of a request ask for:
ALIGNMENT = "alignment"  # [heads, tokens of the prompt, positions of the audio]
SCORED_LOGPROB = "scored_logprob"  # [], the log-probability of `SpeechRules.scored_token`
FRAMES = "frames"  # the table of frames from which a CTC/transducer model's text is read


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The results of a step for one request; an output with a `finish_reason` is its last one."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    # The log-probabilities of the next prompt tokens; the first token of a prompt has none.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    results: dict[str, TensorResult] = {}  # with the first token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the caller's stop token that ended the request
    error: ErrorRecord | None = None  # the reason of `FinishReason.ERROR`
    num_cached_tokens: int = 0
    num_encoder_hits: int = 0
    # The next three are set only in the last output, and in each that a stop string may make the
    # last.
    encoder_hits: tuple[int, ...] = ()  # indices of items with an encoder output in the cache
    encoder_loads: tuple[int, ...] = ()  # indices of items with an encoder output from elsewhere
    times: CoreTimes | None = None
