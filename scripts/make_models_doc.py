"""Writes docs/models.md from the catalog of families and from the parity tests that there are.

    python scripts/make_models_doc.py [--check]

`--check` writes nothing, and fails if the page names another family or check than the last full run
of the tests has passed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sensorium.cli.models import HEADER, OTHERS, get_rows
from sensorium.types.families import FAMILIES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
COLLECTED = ROOT / "build" / "parity-collected.json"
PASSED = ROOT / "build" / "parity.json"
_HEAD = """\
# Models

Made by `scripts/make_models_doc.py` from the code and the tests; `make test` checks that what it
says has passed. `sensorium models` prints the first table, and `sensorium models MODEL` prints what
one model takes and needs, or why it can't be run.

## Families
"""
_REFUSED = """
## What is refused

Models are refused at load with a one-sentence error, before any weight is read where that is
possible:

- encoder-decoder models that are not in the table;
- linear attention, convolutions or other layers with a state of their own, chunked attention;
- cross-attention inside the decoder;
- decoders without Transformers' attention interface, or whose attention has a soft cap or sinks;
- layers that attend more than once in a pass, masks that a layer makes itself or that are neither
  causal nor a window;
- checkpoints with code of their own, unless it is trusted; weights that are not safetensors;
- quantized weights (AWQ, GPTQ, FP8, bitsandbytes and all others), GGUF files, LoRA adapters;
- directories without a config, a tokenizer or, for models that take media, a processor;
- weights of other shapes than the config asks for, and weights with values that are not numbers;
- models of types that are not in the table, if a trial of text differs from the model on its own.

Commands look at the names, the JSON files and the headers of a model before they import PyTorch, so
that a wrong directory is refused at once. The files of a hub id are checked when the small ones are
downloaded, before weights are fetched.

## The trial of a type that is not in the table

At start, before it serves, such a model is compared with itself: the model in the engine on one
side, on the other the model in Transformers alone, with its own processor, attention, cache and
`generate`. There is a trial of text, and one of each modality that `--limit-mm-per-prompt` allows.
Each has two prompts of different lengths, one of them with two items (one, where the limit is one);
a text is longer than the model's windows where 640 tokens are enough for that. The prompts run
together, in chunks, and answer with five tokens each; then once more with the cached encoder
outputs, and once more from the prefix cache. The log-probabilities of the 20 likeliest tokens are
compared at every position of prompts and answers.

How much rounding may change is measured in the dtype that is served: the same model with its own
attention and with Transformers' eager one. The engine may differ 2.5 times as much overall, and 5
times as much at the worst position. Models that are right are at 0.9 and 1.7 at most, wrong ones at
11 and 17 or more. Where the two attentions differ by more than 0.01 in float32, 0.05 in float16 or
0.2 in bfloat16, they do not attend to the same tokens, or the dtype is too coarse: then nothing can
be compared, and the trial fails. PaliGemma is refused for that.

If the trial of text fails, so does the start. If that of a modality fails, it is made again with
one item in each prompt. If that agrees, the modality is limited to one item a prompt (Granite
Speech is: Transformers pads two audio items without a mask); else it is switched off. A modality
that the model takes is also switched off if the checkpoint names no token or processor for it
(Phi-4 multimodal runs as text). One warning in the log has the reason, requests with that modality,
or with two items of it, are a 400 with the reason, and `/v1/models` (`switched_off`, `only_one`)
and `sensorium models MODEL --try` show it. A modality of any model, listed or not, is also switched
off if a small item of it can't be prepared when a server warms up. Listed families have no trial:
tests compare them. A trial takes about as long as 20 tokens and eight short prompts of the model
(`benchmarks/trial.py`), and one with an item that fails twice as long.

The context is cut, with a line in the log, where a model gives other results beyond it: dynamic
rotary factors, longrope factors of models whose own `generate` mixes them, a window that only the
model's cache has. Asking for more is refused.

## Parity

This is what `make test` compares with Transformers, on tiny random models in float32. A ✓ stands
where all tests of a kind pass. Every family has its processor outputs, prompts, decoder inputs and
logits compared stage by stage, then greedy tokens: alone, staggered with budgets of 7, 24 and 4096
tokens, with cached prefixes and encoder outputs, with a full encoder cache and preempted; and once
more with steps that are replayed from fixed memory, as CUDA graphs are. They are also sampled next
to other requests, and compared on random engines with random requests (*stress*). `make test`
compares the processor outputs, the prompts, the decoder inputs and the tokens of each prompt alone
for every family, and runs the other tests for some families and settings only: where a column is
empty, tests of other families stand for it. `make test-slow` runs all families with all settings.
*Controls* are deliberate mistakes that must change tokens.
"""


def format_markdown(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def make_page(passed: Mapping[str, Mapping[str, int]]) -> str:
    checks = sorted({check for row in passed.values() for check in row})
    rows = [
        [family, *("✓" * (check in row) for check in checks)]
        for family, row in sorted(passed.items())
    ]
    families = format_markdown(get_rows(), HEADER)
    parity = format_markdown(rows, ["tiny model", *checks])
    return f"{_HEAD}\n{families}\n{OTHERS}\n{_REFUSED}\n{parity}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/models.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    if not arguments.check:
        PAGE.write_text(make_page(_collect()))
        return
    if not PASSED.exists():
        sys.exit("there is no table of passed tests: run `make test` first")
    passed = json.loads(PASSED.read_text())
    if len(passed) < len(FAMILIES):
        sys.exit("the last run was of some families only: run `make test` first")
    if not PAGE.exists() or PAGE.read_text() != make_page(passed):
        sys.exit("docs/models.md is out of date: run `python scripts/make_models_doc.py`")


def _collect() -> dict[str, dict[str, int]]:
    """Return how many tests of each check each family has in `make test`: family -> check."""
    COLLECTED.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/parity"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    table: dict[str, dict[str, int]] = json.loads(COLLECTED.read_text())
    return table


if __name__ == "__main__":
    main()
