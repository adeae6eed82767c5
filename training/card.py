"""The tables of the model card, from records of `training.evaluate`.

`python -m training.card docs/sensorium-mini.md alone=R.json cold=R.json warm=R.json ...`: the first
record gives the figures with their intervals, the others stand next to it. What lies between the
two marks of the page is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# What the table says: the name of a task, and what must and what should be reached.
TASKS: dict[str, tuple[str, str]] = {
    "color_and_shape": ("colour and shape", "95 / 98 %"),
    "position": ("position (nine places)", "93 / 97 %"),
    "relation": ("relation of two things", "80 / 92 %"),
    "count": ("count, 0 to 5", "90 / 96 %"),
    "digits": ("number read exactly", "88 / 95 %"),
    "words": ("word read exactly", "75 / 88 %"),
    "emoji": ("emoji named", "85 / 93 %"),
    "speech": ("speech, words wrong", "10 / 6 %"),
    "speech_unseen_voice": ("speech of an unseen neural voice, words wrong", "20 / 12 %"),
    "spoken_question": ("spoken question about a picture", "75 / 88 %"),
    "video_direction": ("direction in a video", "80 / 92 %"),
    "yes_no": ("yes or no", ""),
    "unseen_pairs": ("colour and shape, pairs never asked about together", ""),
    "digits_unseen_font": ("number in an unseen font", ""),
    "words_unseen_font": ("word in an unseen font", ""),
    "emoji_unseen_style": ("emoji in an unseen style (Twemoji)", ""),
    "spoken_question_unseen_voice": ("spoken question, unseen voice", ""),
    "spoken_sum": ("spoken sum", ""),
    "video": ("question about a video", ""),
    "sum": ("sum of two numbers", ""),
    "text": ("questions without media", ""),
}


def make_tables(records: dict[str, dict[str, Any]]) -> str:
    """Return the table of all tasks, and the one of the human recordings."""
    names = list(records)
    header = ["task", "floor / target", "cases", f"{names[0]} [95 %]", *names[1:]]
    rows = []
    for task, (title, goal) in TASKS.items():
        columns = [record["scores"].get(task) for record in records.values()]
        if columns[0] is None:
            continue
        share, low, high = _figure(columns[0])
        first = f"{share:.1%} [{low:.1%}, {high:.1%}]"
        others = ["" if each is None else _describe(each) for each in columns[1:]]
        rows.append([title, goal, str(columns[0]["cases"]), first, *others])
    tables = format_table(header, rows)
    heard = _list_recordings(records[names[0]]["scores"])
    return tables + ("\n" + heard if heard else "")


def _figure(figures: dict[str, Any]) -> tuple[float, float, float]:
    """Return the share of right answers, or of wrong words in speech, with its interval."""
    kind = "word_errors" if "word_errors" in figures else "share"
    low, high = figures["word_errors_interval" if kind == "word_errors" else "interval"]
    return figures[kind], low, high


def _describe(figures: dict[str, Any]) -> str:
    return f"{_figure(figures)[0]:.1%} ({figures['cases']})"


def _list_recordings(scores: dict[str, Any]) -> str:
    rows = [
        [task.removeprefix("human: "), figures["expected"], figures["heard"]]
        for task, figures in scores.items()
        if task.startswith("human: ")
    ]
    return format_table(["recording", "said", "transcribed"], rows) if rows else ""


def format_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def replace_figures(page: str, tables: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Return the page with the tables between the two marks."""
    begin, end = marks
    before, mark, rest = page.partition(begin)
    _, other_mark, after = rest.partition(end)
    if not mark or not other_mark:
        raise ValueError(f"The page lacks {begin} or {end}.")
    return f"{before}{begin}\n{tables}{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("records", nargs="+", metavar="NAME=RECORD")
    arguments = parser.parse_args()
    records = {}
    for argument in arguments.records:
        name, _, path = argument.partition("=")
        records[name] = json.loads(Path(path).read_text())
    page = arguments.page
    page.write_text(replace_figures(page.read_text(), make_tables(records)))


if __name__ == "__main__":
    main()
