"""Output tokens per second of `LLM.generate` against `model.generate` one prompt at a time.

The same random model of about 100M parameters, float32, prompts of about 32 tokens, 128 tokens out
each. Both run in turn, several times, in one process with the same number of threads; the figures
are medians.

python benchmarks/offline.py [--rounds N] [--record]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from records import write_record
from sensorium import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
from tiny_models.building import make_tokenizer, rescale, save

NUM_PROMPT_TOKENS = 32
NUM_OUTPUT_TOKENS = 128
BATCHES = (8, 32)
NUM_REFERENCE_PROMPTS = 4  # per round: one by one, the speed doesn't depend on how many there are
VOCAB_SIZE = 16_000


def make_model(directory: Path) -> int:
    """Make a Llama of about 100M parameters and return their number."""
    tokenizer = make_tokenizer(["<|endoftext|>"], eos="<|endoftext|>", pad="<|endoftext|>")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = rescale(transformers.LlamaForCausalLM(config))
    save(directory, model, tokenizer)
    return sum(parameter.numel() for parameter in model.parameters())


def make_prompts(count: int, *, seed: int) -> list[list[int]]:
    """Random token ids, no two prompts alike, so that no cache helps."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(
        NUM_PROMPT_TOKENS - 4, NUM_PROMPT_TOKENS + 5, (count,), generator=generator
    )
    return [
        torch.randint(1, VOCAB_SIZE, (int(length),), generator=generator).tolist()
        for length in lengths
    ]


def run_reference(model: Any, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Return tokens per second of `model.generate`, and the tokens."""
    outputs = []
    start = perf_counter()
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=NUM_OUTPUT_TOKENS,
                do_sample=False,
            )
        outputs.append(output[0, len(prompt) :].tolist())
    elapsed = perf_counter() - start
    return sum(map(len, outputs)) / elapsed, outputs


def run_ours(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    start = perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    elapsed = perf_counter() - start
    outputs = [list(result.outputs[0].token_ids) for result in results]
    return sum(map(len, outputs)) / elapsed, outputs


def measure(directory: Path, num_rounds: int) -> dict[str, Any]:
    num_parameters = make_model(directory)
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    llm = LLM(str(directory), max_num_seqs=max(BATCHES), max_model_len=512, dtype="float32")
    reference: list[float] = []
    ours: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    ratios: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    num_compared = num_equal = 0
    run_reference(model, make_prompts(1, seed=1000))
    run_ours(llm, make_prompts(2, seed=1001))
    for round_index in range(num_rounds):
        for batch in BATCHES:
            prompts = make_prompts(batch, seed=round_index * 100 + batch)
            speed, expected = run_reference(model, prompts[:NUM_REFERENCE_PROMPTS])
            reference.append(speed)
            speed, outputs = run_ours(llm, prompts)
            ours[batch].append(speed)
            ratios[batch].append(speed / reference[-1])  # to the run just before it
            num_compared += len(expected)
            num_equal += sum(a == b for a, b in zip(expected, outputs, strict=False))
            print(f"generate {reference[-1]:.1f} tokens/s, {batch} requests at once {speed:.1f}")
    return {
        "num_parameters": num_parameters,
        "num_threads": torch.get_num_threads(),
        "equal_outputs": f"{num_equal} of {num_compared}",
        "generate_tokens_per_s": round(statistics.median(reference), 2),
        "tokens_per_s": {str(b): round(statistics.median(v), 2) for b, v in ours.items()},
        "ratio": {str(b): round(statistics.median(v), 2) for b, v in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often each is measured (default 3)"
    )
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/offline.json"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), arguments.rounds)
    if arguments.record:
        print(f"record: {write_record('offline', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
