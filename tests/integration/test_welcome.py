"""The page at `/`: its files over HTTP, and what a person does with it in a real browser."""

from __future__ import annotations

import base64
import io
import re
import time
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from sensorium.server.http.welcome import WELCOME_PATHS
from tests.support.clients import MODEL, Message, Part, ask, make_mp4, make_png, make_wav
from tests.support.server import ServerProcess
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from tests.integration.browsing import Browser

pytestmark = pytest.mark.xdist_group("server-page")
SEED = 900  # of media that no other test has sent to this server
SPARED = ["✓ not decoded again", "✓ not sent again", "✓ in the prefix cache"]
NOT_SPARED = ["decoded, processed", "sent to the model", "encoded"]
# What the page sends to the route for chat, kept where the test can read it.
KEEP_REQUESTS = """
    window.sent = [];
    const send = window.fetch;
    window.fetch = (path, options) => (window.sent.push(options), send(path, options));
"""


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def ask_directly(server: ServerProcess, messages: list[Message], max_tokens: int) -> str:
    body = {"messages": messages, "max_tokens": max_tokens}
    answer: Any = server.post("/v1/chat/completions", body).json()
    return str(answer["choices"][0]["message"]["content"])


def make_part(kind: str, content_type: str, content: bytes) -> Part:
    url = f"data:{content_type};base64,{base64.b64encode(content).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@pytest.mark.parametrize("path", sorted(WELCOME_PATHS))
def test_files_come_with_rules_and_only_when_they_changed(
    omni_server: ServerProcess, path: str
) -> None:
    page = omni_server.get(path)
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "unsafe" not in policy
    assert page.headers["cache-control"] == "no-cache"
    head = httpx.head(omni_server.get_url(path), timeout=60.0)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "content-security-policy"):
        assert head.headers[name] == page.headers[name]
    known = {"If-None-Match": f'"another", W/{page.headers["etag"]}'}
    same = omni_server.get(path, headers=known)
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == page.headers["etag"]
    assert omni_server.get(path, headers={"If-None-Match": '"old"'}).content == page.content


def test_files_are_small_and_name_no_other_host(omni_server: ServerProcess) -> None:
    texts = [omni_server.get(path).text for path in WELCOME_PATHS]
    assert sum(len(text.splitlines()) for text in texts) < 1050
    addresses = [word for text in texts for word in re.findall(r"https?://[^\"'\s]*", text)]
    assert addresses == ["http://www.w3.org/2000/svg"]  # a namespace, which is never fetched


def test_a_dropped_picture_is_processed_once(
    omni_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    picture = make_png(SEED, height=140, width=140)
    browser.open(omni_server)
    wait_until(lambda: browser.find("#model").text == MODEL, "the page knows the model")
    browser.drop(write(tmp_path / "noise.png", picture))
    first = browser.ask("What is this?")
    messages = ask(make_part("image", "image/png", picture), "What is this?")
    assert first == ask_directly(omni_server, messages, 6)
    assert browser.get_texts(".chip") == NOT_SPARED
    assert "0 of" in browser.find(".trace p").text

    second = browser.ask("And now?")  # the conversation continues, with the picture in it
    messages += [{"role": "assistant", "content": first}, *ask("And now?")]
    assert second == ask_directly(omni_server, messages, 6)
    assert browser.get_texts(".chip") == NOT_SPARED + SPARED
    assert "the first time" in browser.find_all(".trace p")[1].text
    bars = browser.run(
        "return [...document.querySelectorAll('.turn:last-child .bars')].map("
        "(cell) => [...cell.children].map((bar) => bar.style.width))"
    )
    assert all(len(pair) == 2 for pair in bars)
    assert "100%" in [width for pair in bars for width in pair]

    browser.click("#new")
    assert browser.find("#intro").is_displayed()
    browser.choose(tmp_path / "noise.png")
    assert browser.ask("What is this?") == first
    assert browser.get_texts(".chip") == SPARED


def test_an_example_is_asked_about_with_one_click(
    omni_server: ServerProcess, browser: Browser
) -> None:
    browser.open(omni_server)
    assert len(browser.find_all("#examples button")) == 4
    browser.run(
        "for (let i = 0; i < 2; i++) document.querySelectorAll('#examples button')[2].click()"
    )
    browser.wait_for_answer(1)
    assert browser.get_texts(".asked p") == ["What does it say?"]
    assert browser.get_texts(".trace .items b") == ["Picture"]
    assert browser.get_answer()
    assert browser.get_texts(".remark") == ["Cut off by the limit of tokens."]
    assert browser.find_all("#media li") == []  # two clicks ask once
    assert browser.find("#question").get_attribute("value") == ""


# In one go, as a quick person does: a large file is chosen, and something is clicked at once.
CHOOSE_AND_CLICK = """
  const [encoded, clicked] = arguments;
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  const rest = Uint8Array.from({length: 4e6}, (_, at) => at % 251);
  window.large = new File([bytes, rest], "large.png", {type: "image/png"});
  const chosen = new DataTransfer();
  chosen.items.add(large);
  document.querySelector("#files").files = chosen.files;
  document.querySelector("#files").dispatchEvent(new Event("change"));
  document.querySelector(clicked).click();
"""
IS_SENT_WHOLE = """
  const reader = new FileReader();
  const isRead = new Promise((resolve) => (reader.onloadend = resolve));
  reader.readAsDataURL(large);
  return Promise.all([sent[0].body.text(), isRead]).then(
    ([text]) => JSON.parse(text).messages[0].content[0].image_url.url === reader.result);
"""


def test_a_file_that_is_still_being_read_is_not_lost(
    omni_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    picture = make_png(SEED, height=56, width=56)
    encoded = base64.b64encode(picture).decode()
    browser.open(omni_server)
    browser.choose(write(tmp_path / "noise.png", picture))
    browser.run(CHOOSE_AND_CLICK, encoded, "#media .remove")
    wait_until(lambda: bool(browser.find_all("#media [title='large.png']")), "it is attached")
    browser.click("#media .remove")
    browser.run(KEEP_REQUESTS)
    browser.run("document.querySelector('#key').value = 'schlüssel'")
    browser.run(CHOOSE_AND_CLICK, encoded, "#send")
    browser.wait_for_answer(1)
    assert browser.get_texts(".trace .items b") == ["Picture"]
    assert browser.run(IS_SENT_WHOLE)
    # Headers are bytes: those of a key are UTF-8, as the server has it.
    key = browser.run("return sent[0].headers.Authorization").encode("latin-1")
    assert key == "Bearer schlüssel".encode()


def test_audio_and_video_reach_the_model(
    omni_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    audio, video = make_wav(SEED), make_mp4(SEED)
    browser.open(omni_server)
    browser.choose(write(tmp_path / "melody.wav", audio))
    browser.drop(write(tmp_path / "clip.mp4", video))
    parts = [make_part("audio", "audio/wav", audio), make_part("video", "video/mp4", video)]
    assert browser.ask("What is it?") == ask_directly(omni_server, ask(*parts, "What is it?"), 6)
    assert browser.get_texts(".trace .items b") == ["Audio", "Video"]


def test_a_recording_is_plain_wav(omni_server: ServerProcess, browser: Browser) -> None:
    browser.open(omni_server)
    browser.run(KEEP_REQUESTS)
    browser.click("#record")
    wait_until(lambda: browser.find("#record").text == "Stop recording", "it records")
    time.sleep(3.0)  # it beeps once a second, and begins late on a busy machine
    browser.find("#question").send_keys("\n\n")  # what was said is the question
    browser.wait_for_answer(1)
    assert browser.get_texts(".trace .items b") == ["Audio"]
    assert browser.find("#record").text == "Record"
    url = browser.run(
        "return sent[0].body.text().then("
        "(text) => JSON.parse(text).messages[0].content[0].audio_url.url)"
    )
    with wave.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as audio:
        form = (audio.getframerate(), audio.getnchannels(), audio.getsampwidth())
        samples = memoryview(audio.readframes(audio.getnframes())).cast("h")
    assert form == (16000, 1, 2)
    assert 4000 < len(samples) < 60 * 16000
    assert max(samples) > 1000  # the beep


def test_a_recording_survives_the_end_of_its_microphone(
    omni_server: ServerProcess, browser: Browser
) -> None:
    browser.open(omni_server)
    browser.run(
        "const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);"
        "navigator.mediaDevices.getUserMedia = async (wish) => (window.stream = await ask(wish))"
    )
    browser.click("#record")
    wait_until(lambda: browser.find("#record").text == "Stop recording", "it records")
    time.sleep(2.0)
    browser.run("stream.getTracks()[0].stop()")
    time.sleep(0.3)
    browser.click("#record")
    browser.wait_for_attached(1)


def test_files_that_are_no_media_are_reported(
    omni_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    browser.open(omni_server)
    letter = write(tmp_path / "letter.txt", b"Dear")
    browser.find("#files").send_keys(f"{letter}\n{write(tmp_path / '$&.png', b'no picture')}")
    browser.wait_for_attached(1)
    assert browser.find("#notice").text == "letter.txt is no picture, video or audio."
    browser.allow_status(400)
    browser.ask("What is this?")
    (words,) = browser.get_texts(".failure")
    assert words.startswith("$&.png: this is not an image of a supported format")
    # The question is back: without the file, it can be asked.
    browser.click("#media .remove")
    assert browser.ask("")
    assert browser.get_texts(".asked p") == ["What is this?"] * 2


# Within the page: on a busy machine an answer may end before a driver has looked at it.
ACT_WHEN_IT_GROWS = """
  const act = new Function(arguments[0]);
  new MutationObserver((_, observer) => {
    const answer = document.querySelector(".answer");
    if ((answer?.textContent.length ?? 0) <= 5) return;
    observer.disconnect();
    window.wasBusy = answer.ariaBusy;
    window.hadFocus = document.activeElement.id;
    act();
  }).observe(document.querySelector("#turns"), {childList: true, subtree: true});
"""


def test_an_answer_streams_and_can_be_stopped(omni_server: ServerProcess, browser: Browser) -> None:
    browser.open(omni_server, max_tokens=1500)
    browser.run(ACT_WHEN_IT_GROWS, "document.querySelector('#stop').click()")
    browser.find("#question").send_keys("Count.")
    browser.click("#send")
    browser.wait_for_answer(1)
    assert browser.run("return window.wasBusy") == "true"
    assert browser.run("return [window.hadFocus, document.activeElement.id]") == ["stop", "send"]
    assert browser.get_texts(".failure") == ["Stopped."]
    wait_until(lambda: omni_server.get("/load").json() == {"server_load": 0}, "the server rests")
    stopped = browser.get_answer()
    browser.set_max_tokens(6)
    messages = [*ask("Count."), {"role": "assistant", "content": stopped}, *ask("Go on.")]
    assert browser.ask("Go on.") == ask_directly(omni_server, messages, 6)


def test_keys_do_what_the_hint_says(omni_server: ServerProcess, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(omni_server, max_tokens=1500)
    escape = "dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))"
    browser.run(ACT_WHEN_IT_GROWS, f"document.querySelector('#question').{escape}")
    question = browser.find("#question")
    question.send_keys("Count", Keys.SHIFT, Keys.ENTER, Keys.NULL, "on.", Keys.ENTER)
    wait_until(lambda: bool(browser.find_all(".answer")), "it is sent")
    assert browser.get_texts(".asked p") == ["Count\non."]
    browser.wait_for_answer(1)
    assert browser.get_texts(".failure") == ["Stopped."]


def test_a_new_conversation_ends_the_answer_and_keeps_nothing(
    omni_server: ServerProcess, browser: Browser, tmp_path: Path
) -> None:
    browser.open(omni_server, max_tokens=1500)
    browser.run(
        """
        const [make, revoke] = [URL.createObjectURL, URL.revokeObjectURL];
        window.held = new Set();
        URL.createObjectURL = (file) => (held.add(make(file)), [...held].at(-1));
        URL.revokeObjectURL = (url) => (held.delete(url), revoke(url));
        """
    )
    browser.run(ACT_WHEN_IT_GROWS, "document.querySelector('#new').click()")
    browser.choose(write(tmp_path / "noise.png", make_png(SEED, height=56, width=56)))
    assert browser.run("return held.size") == 1
    browser.find("#question").send_keys("Count.\n")
    wait_until(lambda: browser.run("return held.size") == 0, "the picture is forgotten")
    assert browser.find_all(".turn") == []
    wait_until(lambda: omni_server.get("/load").json() == {"server_load": 0}, "the server rests")
