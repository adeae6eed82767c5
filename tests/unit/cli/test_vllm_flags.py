"""The flags of `vllm serve` are taken, or refused with a sentence that says what there is."""

from __future__ import annotations

import argparse
import subprocess
import sys
from functools import cache

import pytest

from sensorium import cli
from sensorium.cli.vllm.flags import FLAGS, ForeignFlag
from sensorium.cli.vllm.table import ANY, OFF, ON
from sensorium.engine.assembly.options import EngineOptions
from sensorium.types.options import list_options

COMMANDS = ("serve", "render", "deploy", "encode")
PLAIN = [flag for flag in FLAGS if not flag.option]


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of the command, which is made once because that takes a while."""
    parser = make_parser()
    monkeypatch.setattr(cli, "_make_parser", lambda: parser)
    return parser


make_parser = cache(cli._make_parser)


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["sensorium", *words])
    return cli._parse_arguments()


def write(flag: ForeignFlag, value: str, *, name: str = "") -> list[str]:
    """Return the words of a command line that give this value to the flag."""
    if flag.metavar:
        return [name or flag.name, value]
    return [flag.name if value == ON else f"--no-{flag.name[2:]}"]


@pytest.mark.parametrize("flag", PLAIN, ids=lambda flag: flag.name)
def test_a_value_without_effect_is_accepted_and_any_other_is_refused_with_the_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: ForeignFlag
) -> None:
    accepted = ["anything" if value == ANY else value for value in flag.accepted]
    assert flag.metavar or set(accepted) <= {ON, OFF}
    for value in accepted:
        arguments = parse(monkeypatch, "serve", *write(flag, value), "model")
        (note,) = arguments.notes
        assert note.endswith(f"It has no effect. {flag.sentence}")
        assert arguments.model == "model"
    refused = [value for value in ([ON, OFF] if not flag.metavar else ["17", "other"])]
    for value in refused:
        if value in accepted or ANY in flag.accepted:
            continue
        with pytest.raises(SystemExit, match="2"):
            parse(monkeypatch, "serve", "model", *write(flag, value))
        said = capsys.readouterr().err
        assert f"is a flag of vLLM and not supported here. {flag.sentence}\n" in said
        assert "did you mean" not in said


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_a_sentence_is_whole_and_names_only_flags_that_exist(
    parser: argparse.ArgumentParser, flag: ForeignFlag
) -> None:
    assert flag.sentence[0].isupper() or flag.sentence[0] in "`-/l"
    assert flag.sentence.endswith(".")
    (commands,) = [each for each in parser._actions if each.choices]
    known = {
        option
        for command in COMMANDS
        for action in commands.choices[command]._actions  # type: ignore[index]
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
    }
    named = [word.strip("`.,;:()") for word in flag.sentence.split()]
    assert all(word in known for word in named if word.startswith("--"))
    assert not known & set(flag.names), "it is an option here"


def test_no_flag_stands_twice() -> None:
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_server_takes_them_and_its_help_lists_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    words = ("-tp", "1", "--tensor-parallel-size=1", "--enable-auto-tool-choice", "-O3")
    assert len(parse(monkeypatch, command, "model", *words).notes) == 4
    with pytest.raises(SystemExit, match="0"):
        parse(monkeypatch, command, "--help")
    shown = capsys.readouterr().out
    assert not any(f" {flag.name} " in shown for flag in FLAGS)


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["--disable-uvicorn-access-log"], "access_log", False),
        (["--uvicorn-log-level", "critical"], "log_level", "error"),
        (["--uvicorn-log-level", "info"], "log_level", "info"),
        (["--disable-mm-preprocessor-cache"], "mm_processor_cache_gb", 0.0),
        (["--language-model-only"], "limit_mm_per_prompt", {"image": 0, "video": 0, "audio": 0}),
        (["--cudagraph-capture-sizes", "1", "2", "8"], "cuda_graph_sizes", (1, 2, 8)),
        (["--cudagraph-capture-sizes", "[1,2]"], "cuda_graph_sizes", (1, 2)),
    ],
)
def test_a_flag_may_stand_for_an_option_with_another_name(
    monkeypatch: pytest.MonkeyPatch, words: list[str], option: str, value: object
) -> None:
    arguments = parse(monkeypatch, "serve", "model", *words)
    assert getattr(arguments, option) == value
    assert "It is taken as --" in arguments.notes[0]


@pytest.mark.parametrize(
    "words", [["--uvicorn-log-level", "loud"], ["--cudagraph-capture-sizes", "0"]]
)
def test_a_senseless_value_of_such_a_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(monkeypatch, "serve", "model", *words)
    assert f"{words[0]}: " in capsys.readouterr().err


def test_a_token_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--hf-token", "hf_secret"], ["--hf-token=hf_secret"], ["--hf-token"]):
        with pytest.raises(SystemExit, match="2"):
            parse(monkeypatch, "serve", "model", *words)
        said = capsys.readouterr().err
        assert "Set HF_TOKEN" in said
        assert "secret" not in said


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1m", 10**6),
        ("1M", 2**20),
        ("25.6k", 25_600),
        ("auto", None),
        ("AUTO", None),
        ("-1", None),
    ],
)
@pytest.mark.parametrize("flag", ["--max-model-len", "--max-num-batched-tokens"])
def test_numbers_of_tokens_may_have_units(
    monkeypatch: pytest.MonkeyPatch, flag: str, text: str, value: int | None
) -> None:
    arguments = parse(monkeypatch, "serve", "model", flag, text)
    name = flag[2:].replace("-", "_")
    assert getattr(EngineOptions(**{name: getattr(arguments, name)}), name) == value
    (option,) = [each for each in list_options(EngineOptions) if each.name == name]
    assert option.default is None  # so that "auto" is the default


@pytest.mark.parametrize("text", ["0", "-2", "4x", "2.5K", "2.5", "k", "", "4 k", "1e3", "9" * 30])
def test_what_is_no_number_of_tokens_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(monkeypatch, "serve", "model", f"--max-model-len={text}")
    assert "argument --max-model-len: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["--dtype", "half"], "dtype", "float16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--generation-config", "vllm"], "generation_config", "none"),
    ],
)
def test_vllms_words_for_a_choice_are_understood(
    monkeypatch: pytest.MonkeyPatch, words: list[str], option: str, value: str
) -> None:
    assert getattr(parse(monkeypatch, "serve", "model", *words), option) == value


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (['["*"]'], ("*",)),
        (
            ['["https://a.b", "https://c.d"]', "https://e.f"],
            ("https://a.b", "https://c.d", "https://e.f"),
        ),
        (["[::1]"], ("[::1]",)),
    ],
)
def test_a_list_may_be_written_as_json(
    monkeypatch: pytest.MonkeyPatch, words: list[str], origins: tuple[str, ...]
) -> None:
    from sensorium.cli.serve import make_options

    flags = [f"--allowed-origins={word}" for word in words]
    assert make_options(parse(monkeypatch, "serve", "model", *flags)).allowed_origins == origins


KNOWN = [
    f"--{name}"
    for name in (
        "max-model-len",
        "max-num-seqs",
        "encoder-cache-size",
        "port",
        "api-key",
        "host",
        "mm-processor-cache-gb",
        "limit-mm-per-prompt",
        "enable-mm-embeds",
        "gpu-memory-utilization",
    )
]


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--max-model-length", "--max-model-len"),
        ("--max_model_len", "--max-model-len"),
        ("--max-model", "--max-model-len"),
        ("--prot=9", "--port"),
        ("--api-keys", "--api-key"),
        ("--mm-cache-gb", "--mm-processor-cache-gb"),
        ("--gpu-memory", "--gpu-memory-utilization"),
        ("--max-seqs-num", "--max-num-seqs"),
    ],
)
def test_the_most_similar_flag_is_named(word: str, flag: str) -> None:
    assert cli.hint_at_flag(word, KNOWN) == f" (did you mean {flag}?)"


@pytest.mark.parametrize(
    "word",
    [
        *("--tensor-parallel-size", "--cache", "--enable-lora", "--batch-size", "--mode", "port"),
        *("-p", "--frequency", "--max-loras", "--size", "--nonsense"),
    ],
)
def test_a_flag_that_is_far_from_all_gets_no_hint(word: str) -> None:
    assert cli.hint_at_flag(word, KNOWN) == ""


def test_a_dotted_flag_is_refused_with_its_json_form() -> None:
    hint = cli.hint_at_flag("--limit-mm-per-prompt.image", KNOWN)
    assert hint == " (write --limit-mm-per-prompt with a JSON object)"


@pytest.mark.processes
def test_the_command_says_what_it_did_with_them() -> None:
    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sensorium", "serve", "/nowhere", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    accepted = run("-tp", "1", "--enable-chunked-prefill", "--max-model-len", "4k")
    assert accepted.returncode == 1
    first, second, third = accepted.stderr.splitlines()
    assert first.startswith("sensorium: --tensor-parallel-size 1 is a flag of vLLM. It has no eff")
    assert second.startswith("sensorium: --enable-chunked-prefill is a flag of vLLM. It has no")
    assert "there is no directory '/nowhere'" in third
    refused = run("--tensor-parallel-size", "2")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        "sensorium serve: error: --tensor-parallel-size is a flag of vLLM and not supported here. "
        "An engine computes on one device; `sensorium deploy` runs several engines."
    )
