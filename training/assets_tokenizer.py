"""Trains the tokenizer on what will be said.

`python -m training.assets_tokenizer build/training`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from random import Random

from training.conversations import SYSTEM_PROMPTS
from training.pictures.emoji_names import EMOJI_NAMES
from training.speech.words import VOCABULARY
from training.tasks.mixture import MIXTURE
from training.tokenizer import train_tokenizer

NUM_SAMPLES = {"picture": 30_000, "speech": 6_000, "spoken_picture": 3_000, "video": 1_500}
DEFAULT_NUM_SAMPLES = 30_000


def make_texts(seed: int = 0) -> Iterator[str]:
    random = Random(seed)
    for group, makers in MIXTURE.items():
        size = (0, 0) if group in ("text", "speech") else (224, 224)
        if group == "video":
            size = (96, 96)
        chosen = random.choices(
            [maker for maker, _ in makers],
            [weight for _, weight in makers],
            k=NUM_SAMPLES.get(group, DEFAULT_NUM_SAMPLES),
        )
        for maker in chosen:
            for turn in maker(random, size, "train").turns:
                yield turn.question
                yield turn.answer
    for _ in range(40):
        for word in (*VOCABULARY, *EMOJI_NAMES):
            yield f"the {word}"
            yield word.capitalize()
        yield from (f"<|im_start|>system\n{prompt}" for prompt in SYSTEM_PROMPTS)
        yield "user\n assistant\n system\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokenizer = train_tokenizer(make_texts())
    tokenizer.save_pretrained(folder / "tokenizer")
    print(f"{len(tokenizer)} tokens in {folder / 'tokenizer'}")


if __name__ == "__main__":
    main()
