"""How long a vision tower takes for pictures of 1024 × 1024: as Transformers runs it, and as we do.

The tower is that of Qwen2.5-VL-3B with random weights, in bfloat16 on a GPU and in float32 on a
CPU; `--depth` makes it shorter. "own": Transformers' attention and widths. "packed": our attention,
with lengths from the host. "aligned": the same with padded widths. "fused": the same with all that
is fused. They take turns; the figures are medians of milliseconds from pixels on the device to
embeddings. `distance`: how far the embeddings
are from those of the own tower, as a share of their size.

python benchmarks/encoders.py [--depth N] [--images N ...] [--rounds N] [--record-to PATH]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from qwen_shapes import make_config
from random_qwen import PATCH_ELEMENTS
from records import write_record
from sensorium.models.hf_model import HfModel
from sensorium.models.seams.matrix_products import align_widths

SIDE = 74  # patches of 14 × 14 along a side of 1024, as the processor rounds it


def make_tower(depth: int, device: str) -> Any:
    """Return a model with a small decoder and the whole tower."""
    import transformers

    config = make_config("3b")
    config.text_config.num_hidden_layers = 1
    config.text_config.layer_types = config.text_config.layer_types[:1]
    config.text_config.vocab_size = 151936 if device == "cuda" else 1000
    config.vision_config.depth = depth
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        )
    for name, parameter in model.named_parameters():  # so that outputs depend on the picture
        if parameter.ndim >= 2 and "visual" in name:
            parameter.data.normal_(0, parameter[0].numel() ** -0.5)
    return model.eval()


def make_items(num_images: int, hf_model: HfModel) -> tuple[list[dict[str, Any]], list[int]]:
    generator = torch.Generator().manual_seed(num_images)
    items = [
        {
            "pixel_values": hf_model.to_model(
                torch.randn(SIDE * SIDE, PATCH_ELEMENTS, generator=generator)
            ),
            "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
        }
        for _ in range(num_images)
    ]
    return items, [(SIDE // 2) ** 2] * num_images


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hf_model = HfModel(make_tower(arguments.depth, device))
    figures: dict[str, Any] = {"depth": arguments.depth, "device": device}
    runs = {
        n: partial(hf_model.encode, "image", *make_items(n, hf_model)) for n in arguments.images
    }

    def run_own(num_images: int) -> list[torch.Tensor]:
        with hf_model.own_attention():
            return runs[num_images]()

    expected = {num_images: run_own(num_images) for num_images in runs}
    for num_images, run in runs.items():
        times = time_in_turns(
            {"own": partial(run_own, num_images), "packed": run}, arguments.rounds, device
        )
        distance = get_distance(run(), expected[num_images])
        figures[str(num_images)] = {"ms": times, "distance": {"packed": distance}}

    def measure_change(name: str) -> None:
        for num_images, run in runs.items():
            entry = figures[str(num_images)]
            entry["ms"] |= time_in_turns({name: run}, arguments.rounds, device)
            entry["distance"][name] = get_distance(run(), expected[num_images])
            print(num_images, entry, flush=True)

    figures["padded_modules"] = align_widths(hf_model.model)
    measure_change("aligned")
    hf_model.fuse()
    figures["fused"] = str(hf_model.fusion)
    measure_change("fused")
    return figures


def time_in_turns(
    runs: dict[str, Callable[[], Any]], num_rounds: int, device: str
) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(num_rounds + 1):
        for name, run in runs.items():
            start = perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if index:  # the first is not counted
                times[name].append((perf_counter() - start) * 1e3)
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def get_distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    a, b = torch.cat(found).float(), torch.cat(expected).float()
    return float(f"{float((a - b).norm() / b.norm()):.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=32, help="blocks of the tower")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=10, help="how often each is measured")
    parser.add_argument("--record-to", type=Path, metavar="PATH", help="write a record there")
    parser.add_argument("--commit", help="the commit that is measured, where there is no git")
    arguments = parser.parse_args()
    figures = measure(arguments)
    if arguments.record_to is not None:
        write_record("encoders", figures, path=arguments.record_to, commit=arguments.commit)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
