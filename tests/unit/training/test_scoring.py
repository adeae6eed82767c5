import json
from pathlib import Path

import pytest

from training.card import BEGIN, END, TASKS, make_tables, replace_figures
from training.evaluate import Pass, add_records, load_cases, score
from training.heldout import UNSEEN_STYLE, UNSEEN_VOICE, UNSEEN_VOICE_QUESTION
from training.scoring import count_word_errors, interval, is_right
from training.tasks.mixture import EVALUATION


def test_case_counts_only_where_a_text_is_read() -> None:
    assert is_right("A red circle.", "a red circle")
    assert not is_right("A red circle", "A red square")
    assert is_right("HALT", "HALT", is_text=True)
    assert not is_right("halt", "HALT", is_text=True)


@pytest.mark.parametrize(
    ("transcript", "errors"),
    [
        ("go forward ten meters", 0),
        ("Go forward ten meters.", 0),
        ("go forward meters", 1),
        ("go forward ten ten meters", 1),
        ("no forward two meters", 2),
        ("", 4),
    ],
)
def test_word_errors(transcript: str, errors: int) -> None:
    assert count_word_errors(transcript, "go forward ten meters") == (errors, 4)


def test_intervals_of_wilson() -> None:
    # Published examples: 0 of 10 and 81 of 263.
    assert interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-3)
    assert interval(0, 0) == (0.0, 1.0)


CASES = [
    {"task": "count", "answer": "Two."},
    {"task": "count", "answer": "Three."},
    {"task": "speech", "answer": "go left"},
    {"task": "human: card one", "answer": "ace of hearts"},
]


def test_the_model_card_has_all_tasks() -> None:
    assert set(TASKS) == {*EVALUATION, UNSEEN_VOICE, UNSEEN_VOICE_QUESTION, UNSEEN_STYLE}


def test_a_model_card_has_the_first_records_intervals_and_the_others_shares(tmp_path: Path) -> None:
    first = {"scores": score(CASES, ["two", "four", "go left", "ace of arts"])}
    other = {"scores": score(CASES[:2], ["Two", "Three"])}
    tables = make_tables({"alone": first, "warm": other})
    assert "| count, 0 to 5 | 90 / 96 % | 2 | 50.0% [9.4%, 90.5%] | 100.0% (2) |" in tables
    assert "| speech, words wrong | 10 / 6 % | 1 | 0.0% [0.0%, 65.8%] |  |" in tables
    assert "| card one | ace of hearts | ace of arts |" in tables
    page = replace_figures(f"Above.\n{BEGIN}\nold\n{END}\nBelow.\n", tables)
    assert page == f"Above.\n{BEGIN}\n{tables}{END}\nBelow.\n"
    with pytest.raises(ValueError, match="lacks"):
        replace_figures("no marks", tables)
    (tmp_path / "cases.jsonl").write_text("\n".join(map(json.dumps, CASES)))
    expected = [{**case, "key": f"{case['task']}/1"} for case in (CASES[0], *CASES[2:])]
    assert load_cases(tmp_path, 1) == expected
    assert load_cases(tmp_path, tasks=["human*", "speech"]) == expected[1:]


def test_words_are_also_counted_separately_for_random_strings() -> None:
    cases = [
        {"task": "speech", "answer": "go left", "key": "speech/1"},
        {"task": "speech", "answer": "steps garden cows egg", "key": "speech/2"},
    ]
    asked = Pass([("go left", [1, 2]), ("steps garden cows", [3])], 1.26, 100, 64)
    record = asked.make_record(cases)
    assert record["scores"]["speech"]["word_errors"] == round(1 / 6, 4)
    assert record["scores"]["speech"]["sentences"]["word_errors"] == 0.0
    assert record["scores"]["speech"]["random_strings"]["word_errors"] == 0.25
    assert record["answers"]["speech/2"] == ("steps garden cows", [3])
    assert (record["seconds"], record["prompt_tokens"], record["cached_tokens"]) == (1.3, 100, 64)


def test_records_of_different_tasks_become_one() -> None:
    first = Pass([("Two.", [1])], 1.5, 100, 64).make_record([{**CASES[0], "key": "count/1"}])
    other = Pass([("go left", [2])], 2.0, 50, 0).make_record([{**CASES[2], "key": "speech/1"}])
    record = add_records({"runs": ["a"], **first}, {"runs": ["b"], **other})
    assert record["runs"] == ["a", "b"]
    assert (record["seconds"], record["prompt_tokens"], record["cached_tokens"]) == (3.5, 150, 64)
    assert list(record["scores"]) == ["count", "speech"]
    assert list(record["answers"]) == ["count/1", "speech/1"]
    with pytest.raises(ValueError, match="in both records: count"):
        add_records({"runs": [], **first}, {"runs": [], **first})
