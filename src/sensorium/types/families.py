"""The model families (models of one architecture) that are supported and tested, with their facts.

This module does not import torch, so that the command line can list the families at once. Code for
single families is looked up by `model_type` in `models.families` and
`multimodal.processing.processor`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """A model family that Sensorium supports, with the facts that the documentation lists."""

    model_type: str  # as in the checkpoint's config
    name: str
    modalities: tuple[str, ...] = ()  # of the media that it takes in addition to text
    _: KW_ONLY
    # Modalities that a client may send as precomputed embeddings: only their number matters.
    embeds: tuple[str, ...] = ()
    own_code: tuple[str, ...] = ()  # folders with code for this family alone
    special: str = ""
    limits: str = ""  # limitations that a user may meet


_IMAGE = ("image",)
_VISUAL = ("image", "video")
_AUDIO = ("audio",)
_ALL = ("image", "video", "audio")
_MODELS = ("models/families",)
_CTC_TRANSDUCER = ("models/ctc_transducer",)
_PIECES = "transcribes, long audio in pieces of at most 30 seconds; does not chat"
_NO_PADDING = f"{_PIECES}; only recordings of equal length share a batch"
_TIMES = "frames without metadata count as 24 a second"


FAMILIES: tuple[Family, ...] = (
    Family("llama", "Llama", special="stands for all decoders of text"),
    Family(
        "phi3",
        "Phi-3, Phi-4-mini",
        special="rotary factors by the length of each request (longrope)",
        limits="a request that grows beyond the original context is computed again, once",
    ),
    Family("llava", "LLaVA", _IMAGE, embeds=_IMAGE),
    Family("llava_next", "LLaVA-NeXT", _IMAGE, embeds=_IMAGE, special="tiles"),
    Family(
        "llava_onevision",
        "LLaVA-OneVision",
        _VISUAL,
        embeds=_IMAGE,
        special="tiles",
        limits="each image is tiled, also among several",
    ),
    Family("idefics3", "Idefics3", _IMAGE, special="tiles"),
    Family(
        "smolvlm",
        "SmolVLM",
        _VISUAL,
        special="tiles; frames are images, with their times in text",
        limits=_TIMES,
    ),
    Family("internvl", "InternVL", _VISUAL, special="frames are images"),
    Family("aya_vision", "Aya Vision", _IMAGE, special="tiles"),
    Family("cohere2_vision", "Command A Vision", _IMAGE, special="tiles"),
    Family("qwen2_vl", "Qwen2-VL", _VISUAL, special="M-RoPE"),
    Family("qwen2_5_vl", "Qwen2.5-VL", _VISUAL, special="M-RoPE", limits=_TIMES),
    Family(
        "qwen3_vl",
        "Qwen3-VL",
        _VISUAL,
        own_code=_MODELS,
        special="M-RoPE, DeepStack, the times of frames in text",
        limits=_TIMES,
    ),
    Family(
        "qwen3_vl_moe",
        "Qwen3-VL (experts)",
        _VISUAL,
        own_code=_MODELS,
        special="as Qwen3-VL",
        limits=_TIMES,
    ),
    Family(
        "glm4v", "GLM-4.1V", _VISUAL, special="M-RoPE, the times of frames in text", limits=_TIMES
    ),
    Family(
        "gemma3",
        "Gemma 3",
        _IMAGE,
        own_code=_MODELS,
        special="images attended in both directions, sliding windows",
        limits="pan and scan is not tested",
    ),
    Family(
        "gemma4",
        "Gemma 4",
        _ALL,
        own_code=_MODELS,
        special="per-layer inputs, shared keys and values, vision in both directions if so trained",
        limits=f"{_TIMES}; audio beyond 30 seconds is refused",
    ),
    Family(
        "qwen2_audio",
        "Qwen2-Audio",
        _AUDIO,
        embeds=_AUDIO,
        own_code=_MODELS,
        limits="audio beyond the window of its processor (30 seconds) is refused",
    ),
    Family(
        "audioflamingo3",
        "Audio Flamingo 3",
        _AUDIO,
        embeds=_AUDIO,
        limits="audio beyond 10 minutes is refused; shorter audio is encoded in windows of "
        "30 seconds",
    ),
    Family(
        "qwen2_5_omni_thinker",
        "Qwen2.5-Omni (thinker)",
        _ALL,
        own_code=_MODELS,
        special="M-RoPE",
        limits="text out, no speech; a video's own audio is not used; audio beyond the window "
        "of its processor is refused",
    ),
    Family(
        "voxtral",
        "Voxtral",
        _AUDIO,
        embeds=_AUDIO,
        own_code=("multimodal/processing",),
        special="Mistral's tokenizer",
        limits="audio of any length, 375 tokens for each begun 30 seconds",
    ),
    Family(
        "voxtral_realtime",
        "Voxtral-Realtime",
        _AUDIO,
        own_code=("models/streaming", "multimodal/processing"),
        special="every token has 80 ms of the audio, which may be streamed",
        limits="transcribes",
    ),
    Family(
        "whisper",
        "Whisper",
        _AUDIO,
        own_code=("models/encoder_decoder", "speech"),
        special="a decoder that attends to the encoded audio; Whisper's rules for audio of any "
        "length",
        limits="transcribes and translates, but does not chat",
    ),
    Family(
        "moonshine",
        "Moonshine",
        _AUDIO,
        own_code=("models/encoder_decoder",),
        special="a decoder that attends to the encoded audio",
        limits=_PIECES,
    ),
    *(
        Family(
            model_type,
            name,
            _AUDIO,
            own_code=_CTC_TRANSDUCER,
            special=f"no decoder: {head}",
            limits=limits,
        )
        for model_type, name, head, limits in (
            ("parakeet_ctc", "Parakeet CTC", "CTC", _PIECES),
            ("parakeet_tdt", "Parakeet TDT", "a transducer with durations", _PIECES),
            ("parakeet_rnnt", "Parakeet RNN-T", "a transducer", _PIECES),
            ("wav2vec2", "wav2vec 2.0", "CTC", _PIECES),
            ("wav2vec2-bert", "Wav2Vec2-BERT", "CTC", _PIECES),
            ("wav2vec2-conformer", "Wav2Vec2-Conformer", "CTC", _NO_PADDING),
            ("hubert", "HuBERT", "CTC", _PIECES),
            ("wavlm", "WavLM", "CTC", _PIECES),
            ("data2vec-audio", "data2vec", "CTC", _NO_PADDING),
            ("unispeech", "UniSpeech", "CTC", _PIECES),
            ("unispeech-sat", "UniSpeech-SAT", "CTC", _PIECES),
            ("sew", "SEW", "CTC", _NO_PADDING),
        )
    ),
)
