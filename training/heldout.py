"""Held-out cases as files, as a client would send them: PNG, WAV and MP4, questions and answers.

`python -m training.heldout build/training build/heldout`
"""

from __future__ import annotations

import argparse
import json
import wave
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from training.architecture import FRAMES_PER_SECOND, UNIT
from training.batches import PICTURE_GRIDS, VIDEO_GRIDS, VIDEO_SCALE, VIDEO_UNIT
from training.pictures.rendering import Renderer, pack_canvases
from training.samples import Canvas, Sample, Size
from training.sounds import RATE
from training.speech.heard import find_heard
from training.speech.speaker import Speaker
from training.speech.test_voices import Hibari, human_recordings
from training.tasks.mixture import EVALUATION

PICTURE_SCALE = 1.5  # larger than the model sees it, so that the processor has to resize
UNSEEN_VOICE = "speech_unseen_voice"
UNSEEN_VOICE_QUESTION = "spoken_question_unseen_voice"
UNSEEN_STYLE = "emoji_unseen_style"
TRANSCRIPTIONS = ("speech", UNSEEN_VOICE)


@dataclass(slots=True)
class Case:
    task: str
    question: str
    answer: str
    picture: str | None = None
    video: str | None = None
    sound: str | None = None


class Drawer:
    """Draws as in training, on the CPU, with other sizes; or with emoji of another style."""

    def __init__(self, folder: Path, *, emoji: str | None = None) -> None:
        path = None if emoji is None else folder / emoji
        self._renderer = Renderer(folder / "pictures.npz", "cpu", emoji_path=path)

    def draw(self, canvases: list[Canvas], size: Size, scale: float) -> np.ndarray:
        """Draw canvases as uint8 [n, height, width, 3]."""
        pixels = self._renderer.render(pack_canvases(canvases), size, scale=scale)
        pixels = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).numpy()


def choose_size(random: Random, *, is_video: bool) -> Size:
    grids = VIDEO_GRIDS if is_video else PICTURE_GRIDS
    unit = VIDEO_UNIT if is_video else UNIT
    rows, columns = random.choices(list(grids), list(grids.values()))[0]
    return rows * unit, columns * unit


def write_sound(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.astype("<i2").tobytes())


def write_video(path: Path, frames: np.ndarray, frames_per_second: float) -> None:
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("mpeg4", rate=round(frames_per_second))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 4_000_000
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


class Author:
    def __init__(self, folder: Path, out: Path, seed: int) -> None:
        self._folder, self._out = folder, out
        self._drawer = Drawer(folder)
        self._speaker = Speaker(folder)
        self._random = Random(seed)
        self._number = 0

    def write(
        self, task: str, sample: Sample, size: Size, speak: Callable[[str], np.ndarray] | None
    ) -> Case:
        """Write the files of a sample and return the case, which asks the first turn."""
        self._number += 1
        name = f"{self._number:06d}"
        turn = sample.turns[0]
        case = Case(task=task, question=turn.question, answer=turn.answer)
        if sample.picture is not None:
            pixels = self._drawer.draw([sample.picture], size, PICTURE_SCALE)[0]
            case.picture = f"{name}.png"
            Image.fromarray(pixels).save(self._out / case.picture)
        if sample.video is not None:
            frames = self._drawer.draw(sample.video, size, VIDEO_SCALE)
            case.video = f"{name}.mp4"
            write_video(self._out / case.video, frames, FRAMES_PER_SECOND)
        if sample.speech is not None:
            samples = (speak or self._say)(sample.speech)
            case.sound = f"{name}.wav"
            write_sound(self._out / case.sound, np.pad(samples, (1600, 3200)))
        return case

    def _say(self, text: str) -> np.ndarray:
        return self._speaker.speak(text, self._random, "test")

    def take_unseen_emoji(self) -> None:
        """Draw Twemoji from now on, a style that training never showed."""
        self._drawer = Drawer(self._folder, emoji="emoji_unseen.npz")

    def make_cases(
        self, task: str, make: Any, count: int, speak: Callable[[str], np.ndarray] | None = None
    ) -> Iterator[Case]:
        make_samples = self._make_unheard if task in TRANSCRIPTIONS else self._make_samples
        samples = make_samples(task, make, count)
        for sample, size in tqdm(samples, desc=task, mininterval=5.0):
            yield self.write(task, sample, size, speak)

    def _make_samples(self, task: str, make: Any, count: int) -> list[tuple[Sample, Size]]:
        is_video = task.startswith("video")
        sizes = [choose_size(self._random, is_video=is_video) for _ in range(count)]
        return [(make(self._random, size, "test"), size) for size in sizes]

    def _make_unheard(self, task: str, make: Any, count: int) -> list[tuple[Sample, Size]]:
        """Make sentences that most likely stood in no longer sentence of training."""
        kept: list[tuple[Sample, Size]] = []
        while len(kept) < count:
            samples = self._make_samples(task, make, 4 * count)
            said = {str(sample.speech) for sample, _ in samples}
            heard = find_heard(said)
            print(f"{task}: {len(heard)} of {len(said)} different sentences are left out")
            kept += [each for each in samples if each[0].speech not in heard]
        return kept[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what training.assets has prepared")
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=500, help="cases a task")
    parser.add_argument("--seed", type=int, default=2026)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    author = Author(arguments.folder, arguments.out, arguments.seed)
    cases = [
        case
        for task, make in EVALUATION.items()
        for case in author.make_cases(task, make, arguments.count)
    ]
    speak = Hibari().speak
    for task, own in (("speech", UNSEEN_VOICE), ("spoken_question", UNSEEN_VOICE_QUESTION)):
        cases += author.make_cases(own, EVALUATION[task], arguments.count, speak)
    for name, samples, transcript in human_recordings(arguments.folder / "recordings"):
        write_sound(arguments.out / f"{name}.wav", samples)
        question = "Write down what you hear."
        cases.append(Case(f"human: {name}", question, transcript, sound=f"{name}.wav"))
    author.take_unseen_emoji()
    cases += author.make_cases(UNSEEN_STYLE, EVALUATION["emoji"], arguments.count)
    lines = [json.dumps(asdict(case)) for case in cases]
    (arguments.out / "cases.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{len(cases)} cases in {arguments.out}")


if __name__ == "__main__":
    main()
