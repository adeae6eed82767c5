"""Measures what the trial of a model of an unknown type costs at start.

Two types that are in no list: Qwen3 (text) and ViP-LLaVA (text and images), each tiny and with
about 100M parameters, of random weights. A run is a fresh interpreter that builds an `LLM` on the
CPU; its log has the seconds of each trial. The figures are medians.

python benchmarks/trial.py [--rounds N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sensorium.models  # noqa: F401  (makes torchvision importable, before Transformers)

# isort: split
import torch
import transformers

from records import write_record

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from tiny_models.building import (
    CHATML_TOKENS,
    chatml,
    make_tokenizer,
    rescale,
    save,
    text_values,
    tower_values,
)

DTYPES = ("float32", "bfloat16")
RUN = """
import json, logging, sys, time

class Notes(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("trial of"):
            trials[record.args[0]] = record.args[5]

trials = {}
logger = logging.getLogger("sensorium.engine.assembly.trial")
logger.addHandler(Notes())
logger.setLevel(logging.INFO)
from sensorium import LLM
started = time.monotonic()
llm = LLM(sys.argv[1], dtype=sys.argv[2], device="cpu", max_model_len=2048, use_tqdm_on_load=False)
assert not llm.input_processor.switched_off.reasons
print(json.dumps({"engine": time.monotonic() - started, **trials}))
"""
# The decoder and the vision tower of a model with about 100M parameters.
DECODER = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "vocab_size": 32_000,
}
TOWER = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "image_size": 224,
}


def make_qwen3(directory: Path, *, is_tiny: bool) -> None:
    tokenizer = make_tokenizer(["<|endoftext|>"], eos="<|endoftext|>", pad="<|endoftext|>")
    values = text_values(tokenizer, **({} if is_tiny else DECODER))
    config = transformers.Qwen3Config(**values)
    save(directory, rescale(transformers.Qwen3ForCausalLM(config)), tokenizer)


def make_vipllava(directory: Path, *, is_tiny: bool) -> None:
    tokenizer = make_tokenizer([*CHATML_TOKENS, "<image>"], extra={"image_token": "<image>"})
    tower = tower_values(**({} if is_tiny else TOWER))
    config = transformers.VipLlavaConfig(
        vision_config={"model_type": "clip_vision_model", **tower},
        text_config={
            "model_type": "llama",
            **text_values(tokenizer, **({} if is_tiny else DECODER)),
        },
        image_token_index=tokenizer.image_token_id,
        vision_feature_layers=[-2, -1],
    )
    size = {"height": tower["image_size"], "width": tower["image_size"]}
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size=size, crop_size=size),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chatml("<image>"),
    )
    save(directory, rescale(transformers.VipLlavaForConditionalGeneration(config)), processor)


MODELS = {"qwen3": make_qwen3, "vipllava": make_vipllava}


def run(directory: Path, dtype: str) -> dict[str, float]:
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(directory), dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise SystemExit(ended.stderr)
    seconds: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return seconds


def measure(parent: Path, num_rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"num_rounds": num_rounds, "num_threads": torch.get_num_threads()}
    for name, make in MODELS.items():
        for size in ("tiny", "100M"):
            directory = parent / f"{name}-{size}"
            make(directory, is_tiny=size == "tiny")
            for dtype in DTYPES:
                rounds = [run(directory, dtype) for _ in range(num_rounds)]
                medians = {
                    stage: round(statistics.median(times[stage] for times in rounds), 3)
                    for stage in rounds[0]
                }
                print(f"{directory.name} {dtype}: {medians}", flush=True)
                figures[f"{directory.name} {dtype}"] = medians
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often (default 3)")
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/trial.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), arguments.rounds)
    if arguments.record:
        print(f"record: {write_record('trial', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
