"""Measures streaming audio: what a chunk costs as a session grows old, and how many fit.

core: one session of 32,768 chunks of 80 ms, which is 43 minutes. No model runs. Measured is what
the core does for a chunk: it reads the message, admits the features, schedules, gathers the inputs
of the step and frees what the window has passed. Next to it stand the bytes of the messages to and
from the core, and what the session holds in memory.

age: the same over a WebSocket to any server at --url: chunks are sent in blocks of two seconds, and
a block takes until the server has sent its last message for it.

engine: what a chunk of N sessions at once takes in a core with a model of Voxtral-Realtime's shape
and random weights (--tiny: a small one), without frontends. A machine holds as many sessions as it
can compute within 80 ms, in 99 of 100 chunks.

sessions: how long after a commit its text comes, while N clients talk in real time, each for five
seconds at a time. --counts are tried in turn. A server is started unless --url names one.

python benchmarks/realtime.py core [--items N] [--plot FILE] [--record]
python benchmarks/realtime.py age --url URL [--seconds S] [--plot FILE]
python benchmarks/realtime.py engine [--tiny] [--device cuda] [--counts N ...] [--record]
python benchmarks/realtime.py sessions [--url URL] [--counts N ...] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from live_server import LiveServer
from realtime_clients import (
    BLOCK_CHUNKS,
    CHUNK,
    RATE,
    SPEECH_S,
    load_speech,
    make_audio,
    measure_age,
    measure_sessions,
)
from records import write_record
from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.embedded import EMBEDDED_MODEL
from sensorium.engine.assembly.builder import build_core
from sensorium.engine.assembly.frontend import read_checkpoint
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions
from sensorium.engine.core_process import core_messages as messages
from sensorium.engine.core_process.engine_core import EngineCore, PayloadStore
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.errors import CapacityError
from sensorium.types.multimodal import Transfer
from sensorium.types.request import EngineCoreRequest, StreamSpec
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup, ModelRunnerOutput
from sensorium.worker.streaming_runner import StreamingRunner

NUM_ITEMS = 32_768
EARLY, LATE = (1_000, 2_000), 1_000  # the chunks that are compared: these, and the last ones
# The shape of Voxtral-Realtime, but for its width: no numbers are computed.
BINS, FRAMES, WINDOW, WIDTH, BLOCK_SIZE = 128, 8, 8192, 64, 16
PROMPT = 39
TOKEN = 7


# ---- the core, without a model


class SilentModel(SimpleNamespace):
    """What the worker asks of a model, for one that computes nothing."""

    def __init__(self) -> None:
        super().__init__(
            device=torch.device("cpu"),
            dtype=torch.float32,
            bidirectional_modalities=frozenset(),
            has_causal_full_layers=False,
            long_after=None,
            has_mrope=False,
            vocab_size=100_000,
            frames_per_token=FRAMES,
            alignment_heads={},
        )

    def hear(self, _: object, features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros(each.shape[-1] // FRAMES, WIDTH) for each in features]


class SilentRunner(StreamingRunner):
    """A worker that prepares the inputs of each step, and answers with the same token."""

    def _run(self, rows: Any, step: Any) -> Any:
        self._input_batch.prepare(rows, self._unread)
        step = SimpleNamespace(sampled=[state for entry, state in rows if entry.num_sampled])
        for state in step.sampled:
            state.append_token(TOKEN)
        return step

    def finish(self, step: Any) -> ModelRunnerOutput:
        sampled = {state.request.request_id: (TOKEN,) for state in step.sampled}
        return ModelRunnerOutput(token_ids=sampled, logprobs={}, failed_encodes={})


def make_core() -> EngineCore:
    limits = Limits(
        max_model_len=2 * WINDOW,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        encoder_cache_size=2048,
        max_num_encoder_embeds=2048,
    )
    groups = [KVCacheGroup(num_blocks=4 * WINDOW // BLOCK_SIZE, window=WINDOW)]
    hf_model: Any = SilentModel()
    parts: Any = {"kv_cache": None, "attention": None}
    payloads = PayloadStore(MirrorReceiver())
    runner = SilentRunner(
        hf_model, groups=groups, block_size=BLOCK_SIZE, payloads=payloads, **parts
    )
    scheduler = Scheduler(
        limits,
        kv_cache=KVCacheManager(groups, block_size=BLOCK_SIZE),
        encoder_cache=EncoderCacheManager(limits.encoder_cache_size),
    )
    return EngineCore(scheduler, runner, payloads)


def run_session(num_items: int) -> Iterator[tuple[float, int, int]]:
    """Yield for each chunk its cost in microseconds, and the bytes to and from the core."""
    core = make_core()
    core.add_request(
        EngineCoreRequest(
            request_id="session",
            prompt_token_ids=(1,) * PROMPT,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=None),
            eos_token_ids=(2,),
            stream=StreamSpec(num_delay_tokens=6),
        ),
        Transfer(),
    )
    features = np.zeros((BINS, FRAMES), np.float32)
    for index in range(num_items + PROMPT):
        header = messages.encode_message(messages.AppendAudio("session", BINS))
        frame = memoryview(bytearray(features.tobytes()))
        began = perf_counter_ns()
        message = messages.decode_to_core(header)
        if not isinstance(message, messages.AppendAudio):
            raise TypeError(f"this is no AppendSound: {message}")
        outputs = core.append_audio(message.request_id, messages.decode_audio(message, [frame]))
        while core.has_requests:
            outputs += core.step()
        cost_us = (perf_counter_ns() - began) / 1e3
        if index < PROMPT:
            continue  # the first chunks are the audio of the prompt
        answer = messages.encode_message(messages.CoreOutputs((), tuple(outputs)))
        yield cost_us, len(header) + len(frame), len(answer)


def measure_core(num_items: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    costs, sent, received = (list(each) for each in zip(*run_session(num_items), strict=True))
    early, late = slice(*EARLY), slice(num_items - LATE, num_items)
    held = measure_memory(num_items)
    figures = {
        "num_items": num_items,
        "chunk_us": {
            "early": round(statistics.median(costs[early]), 2),
            "late": round(statistics.median(costs[late]), 2),
        },
        "ratio_late_to_early": round(
            statistics.median(costs[late]) / statistics.median(costs[early]), 3
        ),
        "mean_ratio_late_to_early": round(
            statistics.fmean(costs[late]) / statistics.fmean(costs[early]), 3
        ),
        "p99_us": {
            "early": round(float(np.percentile(costs[early], 99)), 1),
            "late": round(float(np.percentile(costs[late], 99)), 1),
        },
        "bytes_to_core": {
            "early": statistics.fmean(sent[early]),
            "late": statistics.fmean(sent[late]),
        },
        "bytes_from_core": {
            "early": statistics.fmean(received[early]),
            "late": statistics.fmean(received[late]),
        },
        "held_kib": held,
    }
    return figures, {"cost of a chunk in the core (µs)": costs}


def measure_memory(num_items: int) -> dict[str, float]:
    """Return the most that a session holds in the middle, with a full window, and at its end.

    In KiB. Blocks behind the window are dropped many at a time, so the most of some thousand chunks
    counts.
    """
    held = {"middle": 0.0, "end": 0.0}
    tracemalloc.start()
    try:
        for index, _ in enumerate(run_session(num_items)):
            since_middle, is_end = index - num_items // 2, index >= num_items - 4 * LATE
            if 0 <= since_middle < 4 * LATE or is_end:
                name = "end" if is_end else "middle"
                now = round(tracemalloc.get_traced_memory()[0] / 1024, 1)
                held[name] = max(held[name], now)
    finally:
        tracemalloc.stop()
    return held


# ---- a core with a model


def make_model(folder: Path, device: str, *, is_tiny: bool) -> Path:
    """Write a model with random weights."""
    config = transformers.VoxtralRealtimeConfig()
    if is_tiny:
        config = transformers.VoxtralRealtimeConfig(
            audio_config={"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4},
            text_config={
                "model_type": "voxtral_realtime_text",
                "num_hidden_layers": 2,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 4096,
            },
        )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.VoxtralRealtimeForConditionalGeneration(config)
    model.to(torch.float32 if is_tiny else torch.bfloat16).save_pretrained(folder)
    return folder


def measure_engine(
    directory: Path, device: str, counts: Sequence[int], num_rounds: int
) -> dict[str, Any]:
    loading = LoadingOptions(model=str(directory), device=device, use_tqdm_on_load=False)
    options = EngineOptions(max_model_len=2 * WINDOW, max_num_seqs=max(counts) + 1)
    checkpoint = read_checkpoint(loading)
    built = build_core(loading, checkpoint, options=options, receiver=MirrorReceiver())
    config = checkpoint.hf_config
    bins = config.audio_config.num_mel_bins
    print(built.config, flush=True)
    figures: dict[str, Any] = {}
    for count in counts:
        try:
            found = time_rounds(built.core, count, num_rounds, bins)
        except CapacityError as error:
            print(f"{count} sessions: {error}", flush=True)
            break
        print(f"{count} sessions: {json.dumps(found)}", flush=True)
        figures[str(count)] = found
    return {
        "sessions": figures,
        "parameters": sum(p.numel() for p in built.hf_model.model.parameters()),
    }


def time_rounds(
    core: EngineCore, num_sessions: int, num_rounds: int, bins: int
) -> dict[str, float]:
    """Give all sessions 80 ms of audio at a time, and return how long they take, in ms."""
    names = [f"s{index}" for index in range(num_sessions)]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    try:
        for name in names:
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=(1,) * PROMPT,
                sampling_params=params,
                stream=StreamSpec(num_delay_tokens=6),
            )
            core.add_request(request, Transfer())
            core.append_audio(name, torch.randn(bins, PROMPT * FRAMES, generator=generator))
        while core.has_requests:
            core.step()
        times: list[float] = []
        for _ in range(num_rounds):
            audio = torch.randn(num_sessions, bins, FRAMES, generator=generator)
            began = monotonic()
            for name, features in zip(names, audio, strict=True):
                core.append_audio(name, features)
            num_tokens = 0
            while core.has_requests:
                num_tokens += sum(len(output.new_token_ids) for output in core.step())
            times.append(1e3 * (monotonic() - began))
            if num_tokens != num_sessions:
                raise RuntimeError(f"{num_sessions} sessions got {num_tokens} tokens")
    finally:
        core.abort_requests(names)
        core.step()
    late = times[num_rounds // 2 :]  # the windows of the encoder are full
    return {
        "p50_ms": round(statistics.median(late), 2),
        "p99_ms": round(float(np.percentile(late, 99)), 2),
        "first_ms": round(statistics.median(times[: num_rounds // 10]), 2),
    }


def plot(curves: Mapping[str, Sequence[float]], path: Path, *, step_s: float) -> None:
    """Draw curves over the age of a session, each smoothed by a running median."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for name, values in curves.items():
        size = max(1, len(values) // 200)
        smooth = [statistics.median(values[i : i + size]) for i in range(0, len(values), size)]
        minutes = [i * size * step_s / 60 for i in range(len(smooth))]
        axes.plot(minutes, smooth, label=name)
    axes.set_xlabel("age of the session (minutes)")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


@contextmanager
def open_server(url: str | None, model: str, num_sessions: int) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with TemporaryDirectory() as folder:
        flags = ("--port", "0", "--max-realtime-sessions", str(num_sessions))
        with LiveServer(model, *flags, log=Path(folder) / "log") as server:
            yield server.wait_for_url()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("core", "age", "engine", "sessions"))
    parser.add_argument("--items", type=int, default=NUM_ITEMS, help="chunks of the session")
    parser.add_argument("--url", help="a server; the default is one of the embedded model")
    parser.add_argument("--model", help="its model, which vLLM has to be told")
    parser.add_argument("--seconds", type=float, help="how long a session lasts")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--device", default="cpu", help="cpu (the default) or cuda")
    parser.add_argument("--rounds", type=int, default=400, help="chunks of each session")
    parser.add_argument("--tones", action="store_true", help="say tones, not speech")
    parser.add_argument("--plot", type=Path, help="write the curves to this PNG")
    parser.add_argument("--record", action="store_true", help="write a record")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    arguments = parser.parse_args()
    curves: dict[str, list[float]] = {}
    figures: dict[str, Any]
    step_s = CHUNK / RATE
    with ExitStack() as stack:
        if arguments.what == "core":
            figures, curves = measure_core(arguments.items)
        elif arguments.what == "engine":
            folder = Path(stack.enter_context(TemporaryDirectory()))
            directory = make_model(folder / "model", arguments.device, is_tiny=arguments.tiny)
            figures = measure_engine(
                directory, arguments.device, arguments.counts, arguments.rounds
            )
        elif arguments.what == "age":
            if arguments.url is None:
                parser.error("age needs --url")
            seconds = arguments.seconds or NUM_ITEMS * step_s
            curves = asyncio.run(measure_age(arguments.url, seconds, arguments.model))
            (costs,) = curves.values()
            fifth = max(1, len(costs) // 5)
            figures = {
                "first_fifth_ms": round(statistics.median(costs[:fifth]), 1),
                "last_fifth_ms": round(statistics.median(costs[-fifth:]), 1),
            }
            step_s *= BLOCK_CHUNKS
        else:
            most = max(arguments.counts)
            url = stack.enter_context(open_server(arguments.url, EMBEDDED_MODEL, most))
            audio = make_audio(SPEECH_S) if arguments.tones else load_speech()
            figures = {"speech_s": SPEECH_S, "sessions": {}}
            asyncio.run(measure_sessions(url, 1, audio, 1.0))  # not counted: the first is slower
            for count in arguments.counts:
                seconds = arguments.seconds or 30.0
                found = asyncio.run(measure_sessions(url, count, audio, seconds))
                print(f"{count} sessions: {json.dumps(found)}", flush=True)
                figures["sessions"][str(count)] = found
    if arguments.plot is not None and curves:
        plot(curves, arguments.plot, step_s=step_s)
    if arguments.record:
        name = f"realtime_{arguments.what}"
        print(f"record: {write_record(name, figures, commit=arguments.commit).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
