"""Steps of training, made by worker processes: everything but the pixels and the spectra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.architecture import UNIT
from training.conversations import Layout, Writer, pad
from training.pictures.rendering import pack_canvases
from training.samples import Sample, Size, Split
from training.sounds import SAMPLES_PER_TOKEN
from training.speech.speaker import Speaker
from training.tasks.mixture import MIXTURE

Maker = Callable[[Random, Size, Split], Sample]
Batch = dict[str, Any]

# Rows and columns of tokens, as the processor makes them of pictures of common proportions.
PICTURE_GRIDS = {
    (8, 8): 8,
    (7, 8): 2,
    (8, 7): 2,
    (6, 9): 4,
    (9, 6): 3,
    (6, 10): 2,
    (10, 6): 1,
    (7, 9): 2,
    (9, 7): 1,
    (7, 7): 1,
    (5, 12): 1,
    (4, 14): 1,
}
VIDEO_GRIDS = {(12, 12): 4, (11, 11): 2, (10, 14): 2, (14, 10): 1, (8, 15): 2}
VIDEO_UNIT = 8  # videos are drawn small and rendered larger
VIDEO_SCALE = UNIT / VIDEO_UNIT
MAX_SOUND_SAMPLES = 10 * 16_000


@dataclass(frozen=True)
class Plan:
    """Samples of each group in a step."""

    picture: int = 384
    speech: int = 96
    spoken_picture: int = 48
    video: int = 16
    text: int = 96
    fresh_speech: int = 40  # the others were spoken before, in other noise
    mixture: dict[str, list[tuple[Maker, float]]] = field(default_factory=lambda: dict(MIXTURE))


class BatchMaker:
    """Makes batches of one group each; the same seed makes the same ones."""

    def __init__(self, folder: Path, split: Split, seed: int) -> None:
        self._writer = Writer(folder / "tokenizer")
        self._speaker = Speaker(folder)
        self._split: Split = split
        self._random = Random(seed)
        self._spoken: list[tuple[Sample, np.ndarray]] = []

    def make_pictures(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        rows, columns = self._choose(PICTURE_GRIDS)
        size = (rows * UNIT, columns * UNIT)
        samples = self._draw(makers, count, size)
        batch = self._write(samples, Layout(picture=(1, rows, columns)))
        batch["canvases"] = pack_canvases([_picture(sample) for sample in samples])
        batch["size"] = size
        return batch

    def make_videos(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        rows, columns = self._choose(VIDEO_GRIDS)
        size = (rows * VIDEO_UNIT, columns * VIDEO_UNIT)
        samples = self._draw(makers, count, size)
        frames = [sample.video or [] for sample in samples]
        steps = len(frames[0]) // 2
        batch = self._write(samples, Layout(video=(steps, rows, columns)))
        batch["canvases"] = pack_canvases([canvas for video in frames for canvas in video])
        batch["size"] = size
        batch["num_frames"] = len(frames[0])
        return batch

    def make_texts(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        return self._write(self._draw(makers, count, (0, 0)), Layout())

    def make_speech(
        self, makers: list[tuple[Maker, float]], count: int, num_fresh: int | None = None
    ) -> Batch:
        """Sounds of about one length, some of which were used before."""
        for sample in self._draw(makers, count if num_fresh is None else num_fresh, (0, 0)):
            self._spoken.append((sample, self._say(sample)))
        while len(self._spoken) < count:
            (sample,) = self._draw(makers, 1, (0, 0))
            self._spoken.append((sample, self._say(sample)))
        self._spoken = self._spoken[-max(count, 1024) :]
        by_length = sorted(self._spoken, key=lambda spoken: len(spoken[1]))
        start = self._random.randint(0, len(by_length) - count)
        chosen = by_length[start : start + count]
        return self._write_sounds([sample for sample, _ in chosen], [wave for _, wave in chosen])

    def make_spoken_pictures(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        rows, columns = self._choose(PICTURE_GRIDS)
        size = (rows * UNIT, columns * UNIT)
        samples = self._draw(makers, count, size)
        batch = self._write_sounds(samples, list(map(self._say, samples)), (1, rows, columns))
        batch["canvases"] = pack_canvases([_picture(sample) for sample in samples])
        batch["size"] = size
        return batch

    def _say(self, sample: Sample) -> np.ndarray:
        return self._speaker.speak(sample.speech or "", self._random, self._split)

    def _draw(self, makers: list[tuple[Maker, float]], count: int, size: Size) -> list[Sample]:
        chosen = self._random.choices(
            [maker for maker, _ in makers], [weight for _, weight in makers], k=count
        )
        return [maker(self._random, size, self._split) for maker in chosen]

    def _choose(self, grids: dict[tuple[int, int], int]) -> tuple[int, int]:
        return self._random.choices(list(grids), list(grids.values()))[0]

    def _write_sounds(
        self,
        samples: list[Sample],
        waves: list[np.ndarray],
        picture: tuple[int, int, int] | None = None,
    ) -> Batch:
        """Each sound begins somewhere within the length that all have."""
        waves = [wave[:MAX_SOUND_SAMPLES] for wave in waves]
        room = self._random.randint(1_000, 12_000)
        num_tokens = -(-(max(map(len, waves)) + room) // SAMPLES_PER_TOKEN)
        sounds = np.zeros((len(waves), num_tokens * SAMPLES_PER_TOKEN), np.int16)
        for row, wave in enumerate(waves):
            start = self._random.randint(0, min(sounds.shape[1] - len(wave), 16_000))
            sounds[row, start : start + len(wave)] = wave
        batch = self._write(samples, Layout(picture=picture, num_sounds=num_tokens))
        batch["sounds"] = torch.from_numpy(sounds)
        return batch

    def _write(self, samples: list[Sample], layout: Layout) -> Batch:
        encoded = [self._writer.write(sample, layout, self._random) for sample in samples]
        arrays = pad(encoded, self._writer)
        batch: Batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch["tasks"] = [sample.task for sample in samples]
        return batch


def _picture(sample: Sample) -> Any:
    assert sample.picture is not None  # noqa: S101
    return sample.picture


class Steps(IterableDataset[dict[str, Batch]]):
    def __init__(self, folder: Path, plan: Plan, seed: int) -> None:
        self._folder, self._plan, self._seed = folder, plan, seed

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        torch.set_num_threads(1)
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        maker = BatchMaker(self._folder, "train", self._seed * 1000 + number)
        plan, mixture = self._plan, self._plan.mixture
        while True:
            yield {
                "picture": maker.make_pictures(mixture["picture"], plan.picture),
                "speech": maker.make_speech(mixture["speech"], plan.speech, plan.fresh_speech),
                "spoken_picture": maker.make_spoken_pictures(
                    mixture["spoken_picture"], plan.spoken_picture
                ),
                "video": maker.make_videos(mixture["video"], plan.video),
                "text": maker.make_texts(mixture["text"], plan.text),
            }


def load_steps(folder: Path, plan: Plan, *, seed: int, num_workers: int) -> Iterator[Any]:
    loader = DataLoader(
        Steps(folder, plan, seed),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
    )
    return iter(loader)
