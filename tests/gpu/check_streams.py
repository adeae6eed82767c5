"""Streaming audio on the device has the tokens of the CPU, with overlapped steps.

The core is asked without a frontend, because the tokenizer of these models is not on all machines.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import torch
import transformers

from sensorium import SamplingParams
from sensorium.engine.assembly.builder import build_core
from sensorium.engine.assembly.frontend import read_checkpoint
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.multimodal import Transfer
from sensorium.types.request import EngineCoreRequest, StreamSpec
from tiny_models.building import rescale

from .setting import get_device, use_exact_float32

_BINS, _FRAMES, _PROMPT, _VOCABULARY = 80, 8, 15, 2000
_NUM_CHUNKS = (60, 700, 90)  # the second one is renumbered
_DELAYS = (6, 1, 30)


@cache
def make_model() -> str:
    directory = tempfile.mkdtemp()
    config = transformers.VoxtralRealtimeConfig(
        audio_config={
            "num_mel_bins": _BINS,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "intermediate_size": 64,
            "hidden_size": 32,
            "sliding_window": 40,
        },
        text_config={
            "model_type": "voxtral_realtime_text",
            "vocab_size": _VOCABULARY,
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 24,
        },
    )
    model: Any = transformers.VoxtralRealtimeForConditionalGeneration(config)
    model = rescale(model)
    model.model.multi_modal_projector.linear_2.weight.data *= 100.0
    model.save_pretrained(directory)
    return directory


def run(device: str, *, overlap: bool) -> dict[str, list[int]]:
    """Return the tokens of three recordings that come chunk by chunk, at different speeds."""
    loading = LoadingOptions(
        model=make_model(), device=device, dtype="float32", use_tqdm_on_load=False
    )
    core = build_core(
        loading,
        read_checkpoint(loading),
        options=EngineOptions(max_model_len=1024, overlap=overlap),
        receiver=MirrorReceiver(),
    ).core
    generator = torch.Generator().manual_seed(0)
    audios = {
        f"s{index}": torch.randn(_BINS, num * _FRAMES, generator=generator).split(_FRAMES, dim=1)
        for index, num in enumerate(_NUM_CHUNKS)
    }
    for name, delay in zip(audios, _DELAYS, strict=True):
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=(1,) * _PROMPT,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
            stream=StreamSpec(num_delay_tokens=delay),
        )
        core.add_request(request, Transfer())
    return _listen(core, audios)


def _listen(core: EngineCore, audios: dict[str, tuple[torch.Tensor, ...]]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {name: [] for name in audios}
    for place in range(max(map(len, audios.values()))):
        outputs = []
        for index, (name, chunks) in enumerate(audios.items()):
            if place < len(chunks):
                is_last = place == len(chunks) - 1
                outputs += core.append_audio(name, chunks[place].contiguous(), is_last=is_last)
            if index == place % 3:
                outputs += core.step()  # before the others have their audio
        while core.has_requests:
            outputs += core.step()
        for output in outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.new_token_ids
    assert not core.scheduler.requests
    assert [pool.num_used for pool in core.scheduler.kv_cache.statistics()] == [0]
    return tokens


def check_streams(overlap: bool) -> str:
    use_exact_float32()
    ours, theirs = run(get_device(), overlap=overlap), run("cpu", overlap=False)
    assert len({token for each in theirs.values() for token in each}) > 20
    assert ours == theirs
    return f"{sum(map(len, ours.values()))} tokens of {len(ours)} recordings"
