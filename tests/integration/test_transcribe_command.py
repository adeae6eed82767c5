"""The command `transcribe` gives what the library and a server give, in every format."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import srt
import webvtt

from sensorium import cli
from sensorium.speech.formats import as_plain
from sensorium.speech.transcript import Transcript
from tests.integration.speaking import make_brief, make_wav
from tests.parity.cases import make_audio
from tests.support.engine import make_llm
from tests.support.media import write_audio
from tests.support.server import (
    INTERRUPTIBLE_COMMAND,
    ROOT,
    ServerProcess,
    get_descendants,
    is_alive,
    serve,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-speech")
KEY = "a secret"
NAMES = ("a.wav", "b.wav", "c.wav")
LOADING = ("--dtype=float32", "--device=cpu", "--quiet")
ABORTED = 'vllm:request_success_total{finished_reason="abort"}'


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder with a model, three recordings, and a letter that is named like a recording."""

    path: Path
    transcripts: list[Transcript]  # of the recordings

    @property
    def model(self) -> str:
        return str(self.path / "model")

    def get_blocks(self) -> list[str]:
        """Return what is printed for each recording, if there are several."""
        return [
            f"==> {name} <==\n{as_plain(transcript, 'text')}"
            for name, transcript in zip(NAMES, self.transcripts, strict=True)
        ]


@pytest.fixture(scope="module")
def shared_folder(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Folder:
    path = tmp_path_factory.mktemp("transcribe")
    make_brief(tiny_model("whisper"), path / "model")
    for seed, (name, seconds) in enumerate(zip(NAMES, (7.0, 2.5, 4.0), strict=True)):
        (path / name).write_bytes(make_wav(seconds, seed=seed))
    (path / "letter.wav").write_text("Dear model, this is a letter. " * 20)
    with make_llm(str(path / "model"), max_model_len=None) as llm:
        audios = [path / name for name in NAMES]
        return Folder(path=path, transcripts=llm.transcribe(audios, use_tqdm=False))


@pytest.fixture
def folder(shared_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(shared_folder.path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("SENSORIUM_API_KEY", raising=False)
    return shared_folder


@pytest.fixture(scope="module")
def server(shared_folder: Folder) -> Iterator[ServerProcess]:
    with serve(shared_folder.model, "--dtype", "float32", SENSORIUM_API_KEY=KEY) as server:
        yield server


@dataclass(frozen=True, kw_only=True)
class Result:
    out: str
    err: str
    status: Any  # an exit code, or the text of an error


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Return a function that runs the command in this process."""

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["sensorium", "transcribe", *words])
        status: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code
        shown = capsys.readouterr()
        return Result(out=shown.out, err=shown.err, status=status)

    return run


Run = Callable[..., Result]


@pytest.fixture(params=["model", "server"])
def source(request: pytest.FixtureRequest, folder: Folder) -> tuple[str, ...]:
    """Return the flags for a model in the process, or for a server."""
    if request.param == "model":
        return ("--model", folder.model, *LOADING)
    server: ServerProcess = request.getfixturevalue("server")
    return ("--url", server.get_url(), "--api-key", KEY)


def test_texts_are_headed_by_their_names_in_the_order_of_the_files(
    folder: Folder, run: Run, source: tuple[str, ...]
) -> None:
    result = run(*NAMES, *source)
    assert (result.status, result.err) == (0, "")
    assert result.out == "\n".join(folder.get_blocks())
    alone = run("a.wav", *source)
    assert alone.out == as_plain(folder.transcripts[0], "text")


def test_a_file_that_fails_is_named_and_the_others_are_transcribed(
    folder: Folder, run: Run, source: tuple[str, ...]
) -> None:
    Path("empty").mkdir(exist_ok=True)
    result = run("missing.wav", "a.wav", "empty", "letter.wav", "b.wav", *source)
    assert result.status == 1
    assert result.out == "\n".join(folder.get_blocks()[:2])
    lines = result.err.splitlines()
    assert "sensorium: missing.wav: can't be read: No such file or directory" in lines
    assert lines[1] == "sensorium: empty: the directory has no audio and no videos"
    (letter,) = (line for line in lines if "letter.wav" in line)
    assert re.fullmatch(r"sensorium: letter\.wav: .*can't be opened as audio.*", letter)
    assert len(lines) == 3


def test_all_recordings_of_a_directory_are_transcribed(
    folder: Folder, run: Run, source: tuple[str, ...], tmp_path: Path
) -> None:
    recordings = tmp_path / "recordings"
    (recordings / "day").mkdir(parents=True)
    copies = ("0.wav", "a.wav"), ("day/1.WAV", "b.wav"), (".hidden.wav", "c.wav")
    for name, original in (*copies, ("notes.txt", "letter.wav")):
        shutil.copy(folder.path / original, recordings / name)
    result = run(str(recordings), *source)
    assert result.status == 0
    assert result.err == (
        f"sensorium: {recordings}: 1 file is left out, not named like audio or video: notes.txt\n"
    )
    texts = [as_plain(transcript, "text") for transcript in folder.transcripts]
    assert result.out == (
        f"==> {recordings}/0.wav <==\n{texts[0]}\n==> {recordings}/day/1.WAV <==\n{texts[1]}"
    )
    target = tmp_path / "transcripts"
    assert run(str(recordings), *source, "-o", str(target)).status == 0
    written = {str(p.relative_to(target)): p.read_text() for p in target.rglob("*.txt")}
    assert written == {"0.txt": texts[0], "day/1.txt": texts[1]}


def test_every_format_is_what_the_library_writes(
    folder: Folder, run: Run, source: tuple[str, ...]
) -> None:
    plain = run("a.wav", *source, "--format", "json")
    assert json.loads(plain.out)["text"] == folder.transcripts[0].text
    times = ("--format", "verbose_json", "--word-timestamps", "--language", "german")
    verbose = json.loads(run("a.wav", *source, *times).out)
    assert (verbose["task"], verbose["language"], verbose["duration"]) == (
        *("transcribe", "german"),
        7.0,
    )
    assert verbose["words"]
    segments = verbose["segments"]
    shown = [segment for segment in segments if segment["text"].strip()]
    cues = list(srt.parse(run("a.wav", *source, "--format", "srt", "--language", "de").out))
    assert [cue.start.total_seconds() for cue in cues] == pytest.approx(
        [segment["start"] for segment in shown]
    )
    written = run("a.wav", *source, "--format", "vtt", "--language", "de").out
    assert len(webvtt.from_string(written).captions) == len(cues)
    translated = run("a.wav", *source, "--format", "verbose_json", "--task", "translate")
    assert json.loads(translated.out)["task"] == "translate"


def test_each_file_gets_a_transcript_in_a_directory(
    folder: Folder, run: Run, source: tuple[str, ...], tmp_path: Path
) -> None:
    target = tmp_path / "new" / "subtitles"
    result = run(*NAMES, "letter.wav", *source, "--format=srt", f"--output-dir={target}")
    assert (result.status, result.out) == (1, "")
    assert sorted(path.name for path in target.iterdir()) == ["a.srt", "b.srt", "c.srt"]
    assert list(srt.parse((target / "a.srt").read_text()))
    run("b.wav", *source, "-o", str(target))
    assert (target / "b.txt").read_text() == as_plain(folder.transcripts[1], "text")


def test_audio_may_come_on_stdin(
    folder: Folder, run: Run, source: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO((folder.path / "a.wav").read_bytes())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    result = run(*source, "-")
    assert (result.status, result.out) == (0, as_plain(folder.transcripts[0], "text"))


def test_options_reach_the_model(run: Run, source: tuple[str, ...]) -> None:
    plain = run("a.wav", *source, "--language=en").out
    assert run("a.wav", *source, "--language=en", "--prompt=the quick brown fox").out != plain
    sampled = [
        run("a.wav", *source, "--language=en", "--temperature=1", f"--seed={seed}").out
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1]
    assert len({*sampled, plain}) > 1
    result = run("a.wav", "b.wav", *source, "--language=ja")
    assert re.fullmatch(r"sensorium: .*Unknown language 'ja'\. This model has.*", result.status)
    assert (result.out, result.err) == ("", "")  # it is said once, and not for each file


@pytest.mark.usefixtures("folder")
def test_a_model_that_does_not_transcribe_is_named(
    run: Run, tiny_model: Callable[[str], str]
) -> None:
    model = tiny_model("llama")
    result = run("a.wav", "--model", model, *LOADING)
    assert result.status.startswith(f"sensorium: {model} can't be used: this model does not trans")
    assert "--model" in result.status
    moonshine = tiny_model("moonshine")
    words = ("--format=verbose_json", "--word-timestamps")
    result = run("a.wav", "--model", moonshine, *words, *LOADING)
    assert "does not give the times of words" in result.status


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "there is no file"),
        (["a.wav", "--word-timestamps"], "--word-timestamps needs --format verbose_json"),
        (["a.wav", "b.wav", "--format=srt"], "several files in the format srt need --output-dir"),
        (["a.wav", "x/a.mp3", "-o", "x"], "a.wav and x/a.mp3 would be written to the same file"),
        (["a.wav", "--api-key=x"], "--api-key needs --url"),
        (["a.wav", "--url=localhost"], "--url must begin with http:// or https://"),
        (["a.wav", "--url=http://a", "--device=cpu"], "--device has no effect on a server"),
        (["a.wav", "--format=doc"], "invalid choice: 'doc'"),
        (["a.wav", "--langauge=de"], "did you mean --language?"),
    ],
)
def test_wrong_usage_is_reported_before_anything_is_loaded(
    run: Run, words: list[str], reason: str
) -> None:
    result = run(*words)
    assert result.status == 2
    assert reason in result.err


def test_names_of_files_do_not_move_the_cursor(
    folder: Folder, run: Run, server: ServerProcess, tmp_path: Path
) -> None:
    bad = "\x1b[2J\r\n\x9b"
    for number, name in enumerate((f"{bad}0.wav", f"{bad}1.wav", f"{bad}.txt")):
        shutil.copy(folder.path / ("a.wav", "letter.wav")[number > 0], tmp_path / name)
    os.mkfifo(tmp_path / f"{bad}2.wav")
    result = run(str(tmp_path), "--url", server.get_url(), "--api-key", KEY)
    shown = f"{tmp_path}/\\x1b[2J\\r\\n\\x9b"
    assert result.out.startswith(f"==> {shown}0.wav <==\n")
    assert len(result.err.splitlines()) == 3
    assert f"{shown}1.wav: " in result.err
    assert f"{shown}2.wav: is no regular file\n" in result.err
    assert (result.out + result.err).replace("\n", "").isprintable()
    result = run(str(tmp_path), f"{bad}0.mp3", "-o", "x")
    assert result.err.replace("\n", "").isprintable()


@pytest.mark.usefixtures("folder")
def test_no_model_is_loaded_if_no_file_can_be_read(run: Run) -> None:
    result = run("missing.wav", "--model", "/no/model")
    assert (result.status, result.out) == (1, "")
    assert result.err == "sensorium: missing.wav: can't be read: No such file or directory\n"


def test_a_server_that_can_not_be_used_is_named_once(
    folder: Folder, run: Run, server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.get_url()
    result = run("a.wav", "b.wav", "--url", url)
    assert "key" in result.status
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert run("a.wav", "--url", f"{url}/v1/").status == 0
    monkeypatch.setenv("OPENAI_API_KEY", "of another server")
    monkeypatch.setenv("SENSORIUM_API_KEY", KEY)
    assert run("a.wav", "--url", f"{url}/v1/").status == 0
    result = run("a.wav", "--url", url, "--model", "another")
    assert "another" in result.status
    result = run("a.wav", "b.wav", "--url", "http://127.0.0.1:9")
    assert result.status.startswith("sensorium: the server http://127.0.0.1:9/v1/audio/transcr")
    assert result.err == ""
    result = run("https://example.com/a.wav", "b.wav", "--url", url)
    assert (result.status, result.out) == (1, folder.get_blocks()[1])
    assert "an address can't be sent to a server" in result.err


# ---- in a terminal, and interrupted


class Terminal:
    """The command in a process of its own. Its stderr is a terminal, and its stdout a pipe."""

    def __init__(self, *words: str) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE_COMMAND, "transcribe", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._fd)

    def wait_for_text(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.read(1), self.read_terminal()

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit code when all processes have ended."""
        children = get_descendants(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=240)
        wait_until(lambda: not any(map(is_alive, children)), "all processes end")
        return self.process.returncode

    def read_terminal(self) -> str:
        """Return all that was shown, after the process has ended."""
        shown = b""
        while True:
            try:
                piece = os.read(self._fd, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        return shown.decode(errors="replace")


def make_long(path: Path, seconds: float) -> str:
    path.write_bytes(write_audio(make_audio(seconds, seed=9), "WAV", "PCM_U8"))
    return str(path)


def test_the_progress_bar_moves_within_a_recording_and_ctrl_c_ends_the_command(
    folder: Folder, tmp_path: Path
) -> None:
    audio = make_long(tmp_path / "long.wav", 1200.0)
    pool = ("--mm-processor-pool-size", "1")
    with Terminal(audio, "--model", folder.model, *LOADING, *pool) as terminal:
        terminal.wait_for_text()
        assert terminal.interrupt() == 130
        shown = terminal.read_terminal()
    assert "Traceback" not in shown
    counts = re.findall(r"(\d+)/1200 s of audio", shown)
    assert counts, shown
    assert max(map(int, counts)) < 1200


def test_ctrl_c_ends_the_work_of_a_server(server: ServerProcess, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    before = server.get_metrics(headers=headers)[ABORTED]
    audios = [make_long(tmp_path / f"{index}.wav", 300.0 + index) for index in range(2)]
    with Terminal(*audios, "--url", server.get_url(), "--api-key", KEY) as terminal:
        terminal.wait_for_text()
        assert terminal.interrupt() == 130
        shown = terminal.read_terminal()
    assert "Traceback" not in shown
    assert "0/2" in shown
    wait_until(
        lambda: server.get_metrics(headers=headers)[ABORTED] == before + 2,
        "both transcripts are aborted",
    )


@pytest.mark.parametrize("name", ["-", "pipe.wav"])
def test_ctrl_c_ends_a_wait_for_a_pipe(name: str, tmp_path: Path) -> None:
    """The audio is read to its end before any of it can be sent."""
    pipe = tmp_path / "pipe.wav"
    os.mkfifo(pipe)
    keeper = os.open(pipe, os.O_RDWR)  # otherwise opening it would also wait
    command = [sys.executable, "-c", INTERRUPTIBLE_COMMAND, "transcribe"]
    with subprocess.Popen(
        [*command, "-" if name == "-" else str(pipe), "--url", "http://127.0.0.1:9"],
        stdin=keeper if name == "-" else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as process:
        try:
            os.write(keeper, b"RIFF")
            wait_until(
                lambda: not select.select([keeper], [], [], 0)[0], "it has read all there is"
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(240.0) == 130
        finally:
            process.kill()
            os.close(keeper)
