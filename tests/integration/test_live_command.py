"""The command `transcribe --live` prints the words of a pipe, while they are said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sensorium import cli
from sensorium.embedded import EMBEDDED_MODEL
from tests.integration.speaking import WORDS, speak
from tests.support.server import COMMAND, INTERRUPTIBLE_COMMAND, ROOT, ServerProcess, serve
from tests.support.talking import to_pcm16
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("server-live")
KEY = "a-secret"
TIMEOUT_S = 240.0  # long, because the machine may be busy


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve(EMBEDDED_MODEL, "--api-key", KEY) as running:
        yield running


def start(*arguments: str, key: str = KEY) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE_COMMAND, "transcribe", "--live", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENAI_API_KEY": key},
    )


def test_words_are_printed_while_speech_continues(server: ServerProcess) -> None:
    process = start("-", "--url", server.get_url())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(to_pcm16(speak("speech")))
    process.stdin.flush()
    assert process.stdout.readline().decode() == WORDS["speech"] + "\n"  # stdin is still open
    audio = to_pcm16(speak("question"))
    process.stdin.write(audio[: -2 * 14_000])  # it ends before the silence that ends a turn
    rest, errors = process.communicate(timeout=TIMEOUT_S)
    assert (rest.decode(), errors.decode()) == (WORDS["question"] + "\n", "")
    assert process.returncode == 0


def test_a_file_is_read_to_its_end(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "sound.raw"
    path.write_bytes(to_pcm16(speak(*["speech", "question"] * 2)))
    flags = ["--url", server.get_url("/v1"), "--language", "en", "--model", EMBEDDED_MODEL]
    with path.open("rb") as file:
        found = subprocess.run(
            [sys.executable, "-c", COMMAND, "transcribe", "--live", "-", *flags, "--api-key", KEY],
            stdin=file,
            capture_output=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            check=True,
        )
    assert found.stdout.decode().splitlines() == list(WORDS.values()) * 2


def test_no_audio_at_all_prints_nothing(server: ServerProcess) -> None:
    """Cron and systemd give a command this standard input, which can't be waited for."""
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, "transcribe", "--live", "-", "--url", server.get_url()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OPENAI_API_KEY": KEY},
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")


def test_silence_prints_nothing(server: ServerProcess) -> None:
    process = start("-", "--url", server.get_url())
    output, errors = process.communicate(bytes(32_000), timeout=TIMEOUT_S)
    assert (process.returncode, output, errors) == (0, b"", b"")


def test_an_interruption_ends_the_session(server: ServerProcess) -> None:
    process = start("-", "--url", server.get_url())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(to_pcm16(speak("speech")))
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    process.communicate()
    active = "sensorium:realtime_sessions_active"
    wait_until(lambda: server.get_metrics()[active] == 0, "the session has ended")


def test_the_refusal_of_a_server_is_quoted(server: ServerProcess) -> None:
    process = start("-", "--url", server.get_url(), key="wrong")
    _, errors = process.communicate(b"", timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "this server needs an API key" in errors.decode()
    process = start("-", "--url", server.get_url(), "--model", "other")
    _, errors = process.communicate(b"", timeout=TIMEOUT_S)
    assert "'other' is not served here" in errors.decode()
    process = start("-", "--url", server.get_url(), "--delay", "low")
    _, errors = process.communicate(b"", timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "delay: is not supported by this model" in errors.decode()
    process = start("-", "--url", "http://127.0.0.1:9")
    _, errors = process.communicate(b"", timeout=TIMEOUT_S)
    assert "does not answer" in errors.decode()
    assert "Traceback" not in errors.decode()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--live", "-"], "--live needs a server"),
        (["--live", "sound.wav", "--url", "http://localhost"], "give - as the only file"),
        (["--live", "-", "--url", "http://localhost", "--format", "srt"], "--live prints text"),
        (
            ["--live", "-", "--url", "http://localhost", "--task", "translate"],
            "--live does not translate",
        ),
        (
            ["--live", "-", "--url", "http://localhost", "--delay", "soon"],
            "must be minimal, low, medium",
        ),
        (["--live", "-", "--url", "http://localhost", "--delay", "-80"], "--delay"),
        (["sound.wav", "--delay", "low"], "--delay needs --live"),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sensorium", "transcribe", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
