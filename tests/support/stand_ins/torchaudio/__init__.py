"""The one class of torchaudio that Granite Speech needs, for machines without torchaudio.

It computes what the class of that name in torchaudio 2.11 computes. A process finds it if this
folder's parent is in `PYTHONPATH`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

__version__ = "2.11.0"


class _MelSpectrogram(torch.nn.Module):
    def __init__(
        self, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int
    ) -> None:
        from transformers.audio_utils import mel_filter_bank  # which imports this module

        super().__init__()
        self._sizes = (n_fft, hop_length, win_length)
        filters = mel_filter_bank(
            1 + n_fft // 2, n_mels, 0.0, sample_rate / 2, sample_rate, norm=None, mel_scale="htk"
        )
        self.register_buffer("window", torch.hann_window(win_length))
        self.register_buffer("filters", torch.from_numpy(filters).float())

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(
            audio, *self._sizes, window=self.window, pad_mode="reflect", return_complex=True
        )
        power = spectrum.abs().square().transpose(-1, -2)
        return (power @ self.filters).transpose(-1, -2)  # type: ignore[operator]


transforms = SimpleNamespace(MelSpectrogram=_MelSpectrogram)
