"""Which tasks training mixes, by kind of batch, and which ones evaluation asks."""

from __future__ import annotations

import random as randomness
from collections.abc import Callable

from training.samples import Sample, Size, Split
from training.tasks.emoji import make_emoji, make_emoji_scene
from training.tasks.first_sights import make_few_letters, make_one_thing
from training.tasks.notices import make_notice
from training.tasks.reading import (
    make_digits,
    make_digits_in_unseen_font,
    make_words,
    make_words_in_unseen_font,
)
from training.tasks.shapes import (
    make_count,
    make_nothing,
    make_position,
    make_relation,
    make_scene,
    make_shape_color,
    make_unseen_pairs,
    make_yes_no,
)
from training.tasks.spoken import (
    make_heard,
    make_spoken_arithmetic,
    make_spoken_fact,
    make_spoken_question,
    make_transcription,
)
from training.tasks.text import make_sum, make_text
from training.tasks.video import make_direction, make_video

Maker = Callable[[randomness.Random, Size, Split], Sample]

MIXTURE: dict[str, list[tuple[Maker, float]]] = {
    "first_picture": [(make_one_thing, 3.0), (make_few_letters, 2.0), (make_emoji, 1.0)],
    "picture": [
        (make_scene, 4.0),
        (make_shape_color, 0.5),
        (make_position, 0.5),
        (make_relation, 3.0),
        (make_count, 3.0),
        (make_yes_no, 0.3),
        (make_words, 2.2),
        (make_digits, 1.2),
        (make_notice, 1.8),
        (make_emoji, 1.5),
        (make_emoji_scene, 1.5),
        (make_nothing, 0.1),
    ],
    "speech": [
        (make_transcription, 6.0),
        (make_heard, 2.0),
        (make_spoken_arithmetic, 1.6),
        (make_spoken_fact, 0.6),
    ],
    "spoken_picture": [(make_spoken_question, 1.0)],
    "video": [(make_direction, 2.0), (make_video, 3.0)],
    "text": [(make_text, 1.0)],
}

# Each with the split "test". The first ten are what the model must know.
EVALUATION: dict[str, Maker] = {
    "color_and_shape": make_shape_color,
    "position": make_position,
    "relation": make_relation,
    "count": make_count,
    "digits": make_digits,
    "words": make_words,
    "emoji": make_emoji,
    "speech": make_transcription,
    "spoken_question": make_spoken_question,
    "video_direction": make_direction,
    "yes_no": make_yes_no,
    "unseen_pairs": make_unseen_pairs,
    "digits_unseen_font": make_digits_in_unseen_font,
    "words_unseen_font": make_words_in_unseen_font,
    "spoken_sum": make_spoken_arithmetic,
    "video": make_video,
    "sum": make_sum,
    "text": make_text,
}


def make_sample(
    random: randomness.Random, group: str, size: Size, split: Split = "train"
) -> Sample:
    """A sample of one group of the mixture."""
    makers, totals = _TOTALS[group]
    return random.choices(makers, cum_weights=totals)[0](random, size, split)


def _add_up(weights: list[float]) -> list[float]:
    return [sum(weights[: n + 1]) for n in range(len(weights))]


_TOTALS = {
    group: ([maker for maker, _ in makers], _add_up([weight for _, weight in makers]))
    for group, makers in MIXTURE.items()
}
