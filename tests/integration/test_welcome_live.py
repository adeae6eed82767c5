"""The page's live mode in a real browser, with a file of speech as its microphone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.speech.live.audio import write_wav
from tests.integration.speaking import WORDS, speak
from tests.support.server import ServerProcess, serve
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.browsing import Browser

pytestmark = pytest.mark.xdist_group("server-page")
KEY = "a-secret"
WAIT_S = 120.0
# Notes each text of the button and of the status line, which may be there for a moment only.
_WATCH = """
for (const [name, chosen] of [["seenButton", "#live"], ["seenStatus", ".turn [role=status]"]]) {
  const seen = window[name] = [], watched = document.querySelector(chosen);
  const note = (changes) => changes.forEach((change) =>
    change.addedNodes.forEach((node) => seen.push(node.textContent)));
  new MutationObserver(note).observe(watched, {childList: true});
}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve(EMBEDDED_MODEL, "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a browser with a microphone that repeats two sentences."""
    from tests.integration.browsing import Browser, find_browser

    paths = find_browser()
    if paths is None:
        pytest.skip("there is no Chromium with its driver")
    path: Path = tmp_path_factory.mktemp("microphone") / "speech.wav"
    path.write_bytes(write_wav(speak(*WORDS)))
    opened = Browser(*paths, f"--use-file-for-fake-audio-capture={path}")
    yield opened
    opened.close()


def open_page(browser: Browser, server: ServerProcess) -> None:
    browser.open(server, max_tokens=None)
    if not browser.find("#live").is_displayed():
        browser.find("#key").send_keys(KEY + "\t")
        browser.wait_for("#live")
    browser.allow_status(401)  # before the key was given


def get_lines(browser: Browser) -> list[str]:
    return [text for text in browser.get_texts(".live p") if text]


def test_words_appear_while_they_are_said(server: ServerProcess, browser: Browser) -> None:
    open_page(browser, server)
    browser.click("#live")
    wait_until(lambda: browser.find("#live").text == "Stop listening", "it listens", WAIT_S)
    wait_until(lambda: len(get_lines(browser)) >= 2, "words appear", WAIT_S)
    assert browser.get_texts(".turn [role=status]") == ["Listening …"]  # and it still listens
    browser.run(_WATCH)
    browser.click("#live")
    wait_until(
        lambda: browser.get_texts(".turn [role=status]") == ["Transcribed live."], "it ends", WAIT_S
    )
    # What was seen meanwhile, however soon it ended.
    finishing = "Finishing: what was said last is being written down …"
    assert browser.run("return window.seenStatus") == [finishing, "Transcribed live."]
    assert browser.run("return window.seenButton") == ["Finishing …", "Listen live"]
    assert browser.find("#live").text == "Listen live"
    assert browser.get_texts(".failure") == []
    # Chromium resamples the file, and plays it from somewhere within.
    said = " ".join(get_lines(browser))
    assert WORDS["speech"] in said or WORDS["question"] in said
    active = "sensorium:realtime_sessions_active"
    wait_until(lambda: server.get_metrics()[active] == 0, "the session has ended")
    browser.assert_clean()


def test_listening_can_be_stopped_at_once(server: ServerProcess, browser: Browser) -> None:
    open_page(browser, server)
    browser.click("#live")
    wait_until(lambda: browser.find("#live").text == "Stop listening", "it listens", WAIT_S)
    browser.click("#stop")
    wait_until(lambda: browser.find("#live").text == "Listen live", "it has stopped", WAIT_S)
    active = "sensorium:realtime_sessions_active"
    wait_until(lambda: server.get_metrics()[active] == 0, "the session has ended")
    browser.assert_clean()


def test_a_connection_that_is_too_slow_ends_the_session_with_a_reason(
    server: ServerProcess, browser: Browser
) -> None:
    open_page(browser, server)
    browser.run(
        "Object.defineProperty(WebSocket.prototype, 'bufferedAmount', {get: () => 1 << 20})"
    )
    browser.click("#live")
    wait_until(lambda: browser.get_texts(".failure") != [], "it has ended", WAIT_S)
    (words,) = browser.get_texts(".failure")
    assert "too slow" in words
    assert browser.find("#live").text == "Listen live"
    active = "sensorium:realtime_sessions_active"
    wait_until(lambda: server.get_metrics()[active] == 0, "the session has ended")
    browser.assert_clean()


def test_a_refused_session_is_reported(server: ServerProcess, browser: Browser) -> None:
    open_page(browser, server)
    browser.run("document.getElementById('key').value = 'wrong'")
    browser.click("#live")
    wait_until(lambda: browser.get_texts(".failure") != [], "it is refused", WAIT_S)
    assert browser.get_texts(".failure") == ["The server takes no live session now."]
    assert browser.find("#live").text == "Listen live"
    browser.driver.get_log("browser")  # the refusal, which the browser reports in its own words
