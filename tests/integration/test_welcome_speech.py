"""The page at `/` of a model that transcribes, in a real browser: words at their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.integration.speaking import make_brief, make_wav
from tests.parity.cases import make_audio
from tests.support.clients import make_png
from tests.support.media import write_audio
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.browsing import Browser

pytestmark = pytest.mark.xdist_group("server-page")
ROUTE = "/v1/audio/transcriptions"
TIMES = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
LONG_S = 7.0
WAIT_S = 120.0
BOTH = """
  const send = window.fetch;
  window.fetch = async (path, options) => {
    const answer = await send(path, options);
    if (path !== "v1/models") return answer;
    const models = await answer.json();
    models.data[0].capabilities = ["chat", "completions", "transcription"];
    return Response.json(models);
  };
"""
PLAYER = "const player = document.querySelector('#turns :is(audio, video)');"


@pytest.fixture(scope="module")
def whisper_server(
    tiny_model: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    directory = make_brief(tiny_model("whisper"), tmp_path_factory.mktemp("page") / "whisper")
    with serve(str(directory)) as server:
        yield server


@pytest.fixture(scope="module")
def moonshine_server(tiny_model: Callable[[str], str]) -> Iterator[ServerProcess]:
    with serve(tiny_model("moonshine")) as server:
        yield server


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def ask_directly(server: ServerProcess, audio: bytes, **fields: Any) -> Any:
    files = {"file": ("sound.wav", audio)}
    answer = httpx.post(server.get_url(ROUTE), data=fields, files=files, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for_transcripts(browser: Browser, number: int) -> None:
    """Wait until so many files are transcribed, or have failed."""

    def is_done() -> bool:
        turns = browser.find_all(".turn")
        done = [turn for turn in turns if "Listening" not in turn.text]
        return len(done) == len(turns) == number

    wait_until(is_done, f"{number} transcripts are there", WAIT_S)


def find_now(browser: Browser) -> int:
    """Return the index of the word that is lit, or -1. The same word may come more than once."""
    script = "return [...document.querySelectorAll('.word')].findIndex(e => e.matches('.now'))"
    return int(browser.run(script))


def test_a_model_that_only_transcribes_offers_no_chat(
    whisper_server: ServerProcess, browser: Browser
) -> None:
    browser.open(whisper_server, max_tokens=None)
    for selector in ("#question", "#send", "#examples", "#max-tokens", "#intro h2.chat"):
        assert not browser.find(selector).is_displayed()
    assert browser.find("#intro h2.speech-only").is_displayed()
    assert browser.find("#composer label.speech").is_displayed()
    assert browser.find("#composer").get_attribute("aria-label") == "Your recording"
    assert browser.find("#sounds").get_attribute("aria-label") == "Transcribe audio or a video"


def test_words_of_a_dropped_recording_light_up_at_their_times(
    whisper_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    audio = make_wav(LONG_S)
    expected = ask_directly(whisper_server, audio, **TIMES)
    browser.open(whisper_server, max_tokens=None)
    browser.drag(write(tmp_path / "talk.wav", audio))
    wait_for_transcripts(browser, 1)
    texts = [segment["text"].strip() for segment in expected["segments"]]
    assert [text.strip() for text in browser.get_texts(".transcript li p")] == texts
    words = [word["word"] for word in expected["words"]]
    assert browser.get_texts(".word") == words
    summary = f"Transcribed · {expected['language']} · 7.0 s · {len(words)} words"
    assert browser.get_texts(".turn [role=status]") == [summary]

    long = max(range(len(words)), key=lambda i: get_length(expected["words"][i]))
    word = expected["words"][long]
    assert get_length(word) > 0.5
    middle = (word["start"] + word["end"]) / 2
    browser.run(f"{PLAYER} player.currentTime = arguments[0]", middle)
    wait_until(lambda: find_now(browser) == long, "the word at this time is lit")
    elsewhere = expected["words"][0 if long else -1]["start"]
    browser.run(f"{PLAYER} player.currentTime = arguments[0]", elsewhere)
    wait_until(lambda: find_now(browser) != long, "it is no longer lit")
    browser.find_all(".word")[long].click()  # plays it, from its beginning on
    assert browser.run(f"{PLAYER} return player.currentTime") >= word["start"] - 0.01
    wait_until(lambda: find_now(browser) == long, "the word that is played is lit")
    wait_until(
        lambda: browser.run(f"{PLAYER} return player.currentTime") > word["end"], "it plays on"
    )
    wait_until(lambda: find_now(browser) != long, "the next words are played")


def get_length(word: dict[str, Any]) -> float:
    return float(word["end"] - word["start"])


def test_keys_go_through_the_times_of_a_transcript(
    whisper_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    from selenium.webdriver.common.keys import Keys

    audio = make_wav(LONG_S)
    segments = ask_directly(whisper_server, audio, **TIMES)["segments"]
    browser.open(whisper_server, max_tokens=None)
    browser.find("#sounds").send_keys(str(write(tmp_path / "talk.wav", audio)))
    wait_for_transcripts(browser, 1)
    assert len(browser.find_all(".time[tabindex='0']")) == 1
    focused = "return document.activeElement.getAttribute('aria-label')"
    browser.run("document.querySelector('.time').focus()")
    assert browser.run(focused) == "Play from 0:00"
    buttons = browser.find_all(".time")
    buttons[0].send_keys(Keys.ARROW_DOWN)
    assert browser.run("return document.activeElement") == buttons[1]
    buttons[1].send_keys(Keys.END, Keys.ARROW_DOWN)
    assert browser.run("return document.activeElement") == buttons[-1]
    assert [button.get_attribute("tabindex") for button in buttons].count("0") == 1
    buttons[-1].send_keys(Keys.HOME)
    buttons[0].send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    wait_until(
        lambda: browser.run(f"{PLAYER} return player.currentTime") >= segments[2]["start"] - 0.01,
        "it plays from there",
    )


def test_several_files_and_a_recording_are_transcribed_in_turn(
    whisper_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    browser.open(whisper_server, max_tokens=None)
    paths = [write(tmp_path / f"{seed}.wav", make_wav(seed=seed)) for seed in (1, 2)]
    browser.find("#sounds").send_keys("\n".join(map(str, paths)))
    wait_for_transcripts(browser, 2)
    browser.click("#record")
    wait_until(lambda: browser.find("#record").text == "Stop recording", "it records")
    time.sleep(2.0)
    browser.click("#record")
    wait_for_transcripts(browser, 3)
    names = browser.get_texts(".asked p")
    assert names[:2] == ["1.wav", "2.wav"]
    assert names[2].startswith("voice ")
    assert browser.get_texts(".failure") == []


def test_files_without_audio_are_reported(
    whisper_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    browser.open(whisper_server, max_tokens=None)
    browser.drag(write(tmp_path / "noise.png", make_png(1, height=28, width=28)))
    wait_until(lambda: browser.find("#notice").text != "", "it is refused")
    assert browser.find("#notice").text == "noise.png is no audio or video."
    browser.allow_status(400)
    browser.drag(write(tmp_path / "letter.txt", b"Dear server, this is a letter. " * 20))
    wait_for_transcripts(browser, 1)
    (words,) = browser.get_texts(".failure")
    assert words.startswith("this file can't be opened as audio")
    browser.find("#sounds").send_keys(str(write(tmp_path / "talk.wav", make_wav())))
    wait_for_transcripts(browser, 2)
    assert len(browser.find_all(".transcript")) == 1


def test_a_transcript_can_be_stopped_and_cleared(
    whisper_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    audio = write_audio(make_audio(600.0, seed=7), "WAV", "PCM_U8")
    browser.open(whisper_server, max_tokens=None)
    browser.run(
        """
        const [make, revoke] = [URL.createObjectURL, URL.revokeObjectURL];
        window.held = new Set();
        URL.createObjectURL = (file) => (held.add(make(file)), [...held].at(-1));
        URL.revokeObjectURL = (url) => (held.delete(url), revoke(url));
        """
    )
    browser.find("#sounds").send_keys(str(write(tmp_path / "long.wav", audio)))
    is_busy = {"server_load": 1}
    wait_until(lambda: whisper_server.get("/load").json() == is_busy, "it listens", WAIT_S)
    browser.click("#stop")
    wait_for_transcripts(browser, 1)
    assert browser.get_texts(".failure") == ["Stopped."]
    wait_until(lambda: whisper_server.get("/load").json() == {"server_load": 0}, "it rests")
    assert browser.run("return held.size") == 1
    assert browser.find("#new").text == "Clear"
    browser.click("#new")
    assert browser.find_all(".turn") == []
    assert browser.run("return held.size") == 0
    assert browser.run("return document.activeElement.id") == "sounds"


def test_without_times_of_words_segments_light_up(
    moonshine_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    audio = make_wav(seed=4)
    expected = ask_directly(moonshine_server, audio, response_format="verbose_json")
    browser.open(moonshine_server, max_tokens=None)
    browser.allow_status(400)  # to the question for words
    browser.drag(write(tmp_path / "talk.wav", audio))
    wait_for_transcripts(browser, 1)
    assert browser.get_texts(".failure") == []
    segments = [segment["text"].strip() for segment in expected["segments"]]
    marks = browser.run(
        "return [...document.querySelectorAll('.word')].map((word) => word.textContent)"
    )
    assert marks == segments
    assert browser.get_texts(".turn [role=status]") == ["Transcribed · unknown · 2.5 s · 1 segment"]


def test_a_model_that_chats_and_transcribes_has_both(
    whisper_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    """No model of the tests does both, so the page is given other words about this one."""
    command = "Page.addScriptToEvaluateOnNewDocument"
    script = browser.driver.execute_cdp_cmd(command, {"source": BOTH})
    try:
        browser.open(whisper_server)
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert browser.find("#question").is_displayed()
    assert browser.find("#intro h2.chat").is_displayed()
    assert not browser.find("#intro h2.speech-only").is_displayed()
    path = write(tmp_path / "talk.wav", make_wav())
    browser.drop(path)  # it is attached to the question
    browser.find("#sounds").send_keys(str(path))
    wait_for_transcripts(browser, 1)
    assert len(browser.find_all(".transcript")) == 1
    assert len(browser.find_all("#media li")) == 1
