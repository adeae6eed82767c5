"""Output tokens per second on CUDA of a random Qwen2.5-VL of the shape of the 3B one, in bfloat16.

1, 8 and 64 requests at once, each with an image of 448 × 448 (256 tokens) and `--text` tokens of
text, 128 tokens out, no two images alike; against `model.generate` one at a time. The same weights,
made on the device. Tokens are counted from adding the requests to the last step, encoders included.

A step that decodes is measured twice: by the wall (`decode_step_ms`, all of `core.step()`), and on
the device from the first kernel of its CUDA graph to the chosen tokens (`decode_gpu_ms`). A step
with a prompt of 32 or 1,400 tokens of text is measured on the device from its first kernel to the
logits (`prefill_ms`), and by the wall. `--modes`: which engines are measured, of "eager" (nothing
fused, no graphs), "graphs" (nothing fused) and "fused" (graphs and fusions). `--profile` prints
which kernels a step that decodes spends its time in.

python benchmarks/cuda_offline.py [--modes NAME ...] [--record-to PATH [--commit HASH]]

`--tiny` tries the script with a small model, also without a GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import logging
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from qwen_shapes import IMAGE_PAD
from random_qwen import Prompt, make_model, make_prompts, make_request
from records import write_record
from sensorium import ModelError
from sensorium.engine.assembly.builder import build_engine_core
from sensorium.engine.assembly.config import resolve_limits
from sensorium.engine.assembly.memory import get_free_bytes, plan_memory
from sensorium.engine.assembly.options import EngineOptions
from sensorium.engine.core_process.engine_core import EngineCore
from sensorium.models.hf_model import HfModel
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.multimodal import Transfer

BATCHES = (1, 8, 64)
NUM_OUTPUT_TOKENS = 128
PROMPTS = (32, 1400)
NUM_PREFILLS = 15
MODES = ("eager", "graphs", "fused")
FIGURES = ("tokens_per_s", "decode_step_ms", "decode_gpu_ms")


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def run_reference(model: Any, device: str, prompts: list[Prompt]) -> tuple[float, list[list[int]]]:
    """Return tokens per second of `generate`, one prompt after the other, and the tokens."""
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
            for captured in graphs._captured.values():
                object.__setattr__(captured, "recording", _Timed(captured.recording, self._events))

    def take_median(self) -> float | None:
        """Return the median of the milliseconds since the last call."""
        if not self._events:
            return None
        torch.cuda.synchronize()
        times: list[float] = [start.elapsed_time(end) for start, end in self._events]
        self._events.clear()
        return round(statistics.median(times), 3)


class _Timed:
    """A recording that measures the time of its replays."""

    def __init__(self, recording: Any, events: list[tuple[Any, Any]]) -> None:
        self._recording = recording
        self._events = events

    def replay(self) -> None:
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        self._recording.replay()
        end.record()
        self._events.append((start, end))


def print_kernels(core: EngineCore, prompts: list[Prompt]) -> None:
    """Print where one step of these prompts spends the device's time, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    waiting = {add_prompt(core, prompt) for prompt in prompts}
    while waiting:
        waiting -= {news.request_id for news in core.step()}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        core.step()
        torch.cuda.synchronize()
    while core.has_requests:
        core.step()
    rows = [(e.self_device_time_total, e.count, e.key) for e in profiler.key_averages()]
    rows.sort(reverse=True)
    total, count = sum(row[0] for row in rows), sum(row[1] for row in rows)
    print(f"{len(prompts)} requests: {total / 1e3:.2f} ms in {count} kernels")
    for time, number, name in rows[:24]:
        print(f"{time / 1e3:8.3f} ms {number:5d} times {time / number:7.1f} us  {name[:110]}")


def add_prompt(core: EngineCore, prompt: Prompt) -> str:
    """Add a request, and return its name."""
    token_ids, tensors = prompt
    request = make_request(token_ids, max_tokens=NUM_OUTPUT_TOKENS)
    core.add_request(request, Transfer(payloads={request.mm_features[0].mm_hash: tensors}))
    return request.request_id


def measure_prefills(core: EngineCore) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step with one prompt: its number of tokens -> times.

    The times are those on the device, those of the host until all is launched, and all.
    """
    runner, event = cast(Any, core.runner), cast(Any, torch.cuda.Event)
    forward, compute_logits = runner._forward, runner._hf_model.logits
    start, end = event(enable_timing=True), event(enable_timing=True)

    host_ms: list[float] = []

    def forward_and_time(*arguments: Any) -> Any:
        start.record()
        began = perf_counter()
        hidden = forward(*arguments)
        host_ms.append((perf_counter() - began) * 1e3)
        return hidden

    def compute_and_time(*arguments: Any) -> Any:
        logits = compute_logits(*arguments)
        end.record()
        return logits

    runner._forward, runner._hf_model.logits = forward_and_time, compute_and_time
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
            times.append((start.elapsed_time(end), host_ms[-1], wall))
        columns = (statistics.median(column[3:]) for column in zip(*times, strict=True))
        names = ("gpu", "launching", "wall")
        found[str(num_tokens)] = {
            name: round(value, 2) for name, value in zip(names, columns, strict=True)
        }
    runner._forward, runner._hf_model.logits = forward, compute_logits
    return found


def run_ours(core: EngineCore, prompts: list[Prompt]) -> tuple[float, float, list[list[int]]]:
    """Return tokens per second, the median milliseconds of a decoding step, and the tokens."""
    outputs: dict[str, list[int]] = {}
    decode_ms = []
    start = perf_counter()
    for prompt in prompts:
        outputs[add_prompt(core, prompt)] = []
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


def build_core(
    hf_model: HfModel, backend: str, mode: str, arguments: argparse.Namespace
) -> tuple[EngineCore, dict[str, Any]]:
    """Return an engine, and what it is made of."""
    start = perf_counter()
    options = EngineOptions(
        max_model_len=arguments.text + 1024,
        max_num_seqs=max(get_batches(arguments)),
        kv_cache_memory_bytes=(8 << 30) if hf_model.device.type == "cuda" else (64 << 20),
        attention_backend=backend,
        enforce_eager=mode == "eager",
        fusion=mode == "fused",
    )
    limits = resolve_limits(
        options, text_config=hf_model.text_config, kind=hf_model.kind, device=hf_model.device
    )
    memory = plan_memory(
        hf_model.config,
        options,
        kind=hf_model.kind,
        limits=limits,
        weights_bytes=0,  # they are there already
        element_size=hf_model.dtype.itemsize,
        device=hf_model.device,
    )
    core, config = build_engine_core(
        hf_model,
        options,
        receiver=MirrorReceiver(),
        limits=limits,
        memory=memory,
        most_bytes=get_free_bytes(hf_model.device, options.gpu_memory_utilization),
    )
    return core, {
        "mode": mode,
        "attention_backend": config.attention_backend,
        "graphs": config.graphs,
        "planned_graph_mib": memory.graph_bytes >> 20,
        "fused": config.fused,
        "start_s": round(perf_counter() - start, 1),
    }


def measure_backend(
    hf_model: HfModel, backend: str, mode: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    core, figures = build_core(hf_model, backend, mode, arguments)
    if hf_model.device.type == "cuda":
        figures["prefill_ms"] = measure_prefills(core)
        figures["free_gib"] = round(torch.cuda.mem_get_info()[0] / 2**30, 2)
        print(figures, flush=True)
    gpu_times = GpuTimes(core)
    measured: dict[str, dict[str, Any]] = {name: {} for name in FIGURES}
    for batch in get_batches(arguments):
        run_ours(core, _make_prompts(arguments, batch, seed=1000 + batch))  # first uses
        gpu_times.take_median()
        runs = [
            run_ours(core, _make_prompts(arguments, batch, seed=batch + 100 * r))
            for r in range(arguments.rounds)
        ]
        key = str(batch)
        measured["tokens_per_s"][key] = round(statistics.median(r[0] for r in runs), 1)
        measured["decode_step_ms"][key] = round(statistics.median(r[1] for r in runs), 2)
        measured["decode_gpu_ms"][key] = gpu_times.take_median()
        print(mode, backend, batch, {name: measured[name][key] for name in FIGURES}, flush=True)
        if arguments.profile and mode != "eager":
            print_kernels(core, _make_prompts(arguments, batch, seed=2000 + batch))
        if batch == 1:
            figures["first_output"] = runs[0][2][0]
    return figures | measured


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
    hf_model = HfModel(model)  # from here on its decoder attends through pages
    backends = []
    for mode, backend in itertools.product(arguments.modes, arguments.backends):
        try:
            figures = measure_backend(hf_model, backend, mode, arguments)
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
        "dtype": str(hf_model.dtype).removeprefix("torch."),
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
    # In this order: what was fused stays so.
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES, metavar="NAME")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--record-to", type=Path, metavar="PATH", help="write a record there")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("sensorium").setLevel(logging.INFO)
    figures = measure(arguments)
    if arguments.record_to is not None:
        write_record("cuda_offline", figures, path=arguments.record_to, commit=arguments.commit)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
