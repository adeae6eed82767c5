"""Measures how well the embedded model transcribes 200 sentences that no pattern made.

    python -m training.free_speech build/training --record --card docs/sensorium-mini.md

The sentences in `training/speech/free_sentences.txt` were written by hand. They use every word that
the model can transcribe, and none fits a pattern of `training.speech.sentences`. Each is spoken
once by each kind of voice, and the packed weights answer through `sensorium.LLM`. espeak-ng is
fetched into the folder when it is not there; the neural voice needs the extra `training`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tqdm import tqdm

from training.assets_speech import lay_out_espeak
from training.card import format_table, replace_figures
from training.evaluate import MAX_TOKENS
from training.scoring import count_word_errors, interval, is_right, normalize
from training.sounds import RATE
from training.speech.espeak import TEST_VARIANTS, Espeak, Voice, make_voice
from training.speech.test_voices import Hibari

SENTENCES = Path(__file__).parent / "speech" / "free_sentences.txt"
RECORD = Path(__file__).parents[1] / "benchmarks" / "records" / "free_speech.json"
MARKS = ("<!-- free speech: begin -->", "<!-- free speech: end -->")
QUESTION = "Write down what you hear."
SEED = 2026
PLAIN_VOICE = Voice(rate=175)  # words a minute: the default of the command `espeak-ng`
# Homophones in at least one accent. Training's patterns avoid most of them, since only
# the sense of a sentence tells which one was said.
SOUND_ALIKE = {
    "too": "to",
    "two": "to",
    "four": "for",
    "our": "hour",
    "are": "hour",
    "know": "no",
    "hear": "here",
    "read": "red",
    "than": "then",
    "eye": "i",
    "an": "and",
}
Speak = Callable[[str], np.ndarray]  # a sentence -> int16 samples at 16 kHz


def read_sentences() -> list[str]:
    return SENTENCES.read_text().splitlines()


def make_voices(folder: Path) -> dict[str, Speak]:
    """Return what can speak here: the title of each kind of voice -> its function."""
    if not (folder / "espeak" / platform.machine()).exists():
        downloads = folder / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        lay_out_espeak(folder, downloads)
    espeak, random = Espeak(folder / "espeak"), Random(SEED)
    voices: dict[str, Speak] = {
        f"espeak-ng, {len(TEST_VARIANTS)} voices kept for tests, any speed and pitch": (
            lambda text: espeak.speak(text, make_voice(random, "test"))
        ),
        "espeak-ng's plain voice `en-us` as it is installed, which was used in training": (
            lambda text: espeak.speak(text, PLAIN_VOICE)
        ),
    }
    if find_spec("hibari"):
        voices["hibari, a neural voice that was not used in training"] = Hibari().speak
    else:
        print("hibari-tts is not installed, so the neural voice is left out", file=sys.stderr)
    return voices


def ask(llm: Any, samples: np.ndarray) -> str:
    """Return what the model transcribes, with silence around the speech as in other tests."""
    from sensorium import SamplingParams

    sound = np.pad(samples, (1600, 3200)).astype(np.float32) / 32768.0
    content = [{"type": "audio", "audio": (sound, RATE)}, {"type": "text", "text": QUESTION}]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    return str(output.outputs[0].text)


def score(said: list[str], heard: list[str]) -> dict[str, Any]:
    errors = [count_word_errors(answer, text) for answer, text in zip(heard, said, strict=True)]
    num_wrong, num_words = (sum(column) for column in zip(*errors, strict=True))
    right = sum(is_right(answer, text) for answer, text in zip(heard, said, strict=True))
    alike = [
        count_word_errors(_unify(answer), _unify(text))[0]
        for answer, text in zip(heard, said, strict=True)
    ]
    return {
        "sentences": len(said),
        "words": num_words,
        "words_wrong": num_wrong,
        "word_errors": round(num_wrong / num_words, 4),
        "word_errors_interval": [round(edge, 4) for edge in interval(num_wrong, num_words)],
        "word_errors_without_sound_alikes": round(sum(alike) / num_words, 4),
        "sentences_right": right,
    }


def _unify(text: str) -> str:
    """Return the text with one spelling for all homophones."""
    words = normalize(text).split()
    return " ".join(SOUND_ALIKE.get(word, word) for word in words)


def make_table(scores: dict[str, dict[str, Any]]) -> str:
    header = [
        "voice",
        "words wrong [95 %]",
        "with homophones as right",
        "whole sentences right",
    ]
    rows = []
    for title, figures in scores.items():
        low, high = figures["word_errors_interval"]
        share = f"{figures['word_errors']:.1%} [{low:.1%}, {high:.1%}]"
        alike = f"{figures['word_errors_without_sound_alikes']:.1%}"
        right = f"{figures['sentences_right']} of {figures['sentences']}"
        rows.append([title, share, alike, right])
    return format_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder that espeak-ng is laid out in")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--card", type=Path, help="the model card, for its table of these figures")
    arguments = parser.parse_args()
    said = read_sentences()
    # Every sentence is spoken before the engine starts: synthesizers and engine share no process
    # state then, and a voice that is missing is noticed at once.
    spoken = {
        title: [speak(text) for text in said]
        for title, speak in make_voices(arguments.folder).items()
    }
    from sensorium import LLM

    with LLM() as llm:
        heard = {
            title: [ask(llm, sound) for sound in tqdm(sounds, desc=title, mininterval=5.0)]
            for title, sounds in spoken.items()
        }
    scores = {title: score(said, answers) for title, answers in heard.items()}
    table = make_table(scores)
    print(table)
    if arguments.record:
        _write_record(said, scores, heard)
    if arguments.card:
        page = arguments.card.read_text()
        arguments.card.write_text(replace_figures(page, table, marks=MARKS))


def _write_record(said: list[str], scores: dict[str, Any], heard: dict[str, list[str]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    record = {
        "benchmark": "free_speech",
        "command": "python -m training.free_speech " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(),
        "machine": platform.machine(),
        "scores": scores,
        "said": said,
        "heard": heard,
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
