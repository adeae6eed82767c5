"""What a model is, decided once from its config, so that no other code has to find it out."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

# How tokens are chosen: each from those before it, also from encoded media by cross-attention, or
# not at all, because the text is read from the encoder's output.
Decoder = Literal["causal", "cross", "none"]
# Where media stands: in place of tokens of the prompt, outside of it, or a part of it at each
# position.
MediaPlace = Literal["in_prompt", "outside", "each_position"]
# What a model can be asked to do, in the words of `/v1/models`.
Task = Literal["chat", "completions", "transcription", "translation", "realtime"]

# In the order of `/v1/models`.
TASKS: tuple[Task, ...] = get_args(Task)
PROMPT_TASKS: frozenset[Task] = frozenset({"chat", "completions"})


class ModelKind(msgspec.Struct, frozen=True, kw_only=True):
    """How a model decodes, and where its media stands."""

    decoder: Decoder = "causal"
    media: MediaPlace = "in_prompt"

    @property
    def takes_prompts(self) -> bool:
        """Return whether it answers prompts; a streaming model answers audio with its text."""
        return self.media != "outside"

    @property
    def is_streaming(self) -> bool:
        """Return whether it can take audio that is still arriving."""
        return self.media == "each_position"

    @property
    def has_kept_encodings(self) -> bool:
        """Return whether the encoder outputs of whole items can be kept and used again."""
        # A model without a decoder makes text of its audio at once, and the audio of a streaming
        # model is not whole.
        return self.decoder != "none" and not self.is_streaming


CAUSAL = ModelKind()
CROSS = ModelKind(decoder="cross", media="outside")
NO_DECODER = ModelKind(decoder="none", media="outside")
STREAMING = ModelKind(media="each_position")
