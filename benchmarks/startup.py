"""From the start of a process to its first token, against a process that only loads the weights.

Each run is a fresh interpreter. The baseline imports torch and transformers and calls
`from_pretrained` of the auto class on the same checkpoint: no tokenizer, no processor, no token. It
runs as if torchvision were not installed, which is the faster way and works where torchvision can't
be imported. Ours imports `LLM`, builds it with its defaults, and generates one token from text, or
from text and an image. Both run in turn, after one round that is not counted; a time is taken when
the process says that it is there, and the figures are medians. `cpu` is the processor's time, which
depends less on what else a machine does.

python benchmarks/startup.py [--rounds N] [--record]

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
from time import perf_counter
from typing import Any

import torch
import transformers

from records import write_record

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from make_tiny_models import FAMILIES
from tiny_models.building import make_tokenizer, rescale, save

BASELINE = """
import sys, time
sys.modules["torchvision"] = None
import torch
import transformers
print("imports", flush=True)
transformers.{auto_class}.from_pretrained(sys.argv[1], dtype=torch.float32)
print("end", time.process_time(), flush=True)
"""
OURS = """
import sys, time
from sensorium import LLM, SamplingParams
print("imports", flush=True)
llm = LLM(sys.argv[1], dtype="float32")
print("engine", flush=True)
{prompt}
params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
(output,) = llm.generate(prompt, params, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 1
print("end", time.process_time(), flush=True)
"""
TEXT_PROMPT = 'prompt = "hello world"'
IMAGE_PROMPT = """
from PIL import Image
image = Image.new("RGB", (90, 60))
prompt = {"prompt": "<image>what is this?", "multi_modal_data": {"image": image}}
"""
SCRIPTS = {
    "llama": {
        "baseline": BASELINE.format(auto_class="AutoModelForCausalLM"),
        "ours": OURS.format(prompt=TEXT_PROMPT),
    },
    "llava": {
        "baseline": BASELINE.format(auto_class="AutoModelForImageTextToText"),
        "ours": OURS.format(prompt=IMAGE_PROMPT),
    },
}


def make_llama(directory: Path) -> None:
    """Make a Llama with about 10M parameters."""
    tokenizer = make_tokenizer(["<|endoftext|>"], eos="<|endoftext|>", pad="<|endoftext|>")
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=320,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    save(directory, rescale(transformers.LlamaForCausalLM(config)), tokenizer)


def run(script: str, directory: Path) -> dict[str, float]:
    """Return the seconds until each line that a process prints, and its processor time."""
    times: dict[str, float] = {}
    start = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            stage, _, cpu_s = line.strip().partition(" ")
            times[stage] = perf_counter() - start
            if cpu_s:
                times["cpu"] = float(cpu_s)
        assert process.stderr is not None
        errors = process.stderr.read()
    if "end" not in times:
        raise SystemExit(errors)
    return times


def measure(parent: Path, num_rounds: int) -> dict[str, Any]:
    directories = {"llama": parent / "llama", "llava": parent / "llava"}
    make_llama(directories["llama"])
    FAMILIES["llava"](directories["llava"])
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {kind: [] for kind in scripts} for name, scripts in SCRIPTS.items()
    }
    for round_index in range(num_rounds + 1):
        for name, scripts in SCRIPTS.items():
            for kind, script in scripts.items():
                times = run(script, directories[name])
                if round_index > 0:
                    runs[name][kind].append(times)
                    print(f"{name} {kind}: {times['end']:.2f} s", flush=True)
    return {
        "num_rounds": num_rounds,
        "num_threads": torch.get_num_threads(),
        **{name: summarise(by_kind) for name, by_kind in runs.items()},
    }


def summarise(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    seconds = {
        kind: {
            stage: round(statistics.median(times[stage] for times in several), 3)
            for stage in several[0]
        }
        for kind, several in runs.items()
    }
    pairs = zip(runs["ours"], runs["baseline"], strict=True)
    return {
        "seconds": seconds,
        "ratio": round(seconds["ours"]["end"] / seconds["baseline"]["end"], 3),
        "cpu_ratio": round(seconds["ours"]["cpu"] / seconds["baseline"]["cpu"], 3),
        "ratios_of_pairs": [round(ours["end"] / base["end"], 3) for ours, base in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each is measured (default 5)"
    )
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/startup.json"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), arguments.rounds)
    if arguments.record:
        print(f"record: {write_record('startup', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
