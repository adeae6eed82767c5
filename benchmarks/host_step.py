"""Measures what the host does in a step in which all requests decode: everything but the forward.

Planning, the preparation of the batch, sampling and taking the results of 64 requests of 1,404
prompt tokens, with the worker and the scheduler of the engine. The model is replaced by one that
returns the same tensor in every step, and its vocabulary is small, so that what a device would
compute takes next to nothing. The path is that of CUDA graphs, with tensors in host memory; the
path without graphs is also measured.

python benchmarks/host_step.py [--requests N] [--steps N] [--record]

The last line of the output is JSON: medians in microseconds for one step. To compare two commits,
run it with `benchmarks/beside.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import torch

from records import write_record
from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.engine.core_process.engine_core import EngineCore, PayloadStore
from sensorium.layers.attention.torch_backend import TorchPagedAttention
from sensorium.layers.kv_layout import LayerSpec, group_layers
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.multimodal import Transfer
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup
from sensorium.worker.graphs.building import Graphs
from sensorium.worker.graphs.decode_buffers import DecodeBuffers
from sensorium.worker.graphs.decode_graphs import DecodeGraphs, DecodeResult
from sensorium.worker.kv_cache import KVCache
from sensorium.worker.model_runner import ModelRunner

VOCAB_SIZE = 64
PROMPT_TOKENS = 1404
BLOCK_SIZE = 16
CPU = torch.device("cpu")
KINDS = {
    "greedy": SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=1),
    "sampled": SamplingParams(temperature=0.8, top_k=0, top_p=1.0, seed=1),
    "filtered": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=1),
}


class ConstantModel:
    """A model that returns a constant tensor, and has positions of three kinds."""

    device = CPU
    dtype = torch.float32
    vocab_size = VOCAB_SIZE
    bidirectional_modalities: frozenset[str] = frozenset()
    has_causal_full_layers = False
    has_mrope = True
    long_after = None

    def __init__(self, max_rows: int) -> None:
        self._logits = torch.zeros(max_rows, VOCAB_SIZE)
        self._logits[:, 7] = 1.0
        self._empty = torch.zeros(1, 1, 1)

    def choosing_factors(self, _: torch.Tensor | None) -> AbstractContextManager[None]:
        return nullcontext()

    def embed(self, input_ids: torch.Tensor, *_: object) -> tuple[torch.Tensor, dict[str, Any]]:
        return self._empty.expand(1, len(input_ids), 1), {}

    def forward(self, embeds: torch.Tensor, *_: object) -> torch.Tensor:
        return embeds[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]

    def get_mrope_positions(
        self, token_ids: Sequence[int], *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(len(token_ids)).expand(3, -1), torch.zeros(3, 1, dtype=torch.int64)


class ConstantGraphs(DecodeGraphs):
    """Graphs that fill their input buffers as the real ones do, and then compute nothing."""

    def __init__(self, buffers: DecodeBuffers, logits: torch.Tensor) -> None:
        self._buffers = buffers
        self._sizes = tuple(range(8, len(logits) + 1, 8))
        self._constant = DecodeResult(logits=logits, likeliest=logits.argmax(-1))

    def replay(self, rows: Sequence[Any], size: int, *unread: Any) -> DecodeResult:
        self._buffers.fill(rows, size, *unread)
        return self._constant.get_front(len(rows))


def make_core(num_requests: int, num_tokens: int, *, has_graphs: bool) -> EngineCore:
    limits = Limits(
        max_model_len=num_tokens,
        max_num_batched_tokens=8192,
        max_num_seqs=num_requests,
        encoder_cache_size=1,
        max_num_encoder_embeds=1,
    )
    spec = LayerSpec(layer_index=0, num_kv_heads=1, key_dim=1, value_dim=1, window=None, source=0)
    groups = (KVCacheGroup(num_blocks=num_requests * (num_tokens // BLOCK_SIZE + 1) + 1),)
    hf_model: Any = ConstantModel(num_requests)
    buffers = DecodeBuffers(
        groups=groups,
        block_size=BLOCK_SIZE,
        max_batch=num_requests,
        max_model_len=num_tokens,
        has_mrope=True,
        has_long_factors=False,
        device=CPU,
    )
    graphs = ConstantGraphs(buffers, hf_model.logits(torch.empty(num_requests)))
    payloads = PayloadStore(MirrorReceiver())
    runner = ModelRunner(
        hf_model,
        kv_cache=KVCache(
            group_layers([spec]), groups, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
        ),
        groups=groups,
        block_size=BLOCK_SIZE,
        attention=TorchPagedAttention(block_size=BLOCK_SIZE, dtype=torch.float32),
        payloads=payloads,
        graphs=Graphs(decoding=graphs) if has_graphs else Graphs(),
    )
    scheduler = Scheduler(
        limits,
        kv_cache=KVCacheManager(groups, block_size=BLOCK_SIZE),
        encoder_cache=EncoderCacheManager(1),
    )
    return EngineCore(scheduler, runner, payloads)


def run(params: SamplingParams, num_requests: int, num_steps: int, *, has_graphs: bool) -> float:
    """Return the median of the microseconds that a step takes."""
    num_tokens = PROMPT_TOKENS + num_steps + 64
    core = make_core(num_requests, num_tokens, has_graphs=has_graphs)
    for index in range(num_requests):
        prompt = (index % 100, *range(1, PROMPT_TOKENS))
        request = EngineCoreRequest(
            request_id=f"r{index}",
            prompt_token_ids=tuple(token % VOCAB_SIZE for token in prompt),
            sampling_params=replace(params, max_tokens=num_steps + 32, ignore_eos=True),
        )
        assert core.add_request(request, Transfer()) is None
    while any(r.num_output_tokens < 4 for r in core.scheduler.requests.values()):
        core.step()
    return statistics.median(list(_time_steps(core, num_steps)))


def _time_steps(core: EngineCore, num_steps: int) -> Iterator[float]:
    for _ in range(num_steps):
        begun = perf_counter_ns()
        core.step()
        yield (perf_counter_ns() - begun) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--record", action="store_true", help="write records/host_step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, dict[str, float]] = {
        ("graphs" if has_graphs else "eager"): {
            kind: round(run(params, arguments.requests, arguments.steps, has_graphs=has_graphs), 1)
            for kind, params in KINDS.items()
        }
        for has_graphs in (True, False)
    }
    if arguments.record:
        print("written to", write_record("host_step", figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
