"""Real audio is checked with a model that has Whisper's encoder, and Whisper in Transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch

from real_models.speech import RATE
from sensorium.models import ensure_torchvision
from tiny_models.building import rescale

ensure_torchvision()

import transformers as tf  # noqa: E402  (after the shim)
from transformers.models.whisper.modeling_whisper import sinusoids  # noqa: E402

Samples = npt.NDArray[np.float32]
NUM_FRAMES = 3000  # of Whisper's spectrogram: 30 seconds
MAX_ERROR_RATE = 0.06  # of words; Whisper's own, on these recordings, is 4 of 95
_WORDS_OF = {
    "mr": "mister",
    **dict(zip("45780", ["four", "five", "seven", "eight", ""], strict=True)),
}


def make_hearing_model(tiny_omni: str, whisper: Path, directory: Path) -> None:
    """Make a stock Qwen2.5-Omni thinker with Whisper's encoder as its audio tower.

    The tower works in windows of 30 seconds and without a projection; the rest is small and random.
    """
    config = tf.AutoConfig.from_pretrained(tiny_omni)
    encoder = tf.WhisperModel.from_pretrained(whisper, dtype=torch.float32).encoder
    width = encoder.config.d_model
    for name in ("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"):
        setattr(config.audio_config, name, getattr(encoder.config, name))
    config.audio_config.n_window = NUM_FRAMES // 2
    config.audio_config.output_dim = width
    config.vision_config.out_hidden_size = width
    config.text_config.hidden_size = width
    config.text_config.num_attention_heads *= width // 64
    model = rescale(tf.Qwen2_5OmniThinkerForConditionalGeneration(config))
    _take_weights(model.base_model.audio_tower, encoder)
    model.generation_config.do_sample = False
    model.save_pretrained(directory)
    tf.AutoProcessor.from_pretrained(tiny_omni).save_pretrained(directory)


@torch.no_grad()
def _take_weights(tower: Any, encoder: Any) -> None:
    state = {
        name.replace("layer_norm.", "ln_post.") if name.startswith("layer_norm.") else name: tensor
        for name, tensor in encoder.state_dict().items()
        if name != "embed_positions.weight"  # sines, which the tower makes itself
    }
    missing, unexpected = tower.load_state_dict(state, strict=False)
    if unexpected or set(missing) != {"audio_bos_eos_token.weight", "proj.weight", "proj.bias"}:
        raise ValueError(f"the tower lacks {missing} and does not know {unexpected}")
    tower.proj.weight.copy_(torch.eye(len(tower.proj.weight)))
    tower.proj.bias.zero_()


class Whisper:
    """Transformers' own, in float32."""

    def __init__(self, directory: Path) -> None:
        model: Any = tf.WhisperForConditionalGeneration.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.eval()
        positions = model.model.encoder.embed_positions.weight.data
        # OpenAI's file has the sines in 16 bits, towers compute them.
        positions.copy_(sinusoids(*positions.shape))
        self.extractor = tf.WhisperFeatureExtractor.from_pretrained(directory)
        self.tokenizer = tf.WhisperTokenizer.from_pretrained(directory)

    @torch.inference_mode()
    def transcribe(self, features: torch.Tensor) -> str:
        """The words of a spectrogram [80, 3000]."""
        tokens = self.model.generate(features[None], num_beams=1)
        return normalize(self.tokenizer.decode(tokens[0], skip_special_tokens=True))

    def get_features(self, samples: Samples) -> torch.Tensor:
        """Return the spectrogram of audio at 16 kHz."""
        found = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")
        features: torch.Tensor = found.input_features[0]
        return features

    @torch.inference_mode()
    def run_layers(self, features: torch.Tensor) -> torch.Tensor:
        """Run Whisper's encoder, but for its last layer norm, on [80, frames].

        The whole encoder refuses less than 30 seconds; its layers take any number of frames.
        """
        encoder = self.model.model.encoder
        hidden = torch.nn.functional.gelu(encoder.conv1(features[None]))
        hidden = torch.nn.functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        for layer in encoder.layers:
            output = layer(hidden, None)
            hidden = output[0] if isinstance(output, tuple) else output
        return hidden[0]

    @torch.inference_mode()
    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """The means of every two positions, then the layer norm, as in Qwen's towers."""
        means = self.run_layers(features).unfold(0, 2, 2).mean(-1)
        result: torch.Tensor = self.model.model.encoder.layer_norm(means)
        return result


def read_samples(path: Path) -> Samples:
    """Read a recording at 16 kHz, by another library than the engine's."""
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE
    return np.asarray(samples)


def normalize(text: str) -> str:
    """Lower-case words only, numbers spelled out."""
    words = re.findall(r"[a-z']+|\d", text.lower().replace("10", "ten").replace("-", " "))
    return " ".join(_WORDS_OF.get(word, word) for word in words)


def count_errors(found: str, expected: str) -> int:
    """Words to change, to add or to leave out."""
    row = list(range(len(expected.split()) + 1))
    for i, word in enumerate(found.split(), 1):
        last, row = row, [i]
        for j, other in enumerate(expected.split(), 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (word != other)))
    return row[-1]


def get_error_rate(found: list[str], expected: list[str]) -> float:
    """Return the errors in all texts as a share of the expected words."""
    errors = [count_errors(*pair) for pair in zip(found, expected, strict=True)]
    return sum(errors) / sum(len(words.split()) for words in expected)
