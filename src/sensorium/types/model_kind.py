"""The kind of a model: how it decodes and where its media stands, decided once from its config."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

# How tokens are chosen: each from those before it, also from encoded media by cross-attention, or
# not at all, because the text is read from the encoder's output.
Decoder = Literal["causal", "cross", "none"]
# Where media stands: in place of tokens of the prompt, outside of it, or a part of it at each
# position.
MediaPlace = Literal["in_prompt", "outside", "each_position"]
# The tasks that a model may have, by their names in `/v1/models`.
Task = Literal["chat", "completions", "transcription", "translation", "realtime"]

# In the order of `/v1/models`.
TASKS: tuple[Task, ...] = get_args(Task)
PROMPT_TASKS: frozenset[Task] = frozenset({"chat", "completions"})


class ModelKind(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of a model: its decoder, and the place of its media."""

    decoder: Decoder = "causal"
    media: MediaPlace = "in_prompt"

    @property
    def takes_prompts(self) -> bool:
        """Return True if the model answers prompts; a streaming model answers a prompt of audio."""
        return self.media != "outside"

    @property
    def is_streaming(self) -> bool:
        """Return True if the model can take audio that is still arriving."""
        return self.media == "each_position"

    @property
    def has_kept_encodings(self) -> bool:
        """Return True if the encoder outputs of whole items can be cached and used again."""
        # A model without a decoder turns audio into text at once, and the audio of a streaming
        # model may not be complete.
        return self.decoder != "none" and not self.is_streaming


CAUSAL = ModelKind()
CROSS = ModelKind(decoder="cross", media="outside")
NO_DECODER = ModelKind(decoder="none", media="outside")
STREAMING = ModelKind(media="each_position")
