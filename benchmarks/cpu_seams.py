"""Measures whether joined products and packed encoders pay on a CPU, against Transformers' way.

The decoder has four layers of the shape of Qwen2.5-VL-3B's, or it is the embedded model's; the
tower has two blocks of the 3B shape and one picture of 448 × 448. All in float32. Both ways take
turns, pass by pass; a figure is the median of ours divided by the median of theirs, so below 1 ours
is faster.

python benchmarks/cpu_seams.py [--rounds N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from qwen_shapes import make_config
from random_qwen import GRID, PATCH_ELEMENTS
from records import write_record
from sensorium.embedded.cache import find_embedded_model
from sensorium.models.hf_model import HfModel
from sensorium.models.loading import load_config, load_model
from sensorium.models.seams.comparing import CausalAttention

NUM_TOKENS = (1, 8, 64, 512)
NUM_LAYERS = 4


def make_wide() -> HfModel:
    import transformers

    config = make_config("3b")
    config.text_config.num_hidden_layers = NUM_LAYERS
    config.text_config.layer_types = config.text_config.layer_types[:NUM_LAYERS]
    config.text_config.vocab_size = 1000
    config.vision_config.depth = 2
    config.vision_config.fullatt_block_indexes = [1]
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
        config, dtype=torch.float32
    )
    return HfModel(model.eval())


def make_mini() -> HfModel:
    directory = str(find_embedded_model())
    return load_model(
        directory, load_config(directory), dtype=torch.float32, device=torch.device("cpu")
    )


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], num_rounds: int) -> float:
    times: dict[Callable[[], Any], list[float]] = {ours: [], theirs: []}
    for index in range(num_rounds + 2):
        for run, values in times.items():
            start = perf_counter()
            run()
            if index >= 2:  # the first ones are not counted
                values.append(perf_counter() - start)
    return round(statistics.median(times[ours]) / statistics.median(times[theirs]), 3)


def compare_products(hf_model: HfModel, num_tokens: int, num_rounds: int) -> float:
    ids = torch.arange(num_tokens) % 500
    embeds, extra = hf_model.embed(ids, None, None)
    positions = torch.arange(num_tokens)

    def run() -> None:
        shape = positions.expand(3, -1) if hf_model.has_mrope else positions
        hf_model.forward(embeds, shape, CausalAttention(), extra)

    def run_paused() -> None:
        with hf_model.fusion.paused():
            run()

    return compare(run, run_paused, num_rounds)


def compare_packing(hf_model: HfModel, num_rounds: int) -> float:
    item = {
        "pixel_values": torch.randn(GRID * GRID, PATCH_ELEMENTS),
        "image_grid_thw": torch.tensor([[1, GRID, GRID]]),
    }

    def run() -> None:
        with hf_model.fusion.paused():
            hf_model.encode("image", [item], [GRID * GRID // 4])

    def run_own() -> None:
        with hf_model.own_attention():
            hf_model.encode("image", [item], [GRID * GRID // 4])

    return compare(run, run_own, num_rounds)


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"num_threads": torch.get_num_threads(), "joined_products": {}}
    for name, hf_model in (("wide", make_wide()), ("mini", make_mini())):
        hf_model.fuse()
        ratios = {
            str(number): compare_products(hf_model, number, arguments.rounds)
            for number in NUM_TOKENS
        }
        figures["joined_products"][name] = {"fused": str(hf_model.fusion), "ratios": ratios}
        print(name, figures["joined_products"][name], flush=True)
        if name == "wide":
            figures["packed_encoder"] = compare_packing(hf_model, max(5, arguments.rounds // 4))
            print("packed encoder", figures["packed_encoder"], flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="how often each is measured")
    parser.add_argument("--record", action="store_true", help="write records/cpu_seams.json")
    arguments = parser.parse_args()
    figures = measure(arguments)
    if arguments.record:
        write_record("cpu_seams", figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
