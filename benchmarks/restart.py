"""How soon a restarted engine has the embeddings of an image that is in its disk cache.

The model has the shape of Qwen2.5-VL with about 10 million random parameters, in float32, and the
image has 1024 x 1024 pixels of noise, which no two rounds share. In each round an engine with an
empty disk cache gets a new image (cold), and one that starts anew with the same cache gets it again
(warm). Both have processed another image before, so that nothing is measured that happens once.
The time goes from the request's arrival until the engine has the image's embeddings; next to it
stands the time until the first token.

python benchmarks/restart.py [--rounds N] [--pixels N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image

from records import write_record
from sensorium import LLM, SamplingParams
from sensorium.models import ensure_torchvision

ensure_torchvision()
import transformers as tf  # noqa: E402

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from make_tiny_models import make_family  # noqa: E402

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>what is this?"
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def make_model(folder: Path) -> tuple[str, int]:
    """Make a checkpoint with the processor of the tiny model and a larger tower and decoder.

    Return its directory and the number of its parameters.
    """
    source = make_family("qwen2_5_vl", ROOT / "build" / "tiny-models")
    processor = tf.AutoProcessor.from_pretrained(source)
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280 * 4}
    config = tf.AutoConfig.from_pretrained(source)
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = 256, 768, 4
    text.layer_types = ["full_attention"] * 4
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = 4, 2, 64
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [8, 12, 12]}
    text.max_position_embeddings = 8192
    vision.hidden_size, vision.intermediate_size, vision.num_heads = 256, 768, 4
    vision.depth, vision.out_hidden_size, vision.fullatt_block_indexes = 6, 256, [2, 5]
    torch.manual_seed(0)
    model: Any = tf.Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder), sum(each.numel() for each in model.parameters())


def ask(llm: LLM, image: bytes) -> dict[str, float]:
    """Return the milliseconds until an image has its embeddings, and until the first token."""
    runner = llm.core.runner.encoder_runner
    ready: list[float] = []

    def run(jobs: Any, run: Callable[..., Any]) -> Any:
        result = run(jobs)
        if jobs:
            ready.append(perf_counter())
        return result

    original = runner.run
    runner.run = partial(run, run=original)  # type: ignore[method-assign]
    began = perf_counter()
    prompt: Any = {"prompt": PROMPT, "multi_modal_data": {"image": [image]}}
    (output,) = llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
    ended = perf_counter()
    runner.run = original  # type: ignore[method-assign]
    assert output.error is None
    return {"embeddings_ms": 1e3 * (ready[-1] - began), "first_token_ms": 1e3 * (ended - began)}


def make_image(size: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def measure(num_rounds: int, size: int) -> dict[str, Any]:
    times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    counts = dict.fromkeys(times, 0)
    with TemporaryDirectory() as folder:
        directory, num_parameters = make_model(Path(folder) / "model")
        for seed in range(num_rounds):
            image = make_image(size, seed)
            for kind in times:
                cache = Path(folder) / f"cache-{seed}"
                with LLM(
                    directory, dtype="float32", max_model_len=4096, mm_disk_cache=cache
                ) as llm:
                    ask(llm, make_image(size, 10_000 + 2 * seed + (kind == "warm")))
                    before = llm.core.runner.encoder_runner.num_encoded
                    times[kind].append(ask(llm, image))
                    counts[kind] += llm.core.runner.encoder_runner.num_encoded - before
            print(f"round {seed}: {times['cold'][-1]} {times['warm'][-1]}", flush=True)
    figures: dict[str, Any] = {
        "pixels": f"{size} x {size}",
        "num_parameters": num_parameters,
        "num_rounds": num_rounds,
        "num_encoded": counts,
    }
    for name in ("embeddings_ms", "first_token_ms"):
        cold, warm = ([each[name] for each in times[kind]] for kind in ("cold", "warm"))
        figures[name] = {
            "cold": round(statistics.median(cold), 1),
            "warm": round(statistics.median(warm), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(cold, warm, strict=True)), 1),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="each with both engines (default 5)")
    parser.add_argument("--pixels", type=int, default=1024, help="along a side (default 1024)")
    parser.add_argument("--record", action="store_true", help="write a record")
    arguments = parser.parse_args()
    tf.utils.logging.disable_progress_bar()
    figures = measure(arguments.rounds, arguments.pixels)
    if arguments.record:
        print(f"record: {write_record('restart', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
