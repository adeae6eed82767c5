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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from training.scoring import count_word_errors, interval, is_right

MAX_TOKENS = 48
Answer = tuple[str, list[int]]  # the text, and its tokens without the last one, which ends it


def load_cases(folder: Path, count: int | None) -> list[dict[str, Any]]:
    """At most `count` of each task."""
    seen: dict[str, int] = defaultdict(int)
    cases = []
    for line in (folder / "cases.jsonl").read_text().splitlines():
        case = json.loads(line)
        seen[case["task"]] += 1
        if count is None or seen[case["task"]] <= count:
            cases.append({**case, "key": f"{case['task']}/{seen[case['task']]}"})
    return cases


def make_content(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The parts of an OpenAI message."""

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
    cases: list[dict[str, Any]], folder: Path, base_url: str, concurrency: int
) -> list[Answer]:
    import openai

    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=600.0)
    model = (await client.models.list()).data[0].id
    room = asyncio.Semaphore(concurrency)
    progress = tqdm(total=len(cases), mininterval=5.0)

    async def ask(case: dict[str, Any]) -> Answer:
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
            choice = answer.choices[0]
            tokens = (choice.model_extra or {})["token_ids"]
            tokens = tokens[:-1] if choice.finish_reason == "stop" else tokens
            return choice.message.content or "", tokens

    try:
        return await asyncio.gather(*map(ask, cases))
    finally:
        await client.close()


def ask_checkpoint(
    cases: list[dict[str, Any]], folder: Path, checkpoint: Path, device: str
) -> Iterator[Answer]:
    """Transformers alone: its processor, its model, its `generate`; only files are read by us."""
    import torch
    import transformers as tf

    from sensorium.models.torchvision_shim import ensure_torchvision

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
    by_task: dict[str, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    for case, answer in zip(cases, answers, strict=True):
        by_task[case["task"]].append((case, answer))
    return {task: _score_task(task, asked) for task, asked in by_task.items()}


def _score_task(task: str, asked: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
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
        errors = [count_word_errors(answer, case["answer"]) for case, answer in asked]
        num_errors, num_words = (sum(column) for column in zip(*errors, strict=True))
        figures["word_errors"] = round(num_errors / num_words, 4)
        low, high = interval(min(num_errors, num_words), num_words)
        figures["word_errors_interval"] = [round(low, 4), round(high, 4)]
    if task.startswith("human"):
        figures["expected"], figures["heard"] = asked[0][0]["answer"], asked[0][1]
    return figures


def print_table(scores: dict[str, Any]) -> None:
    for task, figures in scores.items():
        low, high = figures["interval"]
        line = f"{task:42} {figures['share']:7.1%} [{low:.1%}, {high:.1%}] of {figures['cases']}"
        if "word_errors" in figures:
            line += f"  word errors {figures['word_errors']:.1%}"
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
    parser.add_argument("--record", type=Path, help="answers and figures as JSON")
    arguments = parser.parse_args()
    cases = load_cases(arguments.folder, arguments.count)
    started = time.monotonic()
    if arguments.base_url:
        coroutine = ask_server(cases, arguments.folder, arguments.base_url, arguments.concurrency)
        answers = asyncio.run(coroutine)
    else:
        answers = list(
            ask_checkpoint(cases, arguments.folder, arguments.checkpoint, arguments.device)
        )
    seconds = time.monotonic() - started
    scores = score(cases, [text for text, _ in answers])
    print_table(scores)
    print(f"{len(cases)} cases in {seconds:.0f} s")
    if arguments.record:
        record = {"seconds": round(seconds, 1), "scores": scores}
        record["answers"] = {
            case["key"]: answer for case, answer in zip(cases, answers, strict=True)
        }
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
