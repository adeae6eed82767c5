"""Clients that send one request after the other, each behind the answer to the one before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def keep_asking(
    url: str,
    ask: Callable[[httpx.Client], httpx.Response],
    *,
    num_clients: int,
    max_requests: int,
    timeout_s: float,
    pause_s: float = 0.0,
) -> Iterator[list[int]]:
    """Let clients ask until the block ends. The list fills with the statuses of their answers.

    Each client sends `max_requests` at most, and waits for `pause_s` between two of them.
    """
    statuses: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=url, timeout=timeout_s) as client:
            for _ in range(max_requests):
                statuses.append(ask(client).status_code)
                if is_over.wait(pause_s):
                    return

    threads = [threading.Thread(target=run) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
