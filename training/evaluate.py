"""Asks the held-out cases and counts: a checkpoint with Transformers' `generate`, or a server.

`python -m training.evaluate build/heldout --checkpoint DIR` or `--base-url http://127.0.0.1:8000/v1`
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training.scoring import count_word_errors, interval, is_right
from training.speech.kinds import is_random_string

MAX_TOKENS = 48
NUM_AT_A_TIME = 100  # cases that are asked again while all caches hold them
Answer = tuple[str, list[int]]  # the text, and its tokens without the last one, which ends it

Asked = list[tuple[dict[str, Any], str]]  # cases with their answers


@dataclass(slots=True)
class Pass:
    """The answers of one pass over all cases, with its costs."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of these

    def make_record(self, cases: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 1),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "scores": score(cases, [text for text, _ in self.answers]),
            "answers": {
                case["key"]: answer for case, answer in zip(cases, self.answers, strict=True)
            },
        }


def load_cases(
    folder: Path, count: int | None = None, tasks: Sequence[str] = ("*",)
) -> list[dict[str, Any]]:
    """Return at most `count` cases of each task with a name that fits one of the patterns."""
    seen: dict[str, int] = defaultdict(int)
    cases = []
    for line in (folder / "cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        seen[case["task"]] += 1
        is_asked = any(fnmatch(case["task"], pattern) for pattern in tasks)
        if is_asked and (count is None or seen[case["task"]] <= count):
            cases.append({**case, "key": f"{case['task']}/{seen[case['task']]}"})
    return cases


def make_content(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the parts of an OpenAI message."""

    def as_url(name: str, kind: str) -> str:
        return f"data:{kind};base64,{base64.b64encode((folder / name).read_bytes()).decode()}"

    content: list[dict[str, Any]] = []
    if case["picture"]:
        url = as_url(case["picture"], "image/png")
        content.append({"type": "image_url", "image_url": {"url": url}})
    if case["video"]:
        url = as_url(case["video"], "video/mp4")
        content.append({"type": "video_url", "video_url": {"url": url}})
    if case["sound"]:
        data = base64.b64encode((folder / case["sound"]).read_bytes()).decode()
        content.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    if case["question"]:
        content.append({"type": "text", "text": case["question"]})
    return content


async def ask_server(
    cases: list[dict[str, Any]], folder: Path, base_url: str, concurrency: int, passes: list[Pass]
) -> None:
    """Ask each hundred cases in all passes before the next hundred, while caches hold them."""
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=600.0)
    model = (await client.models.list()).data[0].id
    room = asyncio.Semaphore(concurrency)
    progress = tqdm(total=len(passes) * len(cases), mininterval=5.0)

    async def ask(case: dict[str, Any], into: Pass) -> Answer:
        async with room:
            message: Any = {"role": "user", "content": make_content(case, folder)}
            answer = await client.chat.completions.create(
                model=model,
                messages=[message],
                max_tokens=MAX_TOKENS,
                temperature=0.0,
                extra_body={"return_token_ids": True},
            )
            progress.update()
            if answer.usage:
                details = answer.usage.prompt_tokens_details
                into.num_prompt_tokens += answer.usage.prompt_tokens
                into.num_cached_tokens += (details and details.cached_tokens) or 0
            choice = answer.choices[0]
            tokens = (choice.model_extra or {})["token_ids"]
            tokens = tokens[:-1] if choice.finish_reason == "stop" else tokens
            return choice.message.content or "", tokens

    try:
        for start in range(0, len(cases), NUM_AT_A_TIME):
            some = cases[start : start + NUM_AT_A_TIME]
            for each in passes:
                started = time.monotonic()
                each.answers += await asyncio.gather(*(ask(case, each) for case in some))
                each.seconds += time.monotonic() - started
    finally:
        await client.close()


def ask_checkpoint(
    cases: list[dict[str, Any]], folder: Path, checkpoint: Path, device: str
) -> Iterator[Answer]:
    """Answer with Transformers alone: its processor, its model and its `generate`."""
    import torch
    import transformers as tf

    from sensorium.models import ensure_torchvision

    ensure_torchvision()
    processor = tf.AutoProcessor.from_pretrained(checkpoint)
    model = tf.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(checkpoint)
    model = model.to(device).eval()
    for case in tqdm(cases, mininterval=5.0):
        inputs = make_inputs(processor, case, folder).to(device)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :].tolist()
        tokens = new[:-1] if new[-1] == processor.tokenizer.eos_token_id else new
        yield processor.tokenizer.decode(tokens, skip_special_tokens=True), tokens


def make_inputs(processor: Any, case: dict[str, Any], folder: Path) -> Any:
    import av
    import numpy as np
    from PIL import Image

    content: list[dict[str, str]] = []
    media: dict[str, Any] = {}
    if case["picture"]:
        content.append({"type": "image"})
        media["images"] = [Image.open(folder / case["picture"]).convert("RGB")]
    if case["video"]:
        content.append({"type": "video"})
        with av.open(str(folder / case["video"])) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
        media["videos"] = [np.stack(frames)]
    if case["sound"]:
        content.append({"type": "audio"})
        data = (folder / case["sound"]).read_bytes()[44:]
        media["audio"] = [np.frombuffer(data, "<i2").astype(np.float32) / 32768.0]
    if case["question"]:
        content.append({"type": "text", "text": case["question"]})
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return processor(text=text, return_tensors="pt", **media)


def score(cases: list[dict[str, Any]], answers: list[str]) -> dict[str, Any]:
    by_task: dict[str, Asked] = defaultdict(list)
    for case, answer in zip(cases, answers, strict=True):
        by_task[case["task"]].append((case, answer))
    return {task: _score_task(task, asked) for task, asked in by_task.items()}


def _score_task(task: str, asked: Asked) -> dict[str, Any]:
    is_text = task.startswith(("words", "digits"))
    right = sum(is_right(answer, case["answer"], is_text=is_text) for case, answer in asked)
    low, high = interval(right, len(asked))
    figures: dict[str, Any] = {
        "right": right,
        "cases": len(asked),
        "share": round(right / len(asked), 4),
        "interval": [round(low, 4), round(high, 4)],
    }
    if task.startswith(("speech", "human")):
        figures |= _score_words(asked)
        parts = _part_by_kind(asked)
        if all(parts.values()):
            for name, part in parts.items():
                figures[name] = {"cases": len(part), **_score_words(part)}
    if task.startswith("human"):
        figures["expected"], figures["heard"] = asked[0][0]["answer"], asked[0][1]
    return figures


def _score_words(asked: Asked) -> dict[str, Any]:
    errors = [count_word_errors(answer, case["answer"]) for case, answer in asked]
    num_errors, num_words = (sum(column) for column in zip(*errors, strict=True))
    low, high = interval(min(num_errors, num_words), num_words)
    return {
        "word_errors": round(num_errors / num_words, 4),
        "word_errors_interval": [round(low, 4), round(high, 4)],
    }


def _part_by_kind(asked: Asked) -> dict[str, Asked]:
    parts: dict[str, Asked] = {"random_strings": [], "sentences": []}
    for case, answer in asked:
        name = "random_strings" if is_random_string(case["answer"]) else "sentences"
        parts[name].append((case, answer))
    return parts


def add_records(record: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Join two records that have different tasks."""
    twice = record["scores"].keys() & other["scores"].keys()
    if twice:
        raise ValueError(f"in both records: {', '.join(sorted(twice))}")
    sums = {
        name: round(record[name] + other[name], 1)
        for name in ("seconds", "prompt_tokens", "cached_tokens")
    }
    united = {name: record[name] | other[name] for name in ("scores", "answers")}
    return {"runs": record["runs"] + other["runs"], **sums, **united}


def print_table(scores: dict[str, Any]) -> None:
    for task, figures in scores.items():
        low, high = figures["interval"]
        line = f"{task:42} {figures['share']:7.1%} [{low:.1%}, {high:.1%}] of {figures['cases']}"
        if "word_errors" in figures:
            line += f"  word errors {figures['word_errors']:.1%}"
        for name in ("random_strings", "sentences"):
            if name in figures:
                line += f", {name} {figures[name]['word_errors']:.1%}"
        if "heard" in figures:
            line += f"  {figures['expected']!r} -> {figures['heard']!r}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what training.heldout has written")
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--base-url")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--count", type=int, help="at most so many cases of each task")
    parser.add_argument("--tasks", nargs="+", default=["*"], help="only these; patterns")
    parser.add_argument("--record", type=Path, help="answers and figures as JSON")
    parser.add_argument("--add", action="store_true", help="to records that are there already")
    parser.add_argument(
        "--again", type=Path, help="ask all twice, the second time from caches: its record"
    )
    arguments = parser.parse_args()
    if arguments.again and not arguments.base_url:
        parser.error("--again: only of a server, with --base-url")
    cases = load_cases(arguments.folder, arguments.count, arguments.tasks)
    if arguments.base_url:
        passes = [Pass() for _ in range(2 if arguments.again else 1)]
        asyncio.run(
            ask_server(cases, arguments.folder, arguments.base_url, arguments.concurrency, passes)
        )
    else:
        started = time.monotonic()
        answers = ask_checkpoint(cases, arguments.folder, arguments.checkpoint, arguments.device)
        passes = [Pass(list(answers))]
        passes[0].seconds = time.monotonic() - started
    for each, path in zip(passes, (arguments.record, arguments.again), strict=False):
        run = {name: getattr(arguments, name) for name in ("concurrency", "tasks", "count")}
        record = {"runs": [run], **each.make_record(cases)}
        print_table(record["scores"])
        print(
            f"{len(cases)} cases in {each.seconds:.0f} s, {each.num_cached_tokens} of "
            f"{each.num_prompt_tokens} tokens of prompts from the cache"
        )
        if path:
            if arguments.add and path.exists():
                record = add_records(json.loads(path.read_text()), record)
            path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
