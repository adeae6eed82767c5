"""Audio on the device: what a room and a microphone do to it, and Whisper's features."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from training.architecture import MEL_BINS

RATE = 16_000
HOP = 160
WINDOW = 400
SAMPLES_PER_TOKEN = 4 * HOP


class Features:
    """Log-mel spectra as Transformers' WhisperFeatureExtractor makes them."""

    def __init__(self, device: torch.device | str) -> None:
        import transformers as tf

        filters = tf.WhisperFeatureExtractor(feature_size=MEL_BINS).mel_filters
        self._filters = torch.tensor(filters, dtype=torch.float32, device=device).T
        self._window = torch.hann_window(WINDOW, device=device)

    def compute(self, waves: Tensor) -> Tensor:
        """Turn samples [B, 640 n] from -1 to 1 into spectra [B, 80, 4 n]."""
        padded = F.pad(waves, (0, WINDOW))  # the processor fills up with silence as well
        spectra = torch.stft(
            padded, WINDOW, HOP, window=self._window, pad_mode="reflect", return_complex=True
        )
        power = spectra[..., : waves.shape[1] // HOP].abs() ** 2
        logs = (self._filters @ power).clamp(min=1e-10).log10()
        loudest = logs.amax(dim=(1, 2), keepdim=True)
        return (torch.maximum(logs, loudest - 8.0) + 4.0) / 4.0


def disturb(waves: Tensor, generator: torch.Generator) -> Tensor:
    """Change loudness, and add noise of some colour and an echo."""
    batch, length = waves.shape

    def draw(low: float, high: float) -> Tensor:
        numbers = torch.rand(batch, 1, generator=generator, device=waves.device)
        return low + (high - low) * numbers

    delay = int(RATE * (0.01 + 0.05 * torch.rand(1).item()))
    echo = F.pad(waves, (delay, 0))[:, :length]
    waves = waves + echo * draw(-0.6, 0.4).clamp(min=0.0)
    noise = torch.randn(batch, length, generator=generator, device=waves.device)
    low = F.avg_pool1d(noise[:, None], 9, stride=1, padding=4)[:, 0] * 3.0
    noise = torch.where(draw(0.0, 1.0) < 0.5, noise, low)
    level = waves.square().mean(1, keepdim=True).sqrt() * 10 ** (-draw(8.0, 60.0) / 20)
    waves = waves + noise * level
    peak = waves.abs().amax(1, keepdim=True).clamp(min=1e-4)
    return waves / peak * 10 ** (-draw(0.0, 26.0) / 20)


def tilt(features: Tensor, generator: torch.Generator) -> Tensor:
    """Imitate other microphones by a smooth curve over the frequencies, or a missing band."""
    batch, bins, _ = features.shape
    curve = torch.randn(batch, 1, 6, generator=generator, device=features.device) * 0.08
    curve = F.interpolate(curve, bins, mode="linear", align_corners=True).transpose(1, 2)
    floor = features.amin(dim=(1, 2), keepdim=True)
    features = torch.maximum(features + curve, floor)
    start = torch.rand(batch, 1, 1, generator=generator, device=features.device) * bins * 2
    width = torch.rand(batch, 1, 1, generator=generator, device=features.device) * 12
    band = torch.arange(bins, device=features.device)[None, :, None]
    return torch.where((band >= start) & (band < start + width), floor, features)
