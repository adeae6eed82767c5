"""Prepares audio for CTC/transducer models, which have no decoder (see `models.ctc_transducer`).

Long audio is cut into pieces at quiet places. The features of each piece are computed separately,
because they are normalised over the piece. An item has the features of all pieces one after the
other, and a table of the pieces, by which a piece is cut out of the item later.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer, PretrainedConfig
from transformers.audio_utils import hertz_to_mel, mel_to_hertz
from transformers.utils.import_utils import is_librosa_available

from sensorium.checkpoints.files import read_json
from sensorium.models.ctc_transducer import CONTEXT, MASK, PIECE_S, count_frames
from sensorium.multimodal.processing.audio import NUM_SAMPLES, AudioProcessor, Samples
from sensorium.types.errors import RequestError
from sensorium.types.multimodal import ItemLayout, MultiModalKwargsItem
from sensorium.utils.silences import find_cuts

# A tensor of an item, with four numbers for each piece: its first sample and the one behind its
# last, and its first row in the features and the one behind its last.
PIECES = "pieces"
_PARAKEET = "transformers.models.parakeet.feature_extraction_parakeet"
_TRIAL_S = (2, 4)


class CtcTransducerParts:
    """The feature extractor and the tokenizer of a checkpoint, in place of its processor.

    The processor may need libraries for decoding with a language model, which are not used here.
    """

    chat_template = None

    def __init__(self, feature_extractor: Any, tokenizer: Any) -> None:
        self.feature_extractor = feature_extractor
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, directory: str, *, trust_remote_code: bool) -> CtcTransducerParts:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
        return cls(_load_extractor(directory), tokenizer)

    def to_json_string(self) -> str:
        return str(self.feature_extractor.to_json_string())


def _load_extractor(directory: str) -> Any:
    kind = load_parakeet_extractor() if _has_parakeet_features(directory) else AutoFeatureExtractor
    return kind.from_pretrained(directory)


def load_parakeet_extractor() -> Any:
    """Return the class of Parakeet's feature extractors, also if librosa is missing.

    The class uses librosa only for its mel filters, but Transformers refuses it without librosa.
    Our filters are the same, bit by bit.
    """
    module: Any = importlib.import_module(_PARAKEET)
    if not is_librosa_available():
        module.librosa = SimpleNamespace(filters=SimpleNamespace(mel=make_mel_filters))
    return module.ParakeetFeatureExtractor


def _has_parakeet_features(directory: str) -> bool:
    settings = dict(read_json(Path(directory) / "preprocessor_config.json"))
    settings |= read_json(Path(directory) / "processor_config.json").get("feature_extractor", {})
    return settings.get("feature_extractor_type") == "ParakeetFeatureExtractor"


def make_mel_filters(
    *, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str
) -> npt.NDArray[np.float32]:
    """Return the same filters as `librosa.filters.mel`: float32 [n_mels, n_fft // 2 + 1].

    They are triangles of area 1 on the mel scale, computed in librosa's order so that they are
    rounded in the same way. `norm` is always "slaney".
    """
    del norm
    lowest, highest = (float(hertz_to_mel(frequency, "slaney")) for frequency in (fmin, fmax))
    edges: Any = mel_to_hertz(np.linspace(lowest, highest, n_mels + 2), "slaney")
    ramps, widths = edges[:, None] - np.fft.rfftfreq(n_fft, 1 / sr), np.diff(edges)[:, None]
    rising, falling = -ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]
    filters: npt.NDArray[np.float32] = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    filters *= 2.0 / (edges[2:] - edges[:-2])[:, None]
    return filters


class CtcTransducerProcessor(AudioProcessor):
    """The audio processor of a CTC/transducer model, with the model's feature extractor."""

    def __init__(self, model_class: Any, config: PretrainedConfig, parts: Any) -> None:
        extractor = parts.feature_extractor
        self._model_class = model_class
        self._config = config
        self._extractor = extractor
        self.sampling_rate = int(extractor.sampling_rate)
        (self.input_name,) = extractor.model_input_names[:1]
        self.start_token_ids = (0,) * (CONTEXT - 1)
        short, long = (self._count_trial(seconds) for seconds in _TRIAL_S)
        seconds = _TRIAL_S[1] - _TRIAL_S[0]
        self.samples_per_frame = round(seconds * self.sampling_rate / (long - short))
        self.max_positions = self._count_trial(PIECE_S)

    def _count_trial(self, seconds: int) -> int:
        noise = np.random.default_rng(0).normal(size=seconds * self.sampling_rate)
        return self.count_positions(self._extract(noise.astype(np.float32)))

    def process(self, audio: Samples) -> tuple[MultiModalKwargsItem, ItemLayout]:
        """Return the features of the pieces, and a layout with the number of their frames."""
        parts, table, num_rows, num_frames = [], [], 0, 0
        for start, end in find_cuts(audio, self.sampling_rate, max_s=PIECE_S):
            part = self._extract(audio[start:end])
            if self._is_too_short(part):
                continue
            size = part[self.input_name].shape[1]
            parts.append(part)
            table.append((start, end, num_rows, num_rows + size))
            num_rows += size
            num_frames += self.count_positions(part)
        if not parts:
            raise RequestError("this audio is too short: the model takes nothing of it")
        tensors = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
        tensors |= {PIECES: torch.tensor(table), NUM_SAMPLES: torch.tensor([len(audio)])}
        return tensors, ItemLayout(text="", token_id=0, num_embeds=num_frames)

    def _extract(self, audio: Samples) -> MultiModalKwargsItem:
        """Return the features [1, rows, …] of one piece, and its mask [1, rows] if it has one."""
        found = self._extractor(audio, sampling_rate=self.sampling_rate, return_tensors="pt")
        tensors = {self.input_name: found[self.input_name]}
        if MASK in found:
            tensors[MASK] = found[MASK].bool()
        return tensors

    def _is_too_short(self, part: MultiModalKwargsItem) -> bool:
        """Return True if a piece is too short for one frame of the encoder, or to be normalised."""
        is_finite = bool(torch.isfinite(part[self.input_name]).all())
        return not is_finite or self.count_positions(part) < 1

    def count_positions(self, item: MultiModalKwargsItem) -> int:
        """Return how many frames of the encoder a piece has, without its padding."""
        num_rows = int(item[MASK].sum()) if MASK in item else item[self.input_name].shape[1]
        return count_frames(self._model_class, self._config, num_rows)

    def cut_window(
        self, item: MultiModalKwargsItem, first_frame: int, num_frames: int
    ) -> MultiModalKwargsItem:
        """Return an item for one piece, given by its rows in the features of the whole audio."""
        table = item[PIECES]
        start, end, first_row, end_row = table[table[:, 2] == first_frame][0].tolist()
        names = [name for name in (self.input_name, MASK) if name in item]
        tensors = {name: item[name][:, first_row:end_row].contiguous() for name in names}
        num_samples = end - start
        tensors[PIECES] = torch.tensor([[0, num_samples, 0, num_frames]])
        return {**tensors, NUM_SAMPLES: torch.tensor([num_samples])}
