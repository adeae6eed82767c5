"""Output tokens per second on CUDA of a random Qwen2.5-VL of the shape of the 3B one, in bfloat16.

1, 8 and 64 requests at once, each with an image of 448 × 448 (256 tokens) and `--text` tokens of
text, 128 tokens out, no two images alike; against `model.generate` one at a time. The same weights,
made on the device. Tokens are counted from adding the requests to the last step, encoders included.

A step that decodes is measured twice: by the wall (`decode_step_ms`, all of `core.step()`), and on
the device from before its buffers are filled to the chosen tokens (`decode_gpu_ms`, where it is a
CUDA graph).
A step with a prompt of 32 or 1,400 tokens of text is measured on the device from its first kernel
to the logits (`prefill_ms`), and by the wall. `--no-eager` leaves out the engine without
graphs.

python benchmarks/cuda_offline.py [--backends NAME ...] [--record-to PATH [--commit HASH]]

`--tiny` tries the script with a small model, also without a GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from random_qwen import IMAGE_PAD, Prompt, make_model, make_prompts, make_request
from records import write_record
from sensorium import ModelError
from sensorium.engine.builder import build_engine_core
from sensorium.engine.config import EngineOptions, resolve_limits
from sensorium.engine.engine_core import EngineCore
from sensorium.engine.memory import get_free_bytes, plan_memory
from sensorium.models.adapter import ModelAdapter
from sensorium.multimodal.cache.uncached import UncachedReceiver
from sensorium.types.transfer import Transfer

BATCHES = (1, 8, 64)
NUM_OUTPUT_TOKENS = 128
PROMPTS = (32, 1400)
NUM_PREFILLS = 15
FIGURES = ("tokens_per_s", "decode_step_ms", "decode_gpu_ms")


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def run_reference(model: Any, device: str, prompts: list[Prompt]) -> tuple[float, list[list[int]]]:
    """Tokens per second of `generate`, one prompt after the other, and the tokens."""
    outputs = []
    _synchronize(device)
    start = perf_counter()
    for token_ids, tensors in prompts:
        input_ids = torch.tensor([token_ids], device=device)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            **{name: tensor.to(device) for name, tensor in tensors.items()},
        }
        if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
            inputs["mm_token_type_ids"] = (input_ids == IMAGE_PAD).int()
        model.base_model.rope_deltas = None
        output = model.generate(**inputs, max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False)
        outputs.append(output[0, len(token_ids) :].tolist())
    elapsed = perf_counter() - start
    return sum(map(len, outputs)) / elapsed, outputs


class GpuTimes:
    """How long the replays of an engine's graphs take on the device."""

    def __init__(self, core: EngineCore) -> None:
        self._events: list[tuple[Any, Any]] = []
        runner: Any = core.runner
        graphs = runner._graphs.decoding
        if graphs is not None:
            self._replay = graphs.replay
            graphs.replay = self._time

    def _time(self, *arguments: Any) -> Any:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        result = self._replay(*arguments)
        end.record()
        self._events.append((start, end))
        return result

    def take_median(self) -> float | None:
        """Return the median of the milliseconds since the last call."""
        if not self._events:
            return None
        torch.cuda.synchronize()
        times: list[float] = [start.elapsed_time(end) for start, end in self._events]
        self._events.clear()
        return round(statistics.median(times), 3)


def measure_prefills(core: EngineCore) -> dict[str, dict[str, float]]:
    """Milliseconds of a step with one prompt, by its number of tokens: on the device, and all."""
    runner, event = cast(Any, core.runner), cast(Any, torch.cuda.Event)
    forward, compute_logits = runner._forward, runner._adapter.logits
    start, end = event(enable_timing=True), event(enable_timing=True)

    def forward_and_time(*arguments: Any) -> Any:
        start.record()
        return forward(*arguments)

    def compute_and_time(*arguments: Any) -> Any:
        logits = compute_logits(*arguments)
        end.record()
        return logits

    runner._forward, runner._adapter.logits = forward_and_time, compute_and_time
    random, found = torch.Generator().manual_seed(0), {}
    for num_tokens in PROMPTS:
        times = []
        for _ in range(NUM_PREFILLS):
            ids = torch.randint(100, 150_000, (num_tokens,), generator=random).tolist()
            core.add_request(make_request(ids, max_tokens=1), Transfer(payloads={}))
            began = perf_counter()
            core.step()
            wall = (perf_counter() - began) * 1e3
            torch.cuda.synchronize()
            times.append((start.elapsed_time(end), wall))
        gpu, wall = (statistics.median(column[3:]) for column in zip(*times, strict=True))
        found[str(num_tokens)] = {"gpu": round(gpu, 2), "wall": round(wall, 2)}
    runner._forward, runner._adapter.logits = forward, compute_logits
    return found


def run_ours(core: EngineCore, prompts: list[Prompt]) -> tuple[float, float, list[list[int]]]:
    """Tokens per second, the median milliseconds of a step that only decodes, and the tokens."""
    outputs: dict[str, list[int]] = {}
    decode_ms = []
    start = perf_counter()
    for token_ids, tensors in prompts:
        request = make_request(token_ids, max_tokens=NUM_OUTPUT_TOKENS)
        core.add_request(request, Transfer(payloads={request.mm_features[0].mm_hash: tensors}))
        outputs[request.request_id] = []
    while core.has_requests:
        is_decode = all(outputs.values())
        step_start = perf_counter()
        for news in core.step():
            if news.error is not None:
                raise RuntimeError(news.error)
            outputs[news.request_id] += news.new_token_ids
        if is_decode:
            decode_ms.append((perf_counter() - step_start) * 1e3)
    elapsed = perf_counter() - start
    speed = sum(map(len, outputs.values())) / elapsed
    return speed, statistics.median(decode_ms), list(outputs.values())


def measure_backend(
    adapter: ModelAdapter, backend: str, arguments: argparse.Namespace, *, enforce_eager: bool
) -> dict[str, Any]:
    start = perf_counter()
    batches = get_batches(arguments)
    options = EngineOptions(
        max_model_len=arguments.text + 1024,
        max_num_seqs=max(batches),
        kv_cache_memory_bytes=(8 << 30) if adapter.device.type == "cuda" else (64 << 20),
        attention_backend=backend,
        enforce_eager=enforce_eager,
    )
    limits = resolve_limits(options, text_config=adapter.text_config, device=adapter.device)
    memory = plan_memory(
        adapter.config,
        limits=limits,
        weights_bytes=0,  # they are there already
        kv_cache_bytes=options.kv_cache_memory_bytes,
        num_kv_tokens=limits.max_model_len,
        element_size=adapter.dtype.itemsize,
    )
    free_bytes = get_free_bytes(adapter.device, options.gpu_memory_utilization)
    core, config = build_engine_core(
        adapter,
        options,
        receiver=UncachedReceiver(),
        limits=limits,
        memory=memory,
        most_bytes=free_bytes,
    )
    figures: dict[str, Any] = {
        "attention_backend": config.attention_backend,
        "graphs": config.graphs,
        "start_s": round(perf_counter() - start, 1),
        **{name: {} for name in FIGURES},
    }
    if adapter.device.type == "cuda":
        figures["prefill_ms"] = measure_prefills(core)
        figures["free_gib"] = round(torch.cuda.mem_get_info()[0] / 2**30, 2)
        print(figures, flush=True)
    gpu_times = GpuTimes(core)
    for batch in batches:
        run_ours(core, _make_prompts(arguments, batch, seed=1000 + batch))  # first uses
        gpu_times.take_median()
        runs = [
            run_ours(core, _make_prompts(arguments, batch, seed=batch + 100 * r))
            for r in range(arguments.rounds)
        ]
        key = str(batch)
        figures["tokens_per_s"][key] = round(statistics.median(r[0] for r in runs), 1)
        figures["decode_step_ms"][key] = round(statistics.median(r[1] for r in runs), 2)
        figures["decode_gpu_ms"][key] = gpu_times.take_median()
        values = (figures[name][key] for name in FIGURES)
        print(backend, batch, "at once:", *zip(FIGURES, values, strict=True), flush=True)
        if batch == 1:
            figures["first_output"] = runs[0][2][0]
    return figures


def get_batches(arguments: argparse.Namespace) -> tuple[int, ...]:
    return (1, 2) if arguments.tiny else BATCHES


def _make_prompts(arguments: argparse.Namespace, num_prompts: int, *, seed: int) -> list[Prompt]:
    return make_prompts(num_prompts, seed=seed, num_text_tokens=arguments.text)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(device, is_tiny=arguments.tiny)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e9:.2f}B parameters on {device}", flush=True)
    run_reference(model, device, _make_prompts(arguments, 1, seed=999))  # first uses
    reference = [
        run_reference(model, device, _make_prompts(arguments, 1, seed=1 + 100 * r))
        for r in range(arguments.rounds)
    ]
    speed = statistics.median(r[0] for r in reference)
    print(f"generate: {speed:.1f} tokens/s", flush=True)
    adapter = ModelAdapter(model)  # from here on its decoder attends through pages
    backends = []
    modes = [False] if arguments.no_eager else [False, True]
    for backend, enforce_eager in itertools.product(arguments.backends, modes):
        try:
            figures = measure_backend(adapter, backend, arguments, enforce_eager=enforce_eager)
        except ModelError as error:
            print(f"{backend}: {error}")
            continue
        expected = reference[0][1][0]
        ours = figures.pop("first_output")
        figures["equal_tokens_before_the_first_difference"] = next(
            (i for i, (a, b) in enumerate(zip(ours, expected, strict=True)) if a != b), len(ours)
        )
        figures["ratio"] = {k: round(v / speed, 2) for k, v in figures["tokens_per_s"].items()}
        backends.append(figures)
    return {
        "model": "tiny" if arguments.tiny else "Qwen2.5-VL-3B shape, random",
        "num_parameters": num_parameters,
        "dtype": str(adapter.dtype).removeprefix("torch."),
        "num_prompt_tokens": len(_make_prompts(arguments, 1, seed=0)[0][0]),
        "num_output_tokens": NUM_OUTPUT_TOKENS,
        "generate_tokens_per_s": round(speed, 1),
        "backends": backends,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often each is measured")
    parser.add_argument("--backends", nargs="+", default=["auto"], metavar="NAME")
    parser.add_argument("--text", type=int, default=1146, help="tokens of text in a prompt")
    parser.add_argument("--no-eager", action="store_true", help="only with graphs")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--record-to", type=Path, metavar="PATH", help="write a record there")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    arguments = parser.parse_args()
    figures = measure(arguments)
    if arguments.record_to is not None:
        write_record("cuda_offline", figures, path=arguments.record_to, commit=arguments.commit)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
