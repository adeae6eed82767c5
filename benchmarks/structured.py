"""Measures what a grammar costs a batch: decoded tokens per second with a schema and without.

Both kinds run in turn, several rounds, on the same engine; a round's requests all decode the same
number of tokens. The schema is an endless list, so that no request ends early.

python benchmarks/structured.py [--model DIR] [--batch N] [--tokens N] [--rounds N] [--record]

The last line of the output is JSON: medians in tokens per second, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from records import write_record
from sensorium import LLM, SamplingParams
from sensorium.types.structured import StructuredOutputsParams

ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999},
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["id", "name", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100_000}


def make_params(num_tokens: int, seed: int, *, has_schema: bool) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        seed=seed,
        max_tokens=num_tokens,
        ignore_eos=True,
        structured_outputs=StructuredOutputsParams(json=SCHEMA) if has_schema else None,
    )


def measure(llm: LLM, *, batch: int, num_tokens: int, has_schema: bool) -> float:
    """Return the tokens per second of one round."""
    params = [make_params(num_tokens, seed, has_schema=has_schema) for seed in range(batch)]
    began = time.perf_counter()
    outputs = llm.generate(["A list:"] * batch, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = {len(output.outputs[0].token_ids) for output in outputs}
    assert counts == {num_tokens}, f"some ended early: {counts}"
    return batch * num_tokens / seconds


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = {"batch": arguments.batch, "num_tokens": arguments.tokens}
    rates: dict[bool, list[float]] = {False: [], True: []}
    with LLM(
        arguments.model,
        max_model_len=arguments.tokens + 64,
        max_num_seqs=arguments.batch,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
    ) as llm:
        for has_schema in rates:  # first uses
            measure(llm, batch=arguments.batch, num_tokens=8, has_schema=has_schema)
        for _ in range(arguments.rounds):
            for has_schema, found in rates.items():
                found.append(measure(llm, **sizes, has_schema=has_schema))
    free, constrained = statistics.median(rates[False]), statistics.median(rates[True])
    return {
        "model": os.path.basename(os.path.normpath(arguments.model)),
        **sizes,
        "num_rounds": arguments.rounds,
        "tokens_per_s": {"free": round(free, 1), "schema": round(constrained, 1)},
        "ratio": round(constrained / free, 3),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="build/tiny-models/llama")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write records/structured.json")
    arguments = parser.parse_args()
    figures = run(arguments)
    if arguments.record:
        write_record("structured", figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
