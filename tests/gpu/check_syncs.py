"""How often the host waits for all work of the device: never in steps that decode.

For the tokens of a step it waits by an event, while the next step is already in the device's queue.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import sensorium
from sensorium import LLM
from tests.parity.reference import GREEDY

from .setting import get_reference, make_device_llm, need_cuda

NUM_STEPS = 8  # fewer than the tokens of a request


def count_syncs(run: Callable[[], object]) -> Counter[str]:
    """The places in Python at which torch waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return Counter(place for place in places if "torch/cuda/__init__.py" not in place)  # the switch


def _get_ours(places: Counter[str]) -> dict[str, int]:
    package = str(Path(sensorium.__file__).parent)
    return {
        place.removeprefix(f"{package}/"): count
        for place, count in places.items()
        if place.startswith(package)
    }


def check_decode_syncs(name: str, dtype: torch.dtype, backend: str) -> str:
    need_cuda()
    llm = make_device_llm(name, dtype, attention_backend=backend)
    _add(llm, name, 4)
    requests = llm.core.scheduler.requests
    while not all(request.num_output_tokens for request in requests.values()):
        llm.core.step()
    llm.core.step()  # first uses
    places = count_syncs(lambda: [llm.core.step() for _ in range(NUM_STEPS)])
    assert len(requests) == 4, "a request ended, so not every step decoded"
    assert not places, f"{NUM_STEPS} steps waited at {dict(places)}"
    return f"{NUM_STEPS} decode steps never waited for all work of the device"


def check_encoder_syncs(name: str) -> str:
    """Check that a step that encodes adds one wait of ours, however many items it has.

    The model's own encoder may wait as well.
    """
    need_cuda()
    llm = make_device_llm(name, torch.float32)
    prompts = [entry.prompt for entry in get_reference(name, torch.float32).expected]
    llm.generate(prompts[:2], GREEDY, use_tqdm=False)  # first uses
    llm = make_device_llm(name, torch.float32)
    _add(llm, name, 8)
    places = count_syncs(llm.core.step)
    ours = _get_ours(places)
    assert sum(ours.values()) <= 2, f"waited at {ours}"
    return f"ours {ours}, all {places.total()}"


def _add(llm: LLM, name: str, count: int) -> None:
    for entry in get_reference(name, torch.float32).expected[:count]:
        llm._add(entry.prompt, GREEDY)
