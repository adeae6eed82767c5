"""One prompt after the other that almost fills the context, each unlike the one before.

A server that computes a prompt as a whole lets everybody else wait until it is done: seconds on a
CPU, for a request that is within all limits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

FLAGS: tuple[str, ...] = ()
NUM_TOKENS = 7820
_NUM_CLIENTS = 2  # so that one prompt waits while another is computed
_MAX_REQUESTS = 200  # of each client, so that the attack ends by itself
_TIMEOUT_S = 300.0


@contextmanager
def attack(url: str, num_tokens: int = NUM_TOKENS) -> Iterator[list[int]]:
    """Send such prompts until the block ends. The list fills with the answers' statuses."""
    statuses: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        numbers = random.Random()  # other prompts in each attack, or they would be cached
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            for _ in range(_MAX_REQUESTS):
                prompt = [numbers.randrange(300, 4000) for _ in range(num_tokens)]
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
                statuses.append(client.post("/v1/completions", json=body).status_code)
                if is_over.is_set():
                    return

    threads = [threading.Thread(target=run) for _ in range(_NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
