"""Encoder outputs from elsewhere on the device: from a disk cache, and from a remote encoder."""

from __future__ import annotations

import tempfile

import torch

from sensorium import SamplingParams
from tests.support.encoder import encoding_here
from tests.support.engine import get_token_ids, make_llm

from .setting import get_device, get_directory, get_reference, use_exact_float32

_GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def check_restart(family: str, dtype: str) -> str:
    """Compare the tokens of an engine with those of one that starts after it."""
    use_exact_float32()
    prompts = [each.prompt for each in get_reference(family, getattr(torch, dtype)).expected]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            with make_llm(
                get_directory(family), device=get_device(), dtype=dtype, mm_disk_cache=folder
            ) as llm:
                outputs = llm.generate(prompts, _GREEDY, use_tqdm=False)
                runner = llm.core.runner.encoder_runner
                found.append((get_token_ids(outputs), runner.num_encoded, runner.num_loaded))
    (tokens, num_encoded, num_loaded), again = found
    assert num_encoded
    assert not num_loaded
    assert again[1:] == (0, num_encoded)
    if dtype == "float32":  # in half precision another order of steps may change a token
        assert again[0] == tokens
    return f"{num_encoded} items"


def check_remote_encoder(family: str, dtype: str) -> str:
    """Compare the tokens of an engine with those of one that has a remote encoder."""
    use_exact_float32()
    prompts = [each.prompt for each in get_reference(family, getattr(torch, dtype)).expected]
    options = {"device": get_device(), "dtype": dtype}
    found = []
    with encoding_here(get_directory(family), **options) as encoder:
        for address in (None, encoder.address):
            with make_llm(get_directory(family), encoder=address, **options) as llm:
                outputs = llm.generate(prompts, _GREEDY, use_tqdm=False)
                runner = llm.core.runner.encoder_runner
                found.append((get_token_ids(outputs), runner.num_encoded, runner.num_loaded))
    (tokens, num_encoded, num_loaded), remote = found
    assert num_encoded
    assert not num_loaded
    assert remote[1:] == (0, num_encoded)
    if dtype == "float32":  # in half precision other kernels may change a token
        assert remote[0] == tokens
    return f"{num_encoded} items"
