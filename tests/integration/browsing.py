"""Drives a real browser without a window (Selenium), as a person would use the server's page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.server import ServerProcess
from tests.support.waiting import wait_until

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--window-size=1000,800"),
    # The page gets a fake microphone that beeps, and may use it without asking.
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
_TIMEOUT_S = 120.0
_HAS_BEGUN = (
    "return ['model', 'notice'].some((id) => document.getElementById(id).textContent !== '')"
)


def find_browser() -> tuple[str, str] | None:
    """Return the paths of Chromium and its driver, or `None` if this machine lacks them."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (chromium, driver) if chromium and driver else None


class Browser:
    """A browser with a new profile. Its methods are named after what a person does."""

    def __init__(self, chromium: str, driver: str, *flags: str) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS, *flags):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(driver))
        self._origin = ""
        self._allowed_status = 0

    def close(self) -> None:
        self.driver.quit()

    def open(self, server: ServerProcess, max_tokens: int | None = 6) -> None:
        self._origin = server.get_url()
        self._allowed_status = 0
        self.driver.get(server.get_url("/"))
        wait_until(lambda: self.run(_HAS_BEGUN), "the page knows the model, or why not", _TIMEOUT_S)
        if max_tokens is not None:
            self.set_max_tokens(max_tokens)

    def set_max_tokens(self, number: int) -> None:
        field = self.find("#max-tokens")
        field.clear()
        field.send_keys(str(number))

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def get_texts(self, selector: str) -> list[str]:
        return [element.text for element in self.find_all(selector)]

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def wait_for(self, selector: str) -> None:
        wait_until(lambda: self.find(selector).is_displayed(), f"{selector} shows", _TIMEOUT_S)

    def choose(self, path: Path) -> None:
        num_before = len(self.find_all("#media li"))
        self.find("#files").send_keys(str(path))
        self.wait_for_attached(num_before + 1)

    def drop(self, path: Path) -> None:
        """Drop a file on the page, with the events that a window system would send."""
        num_before = len(self.find_all("#media li"))
        self.drag(path)
        self.wait_for_attached(num_before + 1)

    def drag(self, path: Path) -> None:
        """Drop a file on the page, and don't wait for what it does."""
        dragged = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": 300, "y": 200, "data": dragged}
            self.driver.execute_cdp_cmd("Input.dispatchDragEvent", event)

    def wait_for_attached(self, number: int) -> None:
        wait_until(lambda: len(self.find_all("#media li")) == number, "it is attached", _TIMEOUT_S)

    def ask(self, question: str) -> str:
        """Ask a question, and return the answer when it is complete."""
        num_before = len(self.find_all(".turn"))
        self.find("#question").send_keys(question, Keys.ENTER)
        self.wait_for_answer(num_before + 1)
        return self.get_answer()

    def get_answer(self) -> str:
        """Return the last answer, or the part of it that has come so far."""
        return self.find_all(".answer")[-1].get_attribute("textContent") or ""

    def wait_for_answer(self, num_turns: int) -> None:
        def is_there() -> bool:
            answers = self.find_all(".answer")
            busy = [answer.get_attribute("aria-busy") for answer in answers]
            return busy == ["false"] * num_turns

        wait_until(is_there, f"answer {num_turns} is complete", _TIMEOUT_S)

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def allow_status(self, status: int) -> None:
        """Allow this status in the log, where browsers report every response that is an error."""
        self._allowed_status = status

    def assert_clean(self) -> None:
        allowed = f"the server responded with a status of {self._allowed_status} "
        complaints = [entry["message"] for entry in self.driver.get_log("browser")]
        assert [words for words in complaints if allowed not in words] == []
        events = [json.loads(entry["message"]) for entry in self.driver.get_log("performance")]
        asked = [
            event["message"]["params"]["request"]["url"]
            for event in events
            if event["message"]["method"] == "Network.requestWillBeSent"
        ]
        hosts = {urlsplit(url.removeprefix("blob:")).netloc for url in asked}
        assert hosts <= {urlsplit(self._origin).netloc, ""}  # "" is the host of a `data:` URL
