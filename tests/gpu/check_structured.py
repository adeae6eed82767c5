"""Answers that follow a grammar, on the device: they are right, and cost no further wait a step."""

from __future__ import annotations

import json

import torch

from sensorium import SamplingParams

from .check_syncs import NUM_STEPS, count_syncs
from .setting import get_reference, make_device_llm, need_cuda

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 60},
        "kind": {"enum": ["small", "large"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def check_structured_answers(name: str, dtype: torch.dtype) -> str:
    """Half of a batch has a random schema; the others have the tokens that they have alone."""
    llm = make_device_llm(name, dtype)
    prompts = [entry.prompt for entry in get_reference(name, dtype).expected[:4]]
    free = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    bound = [
        SamplingParams(
            structured_outputs={"json": _SCHEMA},  # type: ignore[arg-type]
            temperature=1.0,
            seed=seed,
            max_tokens=200,
        )
        for seed in range(4)
    ]
    alone = [output.outputs[0].token_ids for output in llm.generate(prompts, free, use_tqdm=False)]
    outputs = llm.generate([*prompts, *prompts], [free] * 4 + bound, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs[4:]]
    for text in texts:
        answer = json.loads(text)
        assert 40 <= len(answer["name"]) <= 60, text
        assert answer["kind"] in ("small", "large"), text
    if dtype is torch.float32:
        mixed = [output.outputs[0].token_ids for output in outputs[:4]]
        assert mixed == alone, "rows without a schema have other tokens if others have one"
    return f"{len(texts)} answers, e.g. {texts[0][:60]!r}"


def check_structured_syncs(name: str) -> str:
    need_cuda()
    llm = make_device_llm(name, torch.float32)
    params = SamplingParams(
        structured_outputs={"json": _SCHEMA},  # type: ignore[arg-type]
        temperature=0.0,
        max_tokens=200,
    )
    for entry in get_reference(name, torch.float32).expected[:4]:
        llm._add(entry.prompt, params)
    requests = llm.core.scheduler.requests
    while not all(request.num_output_tokens for request in requests.values()):
        llm.core.step()
    llm.core.step()  # first uses
    places = count_syncs(lambda: [llm.core.step() for _ in range(NUM_STEPS)])
    assert len(requests) == 4, "a request ended, so not every step decoded"
    assert not places, f"{NUM_STEPS} steps waited at {dict(places)}"
    return f"{NUM_STEPS} steps of 4 requests with a schema never waited for all work of the device"
