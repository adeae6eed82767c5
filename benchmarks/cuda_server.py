"""A server under load: times to the first token and throughput, of ours or of any other.

Starts our server on a model (`--serve DIR`, flags for it behind `--`) or asks one that runs already
(`--url`, e.g. vLLM). `--make DIR` first makes a random Qwen2.5-VL of the shape of the 3B one there,
with the tokenizer and the processor of the tiny one.

  first      TTFT of a picture that was never sent; 1024 × 1024, PNG as a data URL
  repeat     TTFT of the same picture and prompt
  new_text   TTFT of the same picture behind another text
  text       TTFT of text alone
  fresh      128 requests with 128 pictures, 32 at a time, 64 tokens out
  seen       256 requests with 4 pictures that were sent before, 32 at a time, 64 tokens out
  chat       128 requests of text, 64 at a time, 256 tokens out
  stream     2 requests of text, one after the other, 256 tokens out

Requests are built before the clock runs, and sent by several processes. TTFT are medians.

python benchmarks/cuda_server.py (--serve DIR | --url URL) [--cases NAME ...] [--record-to PATH]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from live_server import LiveServer
from records import write_record

SIDE = 1024
NUM_PROBES = 7
NUM_CLIENTS = 8
MODEL = "m"
# Of vLLM 0.26 with one API process on the same kind of machine, with the same loads, measured at
# another time and by another script.
VLLM = {
    "text": "20.5 ms",
    "first": "196 ms",
    "repeat": "75 ms",
    "new_text": "104 ms",
    "fresh": "11.8 req/s",
    "seen": "25-34 req/s",
    "chat": "11200-12500 tok/s",
    "stream": "315 tok/s",
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """A closed loop of requests."""

    num_requests: int
    num_at_once: int
    max_tokens: int
    num_pictures: int = 0
    are_seen: bool = False


LOADS = {
    "fresh": Load(num_requests=128, num_at_once=32, max_tokens=64, num_pictures=128),
    "seen": Load(num_requests=256, num_at_once=32, max_tokens=64, num_pictures=4, are_seen=True),
    "chat": Load(num_requests=128, num_at_once=64, max_tokens=256),
    "stream": Load(num_requests=2, num_at_once=1, max_tokens=256),
}


# ---- requests


def make_picture(seed: int, side: int) -> str:
    """A smooth picture with a little noise, whose PNG is as large as a photograph's."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side] / side
    pixels = np.zeros((side, side, 3))
    for channel in range(3):
        for _ in range(6):
            across, down = random.uniform(0.5, 12, 2)
            waves = 2 * np.pi * (across * x + down * y) + random.uniform(0, 6)
            pixels[..., channel] += np.sin(waves)
    pixels = (pixels - pixels.min()) / np.ptp(pixels) * 240 + random.normal(0, 3, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_body(text: str, *, picture: str | None, max_tokens: int, before: str = "") -> bytes:
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    if picture is not None:
        parts.append({"type": "image_url", "image_url": {"url": picture}})
    parts.append({"type": "text", "text": text})
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def ask(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[float, int]:
    """Return the seconds to the first token, and the number of tokens."""
    began = time.perf_counter()
    first, num_tokens = None, 0
    headers = {"content-type": "application/json"}
    path = f"{url}/v1/chat/completions"
    async with client.stream("POST", path, content=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:300]!r}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if first is None and '"content"' in line and '"role"' not in line:
                first = time.perf_counter() - began
            if '"completion_tokens"' in line:
                usage = json.loads(line.removeprefix("data: ")).get("usage") or {}
                num_tokens = usage.get("completion_tokens", num_tokens)
    return first if first is not None else time.perf_counter() - began, num_tokens


# ---- times to the first token


async def probe(url: str, side: int, num_probes: int) -> dict[str, Any]:
    """Return medians of milliseconds, and all of them in `probes_ms`."""
    times: dict[str, list[float]] = {"first": [], "repeat": [], "new_text": [], "text": []}
    async with httpx.AsyncClient(timeout=600) as client:
        for index in range(-1, num_probes):
            picture = make_picture(5000 + index, side)
            bodies = {
                "first": make_body("What is it?", picture=picture, max_tokens=8),
                "repeat": make_body("What is it?", picture=picture, max_tokens=8),
                "new_text": make_body(
                    "What is it?", picture=picture, max_tokens=8, before=f"Case {index}: "
                ),
                "text": make_body(f"Tell me about {index}.", picture=None, max_tokens=8),
            }
            for name, body in bodies.items():
                seconds, _ = await ask(client, url, body)
                if index >= 0:  # the first round is not counted
                    times[name].append(round(seconds * 1e3, 1))
    medians = {name: round(statistics.median(values), 1) for name, values in times.items()}
    return medians | {"probes_ms": times}


# ---- throughput


def run_load(url: str, name: str, load: Load, side: int, num_clients: int) -> dict[str, float]:
    first_seed = 10_000 * (1 + list(LOADS).index(name))
    seeds = [first_seed + index for index in range(load.num_pictures)]
    with ProcessPoolExecutor() as pool:
        pictures = list(pool.map(make_picture, seeds, [side] * len(seeds)))
    bodies = [
        make_body(
            f"Question {index} of {name}: describe it.",
            picture=pictures[index % len(pictures)] if pictures else None,
            max_tokens=load.max_tokens,
        )
        for index in range(load.num_requests)
    ]
    if load.are_seen:
        asyncio.run(_send(url, [make_body("Look.", picture=p, max_tokens=1) for p in pictures], 1))
    num_clients = min(num_clients, load.num_at_once)
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(num_clients), context.Queue()
    clients = [
        context.Process(
            target=_run_client,
            args=(url, bodies[i::num_clients], load.num_at_once // num_clients, barrier, queue),
        )
        for i in range(num_clients)
    ]
    for client in clients:
        client.start()
    results = [queue.get(timeout=600) for _ in clients]
    for client in clients:
        client.join()
    failures = [result for result in results if isinstance(result, str)]
    if failures:
        raise SystemExit(f"{name}: {failures[0]}")
    answers = [answer for _, _, part in results for answer in part]
    seconds = max(end for _, end, _ in results) - min(start for start, _, _ in results)
    return {
        "requests_per_s": round(len(answers) / seconds, 2),
        "tokens_per_s": round(sum(count for _, count in answers) / seconds, 1),
        "ttft_ms": round(statistics.median(first for first, _ in answers) * 1e3, 1),
    }


async def _send(
    url: str, bodies: list[bytes], num_at_once: int, barrier: Any = None
) -> tuple[float, float, list[tuple[float, int]]]:
    """Return when the first request was sent, when the last was answered, and the answers."""
    answers = []
    async with httpx.AsyncClient(timeout=600) as client:
        await client.get(f"{url}/health")  # the client imports parts of itself at first use
        if barrier is not None:
            barrier.wait(120)
        start = time.monotonic()  # one clock for all processes of a machine
        left = iter(bodies)

        async def work() -> None:
            for body in left:
                answers.append(await ask(client, url, body))  # noqa: PERF401

        await asyncio.gather(*(work() for _ in range(num_at_once)))
        return start, time.monotonic(), answers


def _run_client(url: str, bodies: list[bytes], num_at_once: int, barrier: Any, queue: Any) -> None:
    try:
        queue.put(asyncio.run(_send(url, bodies, num_at_once, barrier)))
    except Exception as error:
        queue.put(repr(error))


# ---- the model


def make_model(directory: Path) -> None:
    """Write a random model of the shape of Qwen2.5-VL-3B, unless it is there."""
    import shutil
    import sys

    import torch

    from random_qwen import make_config

    if (directory / "config.json").exists():
        return
    sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
    import transformers

    from make_tiny_models import make_family

    with tempfile.TemporaryDirectory() as folder:
        tiny = make_family("qwen2_5_vl", Path(folder))
        config = transformers.AutoConfig.from_pretrained(tiny)
        large = make_config(is_tiny=False)
        for name in ("text_config", "vision_config"):
            for key, value in getattr(large, name).to_diff_dict().items():
                if key not in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
                    setattr(getattr(config, name), key, value)
        config.text_config.vocab_size = large.text_config.vocab_size
        config.tie_word_embeddings = True
        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
                config, dtype=torch.bfloat16
            )
        for name, parameter in model.named_parameters():  # so that answers depend on the picture
            if parameter.ndim >= 2:
                std = 1.0 if "embed_tokens" in name else parameter[0].numel() ** -0.5
                parameter.data.normal_(0, std)
        # Tokens that the tokenizer has no text for are never the likeliest.
        num_known = len(transformers.AutoTokenizer.from_pretrained(tiny))
        model.get_input_embeddings().weight.data[num_known:] = 0
        shutil.copytree(tiny, directory, ignore=shutil.ignore_patterns("*.safetensors"))
        model.cpu().save_pretrained(directory)


def measure(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if "probe" in arguments.cases:
        figures |= asyncio.run(probe(url, arguments.side, arguments.probes))
        for name in ("text", "first", "repeat", "new_text"):
            print(f"{name:10s} {figures[name]} ms (vLLM 0.26: {VLLM[name]})", flush=True)
    for name, load in LOADS.items():
        if name in arguments.cases:
            figures[name] = run_load(url, name, load, arguments.side, arguments.clients)
            print(f"{name:10s} {figures[name]} (vLLM 0.26: {VLLM[name]})", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--serve", metavar="DIR", help="start our server on this model")
    where.add_argument("--url", help="ask this server")
    parser.add_argument("--make", action="store_true", help="make the model of --serve first")
    parser.add_argument("--cases", nargs="+", default=["probe", *LOADS], metavar="NAME")
    parser.add_argument("--probes", type=int, default=NUM_PROBES, help="how often each is asked")
    parser.add_argument("--side", type=int, default=SIDE, help="pixels of a picture's side")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="processes that ask")
    parser.add_argument("--record-to", type=Path, metavar="PATH", help="write a record there")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    parser.add_argument("flags", nargs="*", help="of our server, behind --")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        figures: dict[str, Any] = {}
        url = arguments.url
        if arguments.serve:
            if arguments.make:
                make_model(Path(arguments.serve))
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
            flags = ["--served-model-name", MODEL, "--port", "0", *arguments.flags]
            server = stack.enter_context(LiveServer(arguments.serve, *flags, log=log))
            url = server.wait_for_url()
            figures["start_s"] = round(time.monotonic() - server.started, 1)
            print(f"ready after {figures['start_s']} s\n{log.read_text()}", flush=True)
        figures |= measure(arguments, url)
    figures["vllm_0_26"] = VLLM
    if arguments.record_to is not None:
        write_record("cuda_server", figures, path=arguments.record_to, commit=arguments.commit)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
