"""Steps of training, made by worker processes: everything but the pixels and the spectra."""

from __future__ import annotations

import faulthandler
import itertools
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
from training.landmarks import count_so_far, find_landmarks
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
MAX_SOUND_SAMPLES = 12 * 16_000


@dataclass(frozen=True)
class Plan:
    """How many samples of each group a step has."""

    picture: int = 256
    text: int = 48
    speech: int = 64
    spoken_picture: int = 32
    video: int = 32  # in every fourth step only
    fresh_speech: int = 20  # the others were spoken before, in other noise
    first_steps: int = 800  # in which simple pictures give way to all others
    mixture: dict[str, list[tuple[Maker, float]]] = field(default_factory=lambda: dict(MIXTURE))


GROUPS = ("picture", "text", "speech", "spoken_picture", "video")
STEPS_PER_VIDEO = 4


class BatchMaker:
    """A maker of batches that makes the same ones from the same seed."""

    def __init__(self, folder: Path, split: Split, seed: int) -> None:
        self._writer = Writer(folder / "tokenizer")
        self._speaker = Speaker(folder)
        self._split: Split = split
        self._random = Random(seed)
        self._spoken: list[tuple[Sample, np.ndarray]] = []

    def make_step(self, plan: Plan, number: int, *, with_videos: bool) -> dict[str, Batch]:
        """Return the batches of one step: pictures and text, audio, and at times videos.

        Each batch goes through the model at once. All pictures of a step have one size, and stand
        in the first batch.
        """
        grid = self._choose(PICTURE_GRIDS)
        mixture = plan.mixture
        num_simple = round(plan.picture * max(0.0, 1 - number / max(1, plan.first_steps)))
        seen, pictures = self._make_seen(mixture, plan, grid, num_simple)
        heard, others = self._make_heard(mixture, plan, grid)
        canvases = pack_canvases([_picture(sample) for sample in pictures + others])
        seen["canvases"] = canvases
        seen["landmarks"] = torch.from_numpy(find_landmarks(canvases, grid))
        counts = count_so_far(canvases.sprites[: len(pictures)], grid)
        seen["counts"] = torch.from_numpy(counts)
        seen["size"] = (grid[0] * UNIT, grid[1] * UNIT)
        seen["num_pictures"], heard["num_pictures"] = len(pictures), len(others)
        step = {"seen": seen, "heard": heard}
        if with_videos:
            step["video"] = self.make_videos(mixture["video"], plan.video)
        return step

    def _make_seen(
        self, mixture: Any, plan: Plan, grid: tuple[int, int], num_simple: int
    ) -> tuple[Batch, list[Sample]]:
        size = (grid[0] * UNIT, grid[1] * UNIT)
        pictures = self._draw(mixture["first_picture"], num_simple, size)
        pictures += self._draw(mixture["picture"], plan.picture - num_simple, size)
        texts = self._draw(mixture["text"], plan.text, (0, 0))
        layouts = [Layout(picture=(1, *grid))] * len(pictures) + [Layout()] * len(texts)
        batch = self._write(pictures + texts, layouts)
        groups = ["picture"] * len(pictures) + ["text"] * len(texts)
        batch["groups"] = _number_groups(batch, groups)
        return batch, pictures

    def _make_heard(
        self, mixture: Any, plan: Plan, grid: tuple[int, int]
    ) -> tuple[Batch, list[Sample]]:
        size = (grid[0] * UNIT, grid[1] * UNIT)
        spoken = self._choose_spoken(mixture["speech"], plan.speech, plan.fresh_speech)
        asked = self._draw(mixture["spoken_picture"], plan.spoken_picture, size)
        waves = [wave for _, wave in spoken] + [self._say(sample) for sample in asked]
        sounds = self._place(waves)
        num_sounds = sounds.shape[1] // SAMPLES_PER_TOKEN
        layouts = [Layout(num_sounds=num_sounds)] * len(spoken)
        layouts += [Layout(picture=(1, *grid), num_sounds=num_sounds)] * len(asked)
        batch = self._write([sample for sample, _ in spoken] + asked, layouts)
        groups = ["speech"] * len(spoken) + ["spoken_picture"] * len(asked)
        batch["groups"] = _number_groups(batch, groups)
        batch["sounds"] = torch.from_numpy(sounds)
        return batch, asked

    def make_pictures(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        rows, columns = self._choose(PICTURE_GRIDS)
        size = (rows * UNIT, columns * UNIT)
        samples = self._draw(makers, count, size)
        batch = self._write(samples, [Layout(picture=(1, rows, columns))] * count)
        batch["canvases"] = pack_canvases([_picture(sample) for sample in samples])
        batch["size"] = size
        return batch

    def make_videos(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        rows, columns = self._choose(VIDEO_GRIDS)
        size = (rows * VIDEO_UNIT, columns * VIDEO_UNIT)
        samples = self._draw(makers, count, size)
        frames = [sample.video or [] for sample in samples]
        steps = len(frames[0]) // 2
        batch = self._write(samples, [Layout(video=(steps, rows, columns))] * count)
        batch["canvases"] = pack_canvases([canvas for video in frames for canvas in video])
        batch["size"] = size
        batch["num_frames"] = len(frames[0])
        batch["groups"] = _number_groups(batch, ["video"] * count)
        return batch

    def make_texts(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        return self._write(self._draw(makers, count, (0, 0)), [Layout()] * count)

    def make_speech(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        spoken = self._choose_spoken(makers, count, count)
        return self._write_sounds([sample for sample, _ in spoken], [wave for _, wave in spoken])

    def make_spoken_pictures(self, makers: list[tuple[Maker, float]], count: int) -> Batch:
        rows, columns = self._choose(PICTURE_GRIDS)
        size = (rows * UNIT, columns * UNIT)
        samples = self._draw(makers, count, size)
        batch = self._write_sounds(samples, list(map(self._say, samples)), (1, rows, columns))
        batch["canvases"] = pack_canvases([_picture(sample) for sample in samples])
        batch["size"] = size
        return batch

    def _choose_spoken(
        self, makers: list[tuple[Maker, float]], count: int, num_fresh: int
    ) -> list[tuple[Sample, np.ndarray]]:
        """Choose clips of about one length; some of them were used before."""
        wanted = len(self._spoken) + max(num_fresh, count - len(self._spoken))
        while len(self._spoken) < wanted:
            for sample in self._draw(makers, wanted - len(self._spoken), (0, 0)):
                wave = self._say(sample)
                if len(wave) <= MAX_SOUND_SAMPLES:  # a slow voice with much to say is left out
                    self._spoken.append((sample, wave))
        self._spoken = self._spoken[-max(count, 1024) :]
        by_length = sorted(self._spoken, key=lambda spoken: len(spoken[1]))
        start = self._random.randint(0, len(by_length) - count)
        return by_length[start : start + count]

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
        sounds = self._place(waves)
        layout = Layout(picture=picture, num_sounds=sounds.shape[1] // SAMPLES_PER_TOKEN)
        batch = self._write(samples, [layout] * len(samples))
        batch["sounds"] = torch.from_numpy(sounds)
        return batch

    def _place(self, waves: list[np.ndarray]) -> np.ndarray:
        """Let each clip begin somewhere within the length that all have."""
        room = self._random.randint(1_000, 12_000)
        num_tokens = -(-(max(map(len, waves)) + room) // SAMPLES_PER_TOKEN)
        sounds = np.zeros((len(waves), num_tokens * SAMPLES_PER_TOKEN), np.int16)
        for row, wave in enumerate(waves):
            start = self._random.randint(0, min(sounds.shape[1] - len(wave), 16_000))
            sounds[row, start : start + len(wave)] = wave
        return sounds

    def _write(self, samples: list[Sample], layouts: list[Layout]) -> Batch:
        encoded = [
            self._writer.write(sample, layout, self._random)
            for sample, layout in zip(samples, layouts, strict=True)
        ]
        arrays = pad(encoded, self._writer)
        batch: Batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch["tasks"] = [sample.task for sample in samples]
        return batch


def _number_groups(batch: Batch, groups: list[str]) -> torch.Tensor:
    """Return the group of each token of an answer."""
    numbers = torch.tensor([GROUPS.index(group) for group in groups])
    return numbers[batch["rows"]][batch["turns"]]


def _picture(sample: Sample) -> Any:
    assert sample.picture is not None  # noqa: S101
    return sample.picture


class Steps(IterableDataset[dict[str, Batch]]):
    def __init__(self, folder: Path, plan: Plan, seed: int, start: int) -> None:
        self._folder, self._plan, self._seed, self._start = folder, plan, seed, start

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        torch.set_num_threads(1)
        faulthandler.enable()  # the synthesizers are C
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        maker = BatchMaker(self._folder, "train", self._seed * 1000 + first)
        for number in itertools.count():  # of this worker's steps; all take turns
            with_videos = (first + number) % STEPS_PER_VIDEO == 0
            at = self._start + first + number * stride
            step = maker.make_step(self._plan, at, with_videos=with_videos)
            yield {name: _as_arrays(batch) for name, batch in step.items()}


def _as_arrays(batch: Batch) -> Batch:
    """Turn all but the audio into arrays, which go through a pipe; audio is too large for it."""
    return {
        name: value.numpy() if torch.is_tensor(value) and name != "sounds" else value
        for name, value in batch.items()
    }


def load_steps(
    folder: Path, plan: Plan, *, seed: int, num_workers: int, start: int = 0
) -> Iterator[Any]:
    """Yield the steps from number `start` on."""
    loader = DataLoader(
        Steps(folder, plan, seed, start),
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
    )
    return iter(loader)
