"""Output tokens per second on CUDA of a random Qwen2.5-VL of the shape of the 3B one, in bfloat16.

1, 8 and 64 requests at once, each with an image of 448 × 448 (256 tokens) and 80 tokens of text,
128 tokens out, no two images alike; against `model.generate` one at a time. The same weights, made
on the device. Tokens are counted from adding the requests to the last step, encoders included.

python benchmarks/cuda_offline.py [--backends NAME ...] [--record-to PATH [--commit HASH]]

`--tiny` tries the script with a small model, also without a GPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from records import write_record
from sensorium import ModelError, SamplingParams
from sensorium.engine.builder import build_engine_core
from sensorium.engine.config import EngineOptions
from sensorium.engine.engine_core import EngineCore
from sensorium.models.adapter import ModelAdapter
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest

BATCHES = (1, 8, 64)
NUM_OUTPUT_TOKENS = 128
NUM_TEXT_TOKENS = 80
GRID = 32  # patches along each side of an image
PATCH_ELEMENTS = 3 * 2 * 14 * 14
NUM_IMAGE_TOKENS = (GRID // 2) ** 2
VISION_START, VISION_END, IMAGE_PAD = 151652, 151653, 151655
_ids = count()

Prompt = tuple[list[int], dict[str, torch.Tensor]]


def make_config(*, is_tiny: bool) -> Any:
    """The shape of Qwen2.5-VL-3B; a tiny one has two layers of everything."""
    depth = 2 if is_tiny else 32
    hidden_size = 256 if is_tiny else 2048
    text = {
        "vocab_size": 151936,
        "hidden_size": hidden_size,
        "intermediate_size": 512 if is_tiny else 11008,
        "num_hidden_layers": 2 if is_tiny else 36,
        "num_attention_heads": hidden_size // 128,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    vision = {
        "depth": depth,
        "hidden_size": 160 if is_tiny else 1280,
        "intermediate_size": 320 if is_tiny else 3420,
        "num_heads": 2 if is_tiny else 16,
        "out_hidden_size": hidden_size,
        "fullatt_block_indexes": [i for i in range(depth) if i % 8 == 7] or [1],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )


def make_model(device: str, *, is_tiny: bool) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
            make_config(is_tiny=is_tiny),
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        )
    model.generation_config.eos_token_id = None
    return model.eval()


def make_prompts(num_prompts: int, *, seed: int) -> list[Prompt]:
    """Token ids and the tensors of an image, all random."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(num_prompts):
        text = torch.randint(100, 150_000, (NUM_TEXT_TOKENS,), generator=generator).tolist()
        image = [VISION_START, *[IMAGE_PAD] * NUM_IMAGE_TOKENS, VISION_END]
        tensors = {
            "pixel_values": torch.randn(GRID * GRID, PATCH_ELEMENTS, generator=generator),
            "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
        }
        prompts.append((text[:16] + image + text[16:], tensors))
    return prompts


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


def make_request(token_ids: list[int]) -> EngineCoreRequest:
    index = next(_ids)
    return EngineCoreRequest(
        request_id=f"request-{index}",
        prompt_token_ids=tuple(token_ids),
        sampling_params=SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            seed=0,
            max_tokens=NUM_OUTPUT_TOKENS,
            ignore_eos=True,
        ),
        mm_features=(
            MultiModalFeatureSpec(
                modality="image",
                mm_hash=f"image-{index}",
                mm_position=PlaceholderRange(token_ids.index(IMAGE_PAD), NUM_IMAGE_TOKENS),
            ),
        ),
    )


def run_ours(core: EngineCore, prompts: list[Prompt]) -> tuple[float, float, list[list[int]]]:
    """Tokens per second, the median milliseconds of a step that only decodes, and the tokens."""
    outputs: dict[str, list[int]] = {}
    decode_ms = []
    start = perf_counter()
    for token_ids, tensors in prompts:
        request = make_request(token_ids)
        core.add_request(request, {request.mm_features[0].mm_hash: tensors})
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
    adapter: ModelAdapter, backend: str, batches: tuple[int, ...], num_rounds: int
) -> dict[str, Any]:
    start = perf_counter()
    core, config = build_engine_core(
        adapter,
        EngineOptions(
            max_model_len=1024,
            max_num_seqs=max(batches),
            kv_cache_memory_bytes=(4 << 30) if adapter.device.type == "cuda" else (64 << 20),
            attention_backend=backend,
        ),
    )
    figures: dict[str, Any] = {
        "attention_backend": config.attention_backend,
        "start_s": round(perf_counter() - start, 1),
        "tokens_per_s": {},
        "decode_step_ms": {},
    }
    for batch in batches:
        run_ours(core, make_prompts(batch, seed=1000 + batch))  # first uses
        runs = [
            run_ours(core, make_prompts(batch, seed=batch + 100 * r)) for r in range(num_rounds)
        ]
        figures["tokens_per_s"][str(batch)] = round(statistics.median(r[0] for r in runs), 1)
        figures["decode_step_ms"][str(batch)] = round(statistics.median(r[1] for r in runs), 2)
        print(f"{backend}, {batch} at once: {figures['tokens_per_s'][str(batch)]} tokens/s")
        if batch == 1:
            figures["first_output"] = runs[0][2][0]
    return figures


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = (1, 2) if arguments.tiny else BATCHES
    model = make_model(device, is_tiny=arguments.tiny)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e9:.2f}B parameters on {device}", flush=True)
    run_reference(model, device, make_prompts(1, seed=999))  # first uses
    reference = [
        run_reference(model, device, make_prompts(1, seed=1 + 100 * r))
        for r in range(arguments.rounds)
    ]
    speed = statistics.median(r[0] for r in reference)
    print(f"generate: {speed:.1f} tokens/s", flush=True)
    adapter = ModelAdapter(model)  # from here on its decoder attends through pages
    backends = []
    for backend in arguments.backends:
        try:
            figures = measure_backend(adapter, backend, batches, arguments.rounds)
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
        "num_prompt_tokens": NUM_TEXT_TOKENS + NUM_IMAGE_TOKENS + 2,
        "num_output_tokens": NUM_OUTPUT_TOKENS,
        "generate_tokens_per_s": round(speed, 1),
        "backends": backends,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often each is measured")
    parser.add_argument("--backends", nargs="+", default=["flashinfer", "torch"], metavar="NAME")
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
