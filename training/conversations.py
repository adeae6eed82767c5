"""Samples to token numbers, labels and positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from training.mentions import Mention, MentionFinder
from training.positions import make_positions
from training.samples import Sample
from training.tokenizer import FastEncoder

IGNORED = -100
MAX_TURNS_TOKENS = 190  # no turn begins after so many: the longest of a batch costs all
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are sensorium-mini.",
    "Answer briefly.",
    "You are a helpful assistant that sees and hears.",
    "Be polite.",
)
Grid = tuple[int, int, int]  # steps, rows and columns of tokens


@dataclass(slots=True)
class Layout:
    """How many tokens the media of a batch have."""

    picture: Grid | None = None
    video: Grid | None = None
    num_sounds: int = 0  # tokens of audio


@dataclass(slots=True)
class Encoded:
    tokens: list[int]
    labels: list[int]  # the next token, where it is the answer's
    segments: list[int | Grid]
    mentions: list[Mention]


class Writer:
    """Writes conversations in the chat template's words."""

    def __init__(self, directory: Path) -> None:
        self._encoder = FastEncoder(directory)
        encode = self._encoder.encode
        self.picture_token, self.video_token, self.sound_token, self.pad_token = (
            encode(name)[0] for name in ("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|endoftext|>")
        )
        self._vision = encode("<|vision_bos|>"), encode("<|vision_eos|>")
        self._sound = encode("<|audio_bos|>"), encode("<|audio_eos|>")
        self._user = encode("<|im_start|>user\n")
        self._answer = encode("<|im_end|>\n<|im_start|>assistant\n")
        self._end = encode("<|im_end|>")
        self._line = encode("\n")
        self._finder = MentionFinder(encode)

    def write(self, sample: Sample, layout: Layout, random: Random) -> Encoded:
        """Write a conversation; some questions stand before their media."""
        pieces = _Pieces()
        if random.random() < 1 / 12:
            system = f"<|im_start|>system\n{random.choice(SYSTEM_PROMPTS)}<|im_end|>\n"
            pieces.add(self._encoder.encode(system))
        for number, turn in enumerate(sample.turns):
            if number and len(pieces) > MAX_TURNS_TOKENS - 25 and layout.video is None:
                break
            pieces.add(self._line if number else [], self._user)
            question = self._encoder.encode(turn.question)
            is_first = bool(turn.question) and random.random() < 0.2
            if number == 0 and is_first:
                pieces.add(question)
                self._add_media(pieces, sample, layout)
            else:
                if number == 0:
                    self._add_media(pieces, sample, layout)
                if sample.picture is not None:
                    pieces.add_mentions(self._finder.find(question, sample.picture))
                pieces.add(question)
            pieces.add(self._answer)
            pieces.add_answer(self._encoder.encode(turn.answer) + self._end)
        return pieces.finish()

    def _add_media(self, pieces: _Pieces, sample: Sample, layout: Layout) -> None:
        bos, eos = self._vision
        if sample.picture is not None and layout.picture is not None:
            pieces.add_grid(bos, self.picture_token, layout.picture, eos)
        if sample.video is not None and layout.video is not None:
            pieces.add_grid(bos, self.video_token, layout.video, eos)
        if sample.speech is not None:
            bos, eos = self._sound
            pieces.add(bos, [self.sound_token] * layout.num_sounds, eos)


class _Pieces:
    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._is_answer: list[bool] = []
        self._segments: list[int | Grid] = []
        self._mentions: list[Mention] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, *pieces: list[int]) -> None:
        for piece in pieces:
            self._append(piece, is_answer=False)

    def add_answer(self, piece: list[int]) -> None:
        self._append(piece, is_answer=True)

    def add_mentions(self, mentions: Iterable[Mention]) -> None:
        """Note where the names stand that the text added next will have."""
        start = len(self._tokens)
        self._mentions += [(start + at, row, column) for at, row, column in mentions]

    def add_grid(self, bos: list[int], token: int, grid: Grid, eos: list[int]) -> None:
        self.add(bos)
        count = grid[0] * grid[1] * grid[2]
        self._tokens += [token] * count
        self._is_answer += [False] * count
        self._segments.append(grid)
        self.add(eos)

    def _append(self, piece: list[int], *, is_answer: bool) -> None:
        self._tokens += piece
        self._is_answer += [is_answer] * len(piece)
        if self._segments and isinstance(self._segments[-1], int):
            self._segments[-1] += len(piece)
        else:
            self._segments.append(len(piece))

    def finish(self) -> Encoded:
        following = zip(self._tokens[1:], self._is_answer[1:], strict=True)
        labels = [token if is_answer else IGNORED for token, is_answer in following]
        return Encoded(self._tokens, [*labels, IGNORED], self._segments, self._mentions)


def pad(batch: list[Encoded], writer: Writer) -> dict[str, np.ndarray]:
    """Pad tokens [B, T] and positions [3, B, T] to one length, a multiple of 16.

    The others number places in the flattened tokens: `answer_at` has those before each token of an
    answer, `labels` and `turns` that token and its turn; `..._at` the placeholders of media;
    `mention_at` has the names of things in questions, and `mentioned` the row and column of each.
    """
    length = -(-max(len(encoded.tokens) for encoded in batch) // 16) * 16
    tokens = np.full((len(batch), length), writer.pad_token, np.int32)
    labels = np.full((len(batch), length), IGNORED, np.int64)
    positions = np.zeros((3, len(batch), length), np.int32)
    for row, encoded in enumerate(batch):
        tokens[row, : len(encoded.tokens)] = encoded.tokens
        labels[row, : len(encoded.labels)] = encoded.labels
        positions[:, row] = make_positions(encoded.segments, length)
    answer_at = np.flatnonzero(labels != IGNORED)
    is_new_turn = np.diff(answer_at, prepend=-2) > 1
    mentions = [
        (number * length + at, row, column)
        for number, encoded in enumerate(batch)
        for at, row, column in encoded.mentions
    ]
    mentioned = np.array(mentions, np.int64).reshape(-1, 3)
    return {
        "tokens": tokens,
        "positions": positions,
        "answer_at": answer_at,
        "labels": labels.reshape(-1)[answer_at],
        "turns": np.cumsum(is_new_turn) - 1,
        "rows": answer_at[is_new_turn] // length,  # of each turn
        "picture_at": np.flatnonzero(tokens == writer.picture_token),
        "video_at": np.flatnonzero(tokens == writer.video_token),
        "sound_at": np.flatnonzero(tokens == writer.sound_token),
        "mention_at": mentioned[:, 0],
        "mentioned": mentioned[:, 1:],
    }
