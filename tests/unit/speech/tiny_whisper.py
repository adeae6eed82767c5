"""A tiny Whisper with random weights that answers windows, next to Transformers' `generate`.

The answers come from a plain loop over the model, with Transformers' processors of logits. So a
difference from `generate` is one of the rules under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from sensorium.models import ensure_torchvision
from sensorium.speech.transcript import Segment, Transcript
from sensorium.speech.whisper_tokens import WhisperTokens, read_whisper_tokens
from sensorium.speech.windows import Transcription, WindowRequest, WindowResult
from sensorium.types.sampling import TokenBans

ensure_torchvision()
NUM_MELS = 8
TEXTS = [" ba", "ba", " du", "du", " ki", "ki", " mo", "mo", " zé", "zé"]
TEXTS += [" (", ")", ",", ".", " -", "?", " ", "'", "日", "本"]
SPECIALS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|ja|>", "<|translate|>"]
SPECIALS += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
SPECIALS += ["<|notimestamps|>"]
IDS = {token: len(TEXTS) + i for i, token in enumerate(SPECIALS)}
END_ID = IDS["<|endoftext|>"]
BANS = TokenBans(
    sequences=((3,), *((IDS[each],) for each in SPECIALS[1:2] + SPECIALS[5:10])),
    first_token_ids=(*range(0, len(TEXTS), 2), END_ID),
)
NUM_POSITIONS = 150  # a window of 3 s, so that long audio is soon over
NUM_WINDOW_FRAMES = 2 * NUM_POSITIONS
NUM_TIMESTAMPS = NUM_POSITIONS + 1
VOCAB_SIZE = len(TEXTS) + len(SPECIALS) + NUM_TIMESTAMPS
Answer = Callable[[WindowRequest], WindowResult]


class TinyTokenizer:
    """A tokenizer with a few syllables, which reads the longest that fits."""

    eos_token_id = END_ID

    def encode(self, text: str) -> list[int]:
        known = {**{each: i for i, each in enumerate(TEXTS)}, **IDS}
        token_ids = []
        while text:
            piece = max((each for each in known if text.startswith(each)), key=len)
            token_ids.append(known[piece])
            text = text[len(piece) :]
        return token_ids

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(TEXTS[token_id] for token_id in token_ids)

    def get_bytes(self, token_id: int) -> bytes:
        return TEXTS[token_id].encode()

    def get_id(self, token: str) -> int | None:
        return IDS.get(token)


def make_model(seed: int, *, is_multilingual: bool = True) -> Any:
    torch.manual_seed(seed)
    config = tf.WhisperConfig(
        vocab_size=VOCAB_SIZE,
        num_mel_bins=NUM_MELS,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=32,
        max_source_positions=NUM_POSITIONS,
        max_target_positions=40,
        init_std=0.6,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        attn_implementation="eager",
    )
    model = tf.WhisperForConditionalGeneration(config).double().eval()
    rows = model.model.decoder.embed_tokens.weight.data
    # A random model would write nothing but timestamps, because there are so many of them.
    rows[-NUM_TIMESTAMPS:] *= 0.4
    rows[END_ID] *= 1.2
    settings: dict[str, Any] = {
        "begin_suppress_tokens": list(BANS.first_token_ids),
        "suppress_tokens": [token_id for (token_id,) in BANS.sequences],
        "no_timestamps_token_id": IDS["<|notimestamps|>"],
        "max_initial_timestamp_index": 10,
        "max_length": config.max_target_positions,
        "alignment_heads": [[0, 1], [1, 0]],
        "is_multilingual": is_multilingual,
        "prev_sot_token_id": IDS["<|startofprev|>"],
    }
    if is_multilingual:
        settings["lang_to_id"] = {each: IDS[each] for each in ("<|en|>", "<|de|>", "<|ja|>")}
        settings["task_to_id"] = {name: IDS[f"<|{name}|>"] for name in ("translate", "transcribe")}
    model.generation_config.update(**settings)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def read_tokens(model: Any, **changes: Any) -> WhisperTokens:
    generation_config = {**model.generation_config.to_dict(), **changes}
    return read_whisper_tokens(generation_config, model.config.to_dict(), TinyTokenizer(), BANS)


def make_features(num_frames: int, seed: int = 0) -> torch.Tensor:
    """Return the spectrogram of audio that changes slowly: [1, mels, frames]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, NUM_MELS, num_frames // 10 + 2, generator=generator).double()
    smooth = torch.nn.functional.interpolate(coarse, size=num_frames, mode="linear")
    return 2 * smooth + 0.3 * torch.randn(smooth.shape, generator=generator).double()


@dataclass(slots=True)
class ModelAnswer:
    """A model that answers windows of audio, and keeps what it was asked."""

    model: Any
    features: torch.Tensor
    requests: list[WindowRequest] = field(default_factory=list)
    results: list[WindowResult] = field(default_factory=list)

    def __call__(self, request: WindowRequest) -> WindowResult:
        self.requests.append(request)
        self.results.append(self._answer(request))
        return self.results[-1]

    @torch.no_grad()
    def _answer(self, request: WindowRequest) -> WindowResult:
        stop = request.first_frame + request.num_frames
        window = self.features[:, :, request.first_frame : stop]
        window = torch.nn.functional.pad(window, (0, NUM_WINDOW_FRAMES - window.shape[-1]))
        encoded = self.model.model.encoder(window)
        if request.needs_alignment:
            return self._align(request, encoded)
        token_ids = list(request.prompt_token_ids)
        num_prompt = len(token_ids)
        processors = self._make_processors(request)
        logprobs = []
        probability = past = None
        while len(token_ids) < num_prompt + request.max_tokens:
            inputs = torch.tensor([token_ids if past is None else token_ids[-1:]])
            outputs = self.model(
                encoder_outputs=encoded, decoder_input_ids=inputs, past_key_values=past
            )
            past = outputs.past_key_values
            if request.scored_token and probability is None:
                index, scored = request.scored_token
                probability = outputs.logits[0, index].softmax(-1)[scored].item()
            scores = processors(torch.tensor([token_ids]), outputs.logits[:, -1])[0]
            token_ids.append(int(scores.argmax()))
            logprobs.append(scores.log_softmax(-1).max().item())
            if token_ids[-1] == END_ID:
                break
        return WindowResult(
            token_ids=tuple(token_ids[num_prompt:]),
            logprobs=tuple(logprobs),
            scored_probability=probability,
        )

    def _align(self, request: WindowRequest, encoded: Any) -> WindowResult:
        outputs = self.model(
            encoder_outputs=encoded,
            decoder_input_ids=torch.tensor([request.prompt_token_ids]),
            output_attentions=True,
        )
        heads = self.model.generation_config.alignment_heads
        attention = [outputs.cross_attentions[layer][0, head] for layer, head in heads]
        return WindowResult(alignment=torch.stack(attention).float().numpy())

    def _make_processors(self, request: WindowRequest) -> LogitsProcessorList:
        begin = len(request.prompt_token_ids)
        processors = LogitsProcessorList()
        assert request.bans is not None
        suppressed = [token_id for sequence in request.bans.sequences for token_id in sequence]
        if request.bans.first_token_ids:
            processors.append(
                SuppressTokensAtBeginLogitsProcessor(request.bans.first_token_ids, begin)
            )
        if suppressed:
            processors.append(SuppressTokensLogitsProcessor(suppressed))
        if request.allowed is not None:
            others = sorted(set(range(VOCAB_SIZE)) - set(request.allowed))
            processors.append(SuppressTokensLogitsProcessor(others))
        if request.timestamps is not None:
            rules = tf.GenerationConfig(eos_token_id=request.timestamps.eos_token_id)
            rules.no_timestamps_token_id = request.timestamps.no_timestamps_id
            rules.max_initial_timestamp_index = request.timestamps.max_initial_index
            processors.append(WhisperTimeStampLogitsProcessor(rules, begin))
        return processors


def run_rules(rules: Transcription, answer: Answer) -> Transcript:
    """Run the rules to their end and return the transcript, which has all yielded segments."""
    segments = []
    result = None
    try:
        while True:
            step = rules.send(result)
            result = None
            if isinstance(step, Segment):
                segments.append(step)
            else:
                result = answer(step)
    except StopIteration as stop:
        transcript: Transcript = stop.value
        assert transcript.segments == tuple(segments)
        return transcript
