"""Trains sensorium-mini for a number of seconds: `python -m training.train build/training OUT`.

A second run with `--init OUT` begins with the first one's weights and a new optimizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from training.ahead import Ahead
from training.architecture import PATCH, UNIT, make_config
from training.batches import GROUPS, VIDEO_SCALE, Batch, BatchMaker, Plan, load_steps
from training.guides import Guides
from training.model import Blocks, Thinker
from training.optimizer import make_optimizers
from training.pictures.rendering import (
    Renderer,
    augment,
    normalize_and_patch,
    normalize_and_patch_video,
)
from training.sounds import Features, disturb, tilt
from training.tasks.mixture import EVALUATION
from training.tokenizer import load_tokenizer
from training.weights import initialize, load_whisper, restore, save_shards

# What an answer of each group counts for in a step.
WEIGHTS = {"picture": 1.0, "text": 0.25, "speech": 0.6, "spoken_picture": 0.6, "video": 0.4}
GUIDES = ("landmarks", "places", "mentions", "counts")
GUIDE_WEIGHTS = (0.5, 0.2, 0.3, 0.3)


class MediaPipeline:
    """Draws and listens on the device."""

    def __init__(self, folder: Path, device: str, seed: int) -> None:
        self._device = device
        self._renderer = Renderer(folder / "pictures.npz", device)
        self._features = Features(device)
        self._generator = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def perceive(self, batch: Batch, *, is_clean: bool = False) -> dict[str, Tensor]:
        """Return patches and spectra, disturbed unless they must be clean."""
        perceived = {}
        if "sounds" in batch:
            waves = batch["sounds"].to(self._device, non_blocking=True).float() / 32768.0
            waves = waves if is_clean else disturb(waves, self._generator)
            features = self._features.compute(waves)
            perceived["sounds"] = features if is_clean else tilt(features, self._generator)
        if "canvases" in batch:
            num_frames = batch.get("num_frames", 0)
            scale = VIDEO_SCALE if num_frames else 1.0
            pixels = self._renderer.render(batch["canvases"], batch["size"], scale=scale)
            pixels = pixels if is_clean else augment(pixels, self._generator)
            pixels = (pixels.clamp(0, 1) * 255).round() / 255
            if num_frames:
                videos = pixels.view(-1, num_frames, *pixels.shape[1:])
                perceived["videos"] = normalize_and_patch_video(videos)
            else:
                perceived["pictures"] = normalize_and_patch(pixels)
        return perceived

    def draw_sheet(self, batch: Batch, path: Path) -> None:
        """A few pictures of a batch side by side, to be looked at."""
        pixels = self._renderer.render(batch["canvases"], batch["size"])[:8]
        row = torch.cat(list(pixels), 2).permute(1, 2, 0)
        Image.fromarray((row * 255).byte().cpu().numpy()).save(path)


def see(model: Thinker, batch: Batch, perceived: dict[str, Tensor]) -> Tensor | None:
    """Features [n, tokens, LM] of a batch's pictures, or of the steps of its videos."""
    features: Tensor | None = None
    if "pictures" in perceived:
        height, width = (side // PATCH for side in batch["size"])
        features = model.model.visual(perceived["pictures"], height, width)
    if "videos" in perceived:
        height, width = (round(side * VIDEO_SCALE) // PATCH for side in batch["size"])
        patches = perceived["videos"]  # [B, steps * N, 1176]
        steps = patches.reshape(-1, height * width, patches.shape[-1])
        features = model.model.visual(steps, height, width)
    return features


def predict(
    model: Thinker, batch: Batch, perceived: dict[str, Tensor], seen: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Logits before each token of an answer, and hidden states on the way [B * T, LM]."""
    device = model.model.language_model.embed_tokens.weight.device
    names = ("tokens", "positions", "answer_at", "picture_at", "video_at", "sound_at")
    moved = {name: batch[name].to(device, non_blocking=True) for name in names}
    media = []
    if seen is not None:
        media.append((moved["video_at" if "videos" in perceived else "picture_at"], seen))
    if "sounds" in perceived:
        media.append((moved["sound_at"], model.model.audio_tower(perceived["sounds"])))
    hidden, on_the_way = model(moved["tokens"], moved["positions"], media)
    return model.logits(hidden[moved["answer_at"]]).float(), on_the_way


@torch.no_grad()
def measure(
    model: Thinker, pipeline: MediaPipeline, batches: list[Batch], autocast: Any
) -> dict[str, float]:
    """Return the share of right answers for each task; greedy decoding gives the same."""
    right: dict[str, list[bool]] = defaultdict(list)
    for batch in batches:
        perceived = pipeline.perceive(batch, is_clean=True)
        with autocast():
            logits, _ = predict(model, batch, perceived, see(model, batch, perceived))
        is_right = (logits.argmax(-1).cpu() == batch["labels"]).long()
        all_right = torch.ones(len(batch["rows"]), dtype=torch.long)
        all_right.scatter_reduce_(0, batch["turns"], is_right, "amin")
        for row, answer in zip(batch["rows"].tolist(), all_right.tolist(), strict=True):
            right[batch["tasks"][row]].append(bool(answer))
    return {task: sum(answers) / len(answers) for task, answers in sorted(right.items())}


def make_test_batches(folder: Path, *, seed: int, count: int, rounds: int) -> list[Batch]:
    maker = BatchMaker(folder, "test", seed)
    batches = []
    for _ in range(rounds):
        for makers in ([(make, 1.0)] for make in EVALUATION.values()):
            sample = makers[0][0](maker._random, (224, 224), "test")
            if sample.video is not None:
                batches.append(maker.make_videos(makers, count // 4))
            elif sample.speech is not None and sample.picture is not None:
                batches.append(maker.make_spoken_pictures(makers, count))
            elif sample.speech is not None:
                batches.append(maker.make_speech(makers, count))
                maker._spoken.clear()
            elif sample.picture is not None:
                batches.append(maker.make_pictures(makers, count))
            else:
                batches.append(maker.make_texts(makers, count))
    return batches


def schedule(progress: float) -> float:
    """Return the rate: up in three hundredths of the time, level, then down to zero."""
    return min(1.0, progress / 0.03) * min(1.0, max(0.0, (1 - progress) / 0.6))


def train(arguments: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    sys.setswitchinterval(5e-4)  # the thread that works ahead must not keep the loop waiting
    device = arguments.device
    folder, out = arguments.folder, arguments.out
    tokenizer = load_tokenizer(folder / "tokenizer")
    model = Thinker(make_config(tokenizer))
    initialize(model, arguments.seed, tokenizer.convert_tokens_to_ids("<|vision_bos|>"))
    load_whisper(model, folder)
    guides = Guides(model.model.language_model.embed_tokens.embedding_dim)
    if arguments.init is not None:
        restore(model, arguments.init)
        guides.restore(arguments.init)
    model.to(device)
    guides.to(device)
    if arguments.compile:
        Blocks.compile()
    optimizers = make_optimizers(model, guides, lr=arguments.lr)
    pipeline = MediaPipeline(folder, device, arguments.seed)
    first = {} if arguments.init is None else {"first_steps": 0}
    plan = Plan(**first | json.loads(arguments.plan))

    def start_steps(number: int) -> Ahead:
        seed = arguments.seed + number  # what made a worker die is not made again
        steps = load_steps(folder, plan, seed=seed, num_workers=arguments.workers, start=number)
        return Ahead(steps, pipeline.perceive, device)

    steps = start_steps(0)
    tests = make_test_batches(folder, seed=7, count=arguments.test_count, rounds=1)
    out.mkdir(parents=True, exist_ok=True)
    pipeline.draw_sheet(tests[0], out / "pictures.png")
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters", flush=True)
    loop = _Loop(model, guides, optimizers, pipeline, arguments)
    loop.run(steps, start_steps, tests, out)


class _Loop:
    def __init__(
        self,
        model: Thinker,
        guides: Guides,
        optimizers: list[Any],
        pipeline: MediaPipeline,
        arguments: Any,
    ) -> None:
        self._model, self._guides = model, guides
        self._optimizers, self._pipeline = optimizers, pipeline
        self._arguments = arguments
        weights = [WEIGHTS[group] for group in GROUPS]
        self._weights = torch.tensor(weights, device=arguments.device)
        self._number, self._phase, self._phase_started = 0, "", 0.0
        self._phases: dict[str, float] = defaultdict(float)
        self._means = torch.full_like(self._weights, 8.0)
        self._guided = torch.zeros(len(GUIDES), device=arguments.device)
        self._guide_weights = torch.tensor(GUIDE_WEIGHTS, device=arguments.device)

    def run(
        self, steps: Ahead, restart: Callable[[int], Ahead], tests: list[Batch], out: Path
    ) -> None:
        arguments = self._arguments
        started = time.monotonic()
        next_report, next_test = arguments.report_every, arguments.test_every
        number, waited = 0, 0.0
        while (elapsed := time.monotonic() - started) < arguments.seconds:
            asked = time.monotonic()
            self._number = number
            try:
                batches, perceived = next(steps)
                waited += time.monotonic() - asked
                self._learn(batches, perceived, schedule(elapsed / arguments.seconds))
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                print(f"{error}; others take its place", flush=True)  # a synthesizer died
                steps = restart(number + 1)
                continue
            number += 1
            if number == 1:
                print(f"the first step waited {waited:.1f} s", flush=True)
            if number == 32:
                phases = " ".join(f"{n} {s / 12 * 1e3:.0f}" for n, s in self._phases.items())
                print(f"milliseconds a step: {phases}", flush=True)
            if elapsed >= next_report:
                self._report(number, elapsed, waited)
                next_report += arguments.report_every
            if elapsed >= next_test:
                self._test(tests, elapsed)
                self._save(out)
                next_test += arguments.test_every
        self._report(number, time.monotonic() - started, waited)
        self._save(out)
        self._test(tests, time.monotonic() - started)

    def _learn(
        self, batches: list[Batch], perceived: list[dict[str, Tensor]], factor: float
    ) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._arguments.lr * factor
        total: Any = 0.0
        self._mark("forward")
        with self._autocast():  # one for all, so that weights are converted once
            seen = [see(self._model, *each) for each in zip(batches, perceived, strict=True)]
            all_seen = seen[0]
            if all_seen is not None:  # the first batch has the second one's pictures as well
                counts = [batch["num_pictures"] for batch in batches[:2]]
                seen[:2] = torch.split(all_seen, counts)
            for batch, media, features in zip(batches, perceived, seen, strict=True):
                logits, on_the_way = predict(self._model, batch, media, features)
                total = total + self._weigh(logits, batch)
                if batch is batches[0] and all_seen is not None:
                    total = total + self._guide(all_seen, on_the_way, batch)
        self._mark("backward")
        total.backward()
        self._mark("optimize")
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._mark("wait")

    def _mark(self, phase: str) -> None:
        """Note how long each phase takes in a few early steps, which wait for the device."""
        if not 20 <= self._number < 32:
            return
        if self._arguments.device.startswith("cuda"):
            torch.cuda.synchronize()
        now = time.monotonic()
        if self._phase:
            self._phases[self._phase] += now - self._phase_started
        self._phase, self._phase_started = phase, now

    def _weigh(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean over each group's answers, weighted by group."""
        labels = batch["labels"].to(logits.device, non_blocking=True)
        groups = batch["groups"].to(logits.device, non_blocking=True)
        losses = F.cross_entropy(logits, labels, reduction="none")
        zeros = losses.new_zeros(len(GROUPS))
        counts = zeros.index_add(0, groups, torch.ones_like(losses))
        means = zeros.index_add(0, groups, losses) / counts.clamp(min=1)
        now = torch.where(counts > 0, means.detach(), self._means)
        self._means = self._means.lerp(now, 0.05)
        return (means * self._weights).sum()

    def _guide(self, seen: Tensor, on_the_way: list[Tensor], batch: Batch) -> Tensor:
        height, width = batch["size"]
        grid = height // UNIT, width // UNIT
        names = ("landmarks", "counts", "picture_at", "mention_at", "mentioned")
        moved = {name: batch[name].to(seen.device, non_blocking=True) for name in names}
        shape = (-1, grid[0] * grid[1], seen.shape[-1])
        early, later = (hidden[moved["picture_at"]].view(shape) for hidden in on_the_way)
        named = on_the_way[1][moved["mention_at"]]
        losses = torch.stack(
            [
                self._guides.judge_landmarks(seen, moved["landmarks"].long()),
                self._guides.judge_places(early, grid),
                self._guides.judge_mentions(named, moved["mentioned"]),
                self._guides.judge_counts(later, moved["counts"].long()),
            ]
        ).nan_to_num()  # a step may have no mention at all
        self._guided = self._guided.lerp(losses.detach(), 0.05)
        return (losses * self._guide_weights).sum()

    def _save(self, out: Path) -> None:
        save_shards(self._model, out)
        self._guides.save(out)

    def _autocast(self) -> Any:
        is_cuda = self._arguments.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext()

    def _report(self, number: int, elapsed: float, waited: float) -> None:
        means = zip(GROUPS, self._means.tolist(), strict=True)
        losses = " ".join(f"{group} {mean:.4f}" for group, mean in means)
        guided = zip(GUIDES, self._guided.tolist(), strict=True)
        losses += " | " + " ".join(f"{name} {loss:.3f}" for name, loss in guided)
        print(f"step {number} {elapsed:.0f} s (waited {waited:.0f} s) loss {losses}", flush=True)

    def _test(self, tests: list[Batch], elapsed: float) -> None:
        with Blocks.as_they_are():
            right = measure(self._model, self._pipeline, tests, self._autocast)
        figures = " ".join(f"{task} {share:.3f}" for task, share in right.items())
        print(f"test {elapsed:.0f} s {figures}", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what training.assets has prepared")
    parser.add_argument("out", type=Path, help="where the weights go")
    parser.add_argument("--init", type=Path, help="begin with the weights of this folder")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--plan", default="{}", help='samples a step: {"picture": 384, ...}')
    parser.add_argument("--report-every", type=float, default=10.0)
    parser.add_argument("--test-every", type=float, default=120.0)
    parser.add_argument("--test-count", type=int, default=512)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(parse())
