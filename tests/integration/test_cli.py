"""The command says what the library says."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from sensorium import SamplingParams, cli
from tests.parity.driver import make_llm

PROMPTS = ["hello world", "the lazy dog"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "generate", *arguments])
    cli.main()


def test_flags_are_sampling_parameters_and_every_answer_is_printed(
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tiny_model("llama")
    params = SamplingParams(
        n=2,
        temperature=0.9,
        seed=5,
        max_tokens=8,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
    )
    outputs = make_llm(directory).generate(PROMPTS, params, use_tqdm=False)
    flags = [
        *("--n=2", "--temperature=0.9", "--seed=5", "--max-tokens=8", "--min-p=0.01"),
        *("--repetition-penalty=1.2", "--presence-penalty=0.5", "--frequency-penalty=-0.5"),
        *("--max-model-len=512", "--dtype=float32", "--device=cpu"),
    ]
    run(monkeypatch, directory, *PROMPTS, *flags)
    expected = [completion.text for output in outputs for completion in output.outputs]
    assert len(set(expected)) == 4
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


def test_a_bad_value_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="sensorium: min_p must be a number"):
        run(monkeypatch, "/nowhere", "hello", "--min-p=2")
