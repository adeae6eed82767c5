"""The model families that are known and tested, as plain facts.

Free of torch, so that the command line can list them at once. The code that some families need is
found by `model_type` in `models.families` and `multimodal.processing.processor`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family, and what is known about it."""

    model_type: str  # as in the checkpoint's config
    name: str
    modalities: tuple[str, ...] = ()  # what it takes besides text
    # Modalities that take nothing but embeddings in a prompt, so that they may be sent precomputed.
    embeds: tuple[str, ...] = ()
    own_code: tuple[str, ...] = ()  # folders with code for this family alone
    special: str = ""
    limits: str = ""  # what a user may run into


_IMAGE = ("image",)
_VISUAL = ("image", "video")
_AUDIO = ("audio",)
_ALL = ("image", "video", "audio")
_TIMES = "frames without metadata count as 24 a second"


FAMILIES: tuple[Family, ...] = (
    Family(model_type="llama", name="Llama", special="stands for all decoders of text"),
    Family(
        model_type="phi3",
        name="Phi-3, Phi-4-mini",
        special="rotary factors by the length of each request (longrope)",
        limits="a request that grows beyond the original context is computed again, once",
    ),
    Family(model_type="llava", name="LLaVA", modalities=_IMAGE, embeds=_IMAGE),
    Family(
        model_type="llava_next",
        name="LLaVA-NeXT",
        modalities=_IMAGE,
        embeds=_IMAGE,
        special="tiles",
    ),
    Family(
        model_type="llava_onevision",
        name="LLaVA-OneVision",
        modalities=_VISUAL,
        embeds=_IMAGE,
        special="tiles",
        limits="each image is tiled, also among several",
    ),
    Family(model_type="idefics3", name="Idefics3", modalities=_IMAGE, special="tiles"),
    Family(
        model_type="smolvlm",
        name="SmolVLM",
        modalities=_VISUAL,
        special="tiles; frames are images, with their times in text",
        limits=_TIMES,
    ),
    Family(model_type="internvl", name="InternVL", modalities=_VISUAL, special="frames are images"),
    Family(model_type="aya_vision", name="Aya Vision", modalities=_IMAGE, special="tiles"),
    Family(
        model_type="cohere2_vision", name="Command A Vision", modalities=_IMAGE, special="tiles"
    ),
    Family(model_type="qwen2_vl", name="Qwen2-VL", modalities=_VISUAL, special="M-RoPE"),
    Family(
        model_type="qwen2_5_vl",
        name="Qwen2.5-VL",
        modalities=_VISUAL,
        special="M-RoPE",
        limits=_TIMES,
    ),
    Family(
        model_type="qwen3_vl",
        name="Qwen3-VL",
        modalities=_VISUAL,
        own_code=("models/families",),
        special="M-RoPE, DeepStack, the times of frames in text",
        limits=_TIMES,
    ),
    Family(
        model_type="qwen3_vl_moe",
        name="Qwen3-VL (experts)",
        modalities=_VISUAL,
        own_code=("models/families",),
        special="as Qwen3-VL",
        limits=_TIMES,
    ),
    Family(
        model_type="glm4v",
        name="GLM-4.1V",
        modalities=_VISUAL,
        special="M-RoPE, the times of frames in text",
        limits=_TIMES,
    ),
    Family(
        model_type="gemma3",
        name="Gemma 3",
        modalities=_IMAGE,
        own_code=("models/families",),
        special="images attended in both directions, sliding windows",
        limits="pan and scan is not tested",
    ),
    Family(
        model_type="gemma4",
        name="Gemma 4",
        modalities=_ALL,
        own_code=("models/families",),
        special="per-layer inputs, shared keys and values, vision in both directions if so trained",
        limits=f"{_TIMES}; a sound beyond 30 seconds is refused",
    ),
    Family(
        model_type="qwen2_audio",
        name="Qwen2-Audio",
        modalities=_AUDIO,
        embeds=_AUDIO,
        own_code=("models/families",),
        limits="a sound beyond the window of its processor (30 seconds) is refused",
    ),
    Family(
        model_type="audioflamingo3",
        name="Audio Flamingo 3",
        modalities=_AUDIO,
        embeds=_AUDIO,
        limits="a sound beyond 10 minutes is refused; a shorter one is heard in windows of "
        "30 seconds",
    ),
    Family(
        model_type="qwen2_5_omni_thinker",
        name="Qwen2.5-Omni (thinker)",
        modalities=_ALL,
        own_code=("models/families",),
        special="M-RoPE",
        limits="text out, no speech; a video's own sound is not heard; a sound beyond the window "
        "of its processor is refused",
    ),
    Family(
        model_type="voxtral",
        name="Voxtral",
        modalities=_AUDIO,
        embeds=_AUDIO,
        own_code=("multimodal/processing",),
        special="Mistral's tokenizer",
        limits="sounds of any length, 375 tokens for each begun 30 seconds",
    ),
)
