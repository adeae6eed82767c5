"""One prompt after the other that almost fills the context, each unlike the one before.

A server that computes a prompt as a whole lets everybody else wait until it is done: seconds on a
CPU, for a request that is within all limits.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager

import httpx

from attacks.asking import keep_asking

FLAGS: tuple[str, ...] = ()
NUM_TOKENS = 7820
_NUM_CLIENTS = 2  # so that one prompt waits while another is computed
_MAX_REQUESTS = 200  # of each client, so that the attack ends by itself
_TIMEOUT_S = 300.0


def attack(url: str, num_tokens: int = NUM_TOKENS) -> AbstractContextManager[list[int]]:
    """Send such prompts until the block ends. The list fills with the answers' statuses."""
    numbers = random.Random()  # other prompts in each attack, or they would be cached

    def ask(client: httpx.Client) -> httpx.Response:
        prompt = [numbers.randrange(300, 4000) for _ in range(num_tokens)]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        return client.post("/v1/completions", json=body)

    return keep_asking(
        url,
        ask,
        num_clients=_NUM_CLIENTS,
        max_requests=_MAX_REQUESTS,
        timeout_s=_TIMEOUT_S,
    )
