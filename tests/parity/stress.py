"""Random conversations on random engines, compared with `generate`.

All is drawn from a seed: the conversations of a family, the engines with their settings, and when
requests arrive and are aborted. The same seed draws the same again.

    python -m tests.parity.stress --first-seed 1 --rounds 20 [family ...]

runs other seeds than the tests do, and prints what was compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.core.request import Request
from tests.parity.cases import (
    MAIN_FAMILIES,
    MODALITIES,
    Case,
    Part,
    make_audio,
    make_image,
    make_text,
    make_video,
)
from tests.parity.reference import Expected, Reference
from tests.support.engine import (
    MAX_STEPS,
    Trace,
    assert_nothing_is_left,
    get_kv_bytes,
    get_largest_item,
    make_llm,
)

NUM_REQUESTS = 30
NUM_ENGINES = 4
MAX_NEW_TOKENS = 16
# How likely a prompt has 0, 1, 2, 3 items: fewer where an item is long.
_ITEM_COUNTS = {"gemma4": (0.3, 0.5, 0.2), "voxtral": (0.5, 0.4, 0.1)}
_MAX_FRAMES = {"gemma4": 2, "qwen2_5_omni": 4}
# The tiny model has few positions a side: a narrow picture is scaled beyond them.
_LEAST_SIDE = {"gemma4": 50}
# Their processors count pictures and videos as one.
_ONE_MODALITY = ("smolvlm",)
_BLOCK_SIZES = (1, 4, 16)
_MOST_STEPS = 500  # of a whole share, roughly: very small budgets are for short prompts

Rng = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request as it is sent.

    `arrival` is a step. `abort_after`: so many steps after it arrived, or started if
    `is_run_first`; `None` lets it end.
    """

    expected: Expected
    prompt: dict[str, Any]
    params: SamplingParams
    arrival: int
    abort_after: int | None = None
    is_run_first: bool = False


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was seen, and what differed. `num_compared` counts completions."""

    num_engines: int = 0
    num_requests: int = 0
    num_compared: int = 0
    num_tokens: int = 0
    num_aborted_running: int = 0
    num_aborted_preempted: int = 0
    num_aborted_waiting: int = 0
    num_preemptions: int = 0
    num_prefix_hits: int = 0
    num_encoder_hits: int = 0
    num_encoder_evictions: int = 0
    compared_names: list[str] = field(default_factory=list, repr=False)
    differences: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))


# ---- conversations


class _Cases:
    """Draws items and texts from a pool: they are few, so that requests have some in common."""

    def __init__(self, rng: Rng, family: str) -> None:
        self._rng = rng
        self._family = family
        self._pool = rng.integers(2**32, size=5).tolist()

    def draw(self, name: str) -> Case:
        rng, family = self._rng, self._family
        modalities = MODALITIES[family]
        counts = _ITEM_COUNTS.get(family, (0.2, 0.4, 0.25, 0.15)) if modalities else (1.0,)
        num_items = int(rng.choice(len(counts), p=counts))
        if family in _ONE_MODALITY:
            modalities = (str(rng.choice(modalities)),)
        # Transformers stacks the videos of a prompt: they have equally many frames.
        num_frames = int(rng.integers(2, _MAX_FRAMES.get(family, 6) + 1))
        parts: list[Part] = []
        for _ in range(num_items):
            if rng.random() < 0.6:
                parts.append(self._draw_text(most=10))
            parts.append(self._draw_item(str(rng.choice(modalities)), num_frames))
        if num_items == 0 or rng.random() < 0.8:
            parts.append(self._draw_text(most=60 if num_items == 0 else 25))
        return Case(name=name, parts=tuple(parts))

    def _draw_seed(self) -> int:
        """The first of the pool more often than the last."""
        seed: int = self._pool[min(int(self._rng.geometric(0.4)), len(self._pool)) - 1]
        return seed

    def _draw_text(self, *, most: int) -> str:
        """Two texts of one seed begin alike."""
        return make_text(int(self._rng.integers(1, most + 1)), seed=self._draw_seed())

    def _draw_item(self, modality: str, num_frames: int) -> Part:
        """Its size belongs to its seed."""
        seed = self._draw_seed()
        size = np.random.default_rng((seed, num_frames if modality == "video" else 0))
        least = _LEAST_SIDE.get(self._family, 20)
        if modality == "image":
            height, width = size.integers(least, 150, 2).tolist()
            return make_image(height, width, seed=seed)
        if modality == "video":
            height, width = size.integers(max(28, least), 100, 2).tolist()
            return make_video(num_frames, height, width, seed=seed)
        return make_audio(float(size.uniform(0.1, 2.5)), seed=seed)


# ---- engines and what they are asked


class Stress:
    """A family's requests of one seed, with what Transformers says, and engines for them.

    All engines get `options`.
    """

    def __init__(self, reference: Reference, seed: int, **options: Any) -> None:
        self._reference = reference
        self._options = options
        self._seed = seed
        self._rng = np.random.default_rng((seed, MAIN_FAMILIES.index(reference.family)))
        cases = _Cases(self._rng, reference.family)
        self.expected = [
            reference.compute(cases.draw(f"request {index}"), num_tokens=MAX_NEW_TOKENS)
            for index in range(NUM_REQUESTS)
        ]
        self._probe = make_llm(reference.directory, block_size=1, **options)
        prompts = [entry.prompt for entry in self.expected if entry.case.num_items]
        self._largest_item = get_largest_item(self._probe, prompts) if prompts else 1

    def run(self) -> Tally:
        """Every request is compared on one of the engines; some are sent again, and aborted."""
        tally = Tally()
        for engine in self.run_engines():
            tally.add(engine)
        return tally

    def run_engines(self) -> Iterator[Tally]:
        """Run one engine after the other, until the caller stops asking."""
        for index, order in enumerate(
            np.array_split(self._rng.permutation(NUM_REQUESTS), NUM_ENGINES)
        ):
            own = [self.expected[i] for i in order]
            options = self._draw_options(own, is_tight=index % 2 == 0)
            if index == 0:  # at least one engine has many at once in a small cache
                budget = int(self._rng.integers(40, 301))
                options |= {"max_num_batched_tokens": budget, "max_num_seqs": 8}
            if index == 1:  # and at least one finds prefixes again
                options |= {"enable_prefix_caching": True, "block_size": 1}
            pause = float(self._rng.choice((0.0, 1.0, 4.0))) if index > 0 else 0.0
            jobs = self._draw_jobs(own, pause)
            yield self._run_engine(options, jobs, f"seed {self._seed}, engine {index}")

    def _run_engine(self, options: dict[str, Any], jobs: Sequence[Job], name: str) -> Tally:
        llm = make_llm(self._reference.directory, **self._options, **options)
        where = f"{self._reference.family}, {name}: {options}"
        try:
            tally = drive(llm, jobs)
        except Exception as error:
            error.add_note(where)
            raise
        tally.differences = [f"{where}: {difference}" for difference in tally.differences]
        return tally

    def _draw_options(self, expected: Sequence[Expected], *, is_tight: bool) -> dict[str, Any]:
        rng = self._rng
        lengths = [len(entry.prompt_token_ids) + MAX_NEW_TOKENS for entry in expected]
        block_size = int(rng.choice(_BLOCK_SIZES))
        least_budget = max(1, sum(lengths) // _MOST_STEPS)
        options: dict[str, Any] = {
            "block_size": block_size,
            "max_num_batched_tokens": int(np.exp(rng.uniform(np.log(least_budget), np.log(301)))),
            "max_num_seqs": int(rng.integers(3 if is_tight else 1, 9)),
            "encoder_cache_size": self._largest_item + int(rng.integers(2 * self._largest_item)),
            "max_num_encoder_embeds": int(rng.integers(1, 2 * self._largest_item + 1)),
            "enable_prefix_caching": bool(rng.random() < 0.7),
            "disable_chunked_mm_input": bool(rng.random() < 0.25),
            "scheduling_policy": "priority" if rng.random() < 0.4 else "fcfs",
        }
        if is_tight:
            longest = max(lengths)
            num_tokens = longest + int(rng.integers(1 + longest // 4))
            num_blocks = -(-num_tokens // block_size) + 1
            options["max_model_len"] = longest
            # The probe has blocks of one token.
            options["kv_cache_memory_bytes"] = get_kv_bytes(
                self._probe, num_blocks * block_size - 1
            )
        return options

    def _draw_jobs(self, own: Sequence[Expected], pause: float) -> list[Job]:
        """The engine's share, and some of it again that leave early, in the order of arrival.

        They come with `pause` steps between them on average.
        """
        rng = self._rng
        num_doomed = int(rng.integers(3, 7))
        doomed = [own[i] for i in rng.integers(len(own), size=num_doomed)]
        jobs = []
        arrival = 0
        for i in rng.permutation(len(own) + num_doomed):
            is_doomed = i >= len(own)
            entry = doomed[i - len(own)] if is_doomed else own[i]
            jobs.append(
                Job(
                    expected=entry,
                    prompt=self._draw_prompt(entry),
                    params=self._draw_params(),
                    arrival=arrival,
                    abort_after=int(rng.geometric(0.3)) - 1 if is_doomed else None,
                    is_run_first=bool(i % 2),
                )
            )
            arrival += round(rng.exponential(pause))
        return jobs

    def _draw_prompt(self, expected: Expected) -> dict[str, Any]:
        prompt = {**expected.prompt, "priority": int(self._rng.integers(-2, 3))}
        if self._rng.random() < 0.2:
            prompt["cache_salt"] = str(self._rng.choice(("pepper", "salt")))
        return prompt

    def _draw_params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=int(self._rng.integers(1, MAX_NEW_TOKENS + 1)),
            n=2 if self._rng.random() < 0.15 else 1,
            ignore_eos=True,
        )


# ---- driving an engine


def drive(llm: LLM, jobs: Sequence[Job]) -> Tally:
    """Send the jobs as they arrive, and abort those that are to be; at the end nothing is left."""
    tally = Tally(num_engines=1, num_requests=len(jobs))
    trace = Trace(llm)
    todo = list(reversed(jobs))
    live: dict[str, _Live] = {}
    for step in range(MAX_STEPS):
        while todo and todo[-1].arrival <= step:
            job = todo.pop()
            live[llm._add(job.prompt, job.params)] = _Live(job)
        for request_id in [request_id for request_id, entry in live.items() if entry.is_due]:
            del live[request_id]
            _abort(llm, request_id, tally)
        if live:
            for output in llm._step():
                _compare(output, live.pop(output.request_id).job, tally)
            _count_steps(llm, live)
        elif not todo:
            break
    assert not live, f"not done after {MAX_STEPS} steps"
    assert not todo, f"not all sent after {MAX_STEPS} steps"
    assert_nothing_is_left(llm)
    tally.num_preemptions = trace.num_preemptions
    tally.num_encoder_evictions = llm.core.scheduler.encoder_cache.statistics().num_evictions
    return tally


@dataclass(slots=True)
class _Live:
    """A request in the engine, and how many of the steps that its abort waits for have passed."""

    job: Job
    num_steps: int = 0

    @property
    def is_due(self) -> bool:
        if self.job.abort_after is None or (self.job.is_run_first and self.num_steps == 0):
            return False
        return self.num_steps >= self.job.abort_after


def _count_steps(llm: LLM, live: dict[str, _Live]) -> None:
    for request_id, entry in live.items():
        if entry.num_steps > 0 or not entry.job.is_run_first or _get_running(llm, request_id):
            entry.num_steps += 1


def _get_running(llm: LLM, request_id: str) -> list[Request]:
    child_ids = llm._driver.outputs.get_child_ids((request_id,))
    return [entry for entry in llm.core.scheduler.running if entry.request_id in child_ids]


def _abort(llm: LLM, request_id: str, tally: Tally) -> None:
    scheduler = llm.core.scheduler
    child_ids = llm._driver.outputs.get_child_ids((request_id,))
    children = [
        scheduler.requests[child_id] for child_id in child_ids if child_id in scheduler.requests
    ]
    if _get_running(llm, request_id):
        tally.num_aborted_running += 1
    elif any(child.num_preemptions for child in children):
        tally.num_aborted_preempted += 1
    else:
        tally.num_aborted_waiting += 1
    llm._abort((request_id,))
    for child in children:
        assert child.request_id not in scheduler.requests
        assert scheduler.kv_cache.get_block_ids(child.request_id) == ()
        assert scheduler.encoder_cache.get_cached_input_ids(child) == frozenset()


def _compare(output: RequestOutput, job: Job, tally: Tally) -> None:
    """That a request fails is no difference: it is an error."""
    name = f"{job.expected.case.name}, {job.params.max_tokens} tokens"
    assert output.error is None, f"{name}: {output.error}"
    assert list(output.prompt_token_ids) == job.expected.prompt_token_ids, name
    assert len(output.outputs) == job.params.n, name
    expected = job.expected.token_ids[: job.params.max_tokens]
    for completion in output.outputs:
        token_ids = list(completion.token_ids)
        assert len(token_ids) == len(expected), name
        tally.num_compared += 1
        tally.compared_names.append(job.expected.case.name)
        tally.num_tokens += len(token_ids)
        if token_ids != expected:
            tally.differences.append(f"{name}: {_explain(token_ids, job.expected)}")
    tally.num_prefix_hits += output.num_cached_tokens > 0
    tally.num_encoder_hits += output.num_encoder_hits


def _explain(token_ids: Sequence[int], expected: Expected) -> str:
    """Where it differs, and how sure Transformers was of its token there."""
    pairs = enumerate(zip(token_ids, expected.token_ids, strict=False))
    index, (ours, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    logits = expected.logits[index]
    margin = float(logits[theirs] - logits[ours])
    return f"token {index} is {ours}, not {theirs}, whose logit is larger by {margin:.3g}"


# ---- other seeds


def main() -> None:
    root = Path(__file__).parents[2]
    sys.path.insert(0, str(root / "scripts"))
    from make_tiny_models import make_family

    parser = argparse.ArgumentParser(description="Compare random requests with `generate`.")
    parser.add_argument(
        "families", nargs="*", default=MAIN_FAMILIES, help="all of them if not given"
    )
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    references = [
        Reference(str(make_family(family, root / "build" / "tiny-models")), family)
        for family in arguments.families
    ]
    total = Tally()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.rounds):
        for reference in references:
            start = time.process_time()
            tally = Stress(reference, seed).run()
            total.add(tally)
            print(f"{reference.family} {seed} {time.process_time() - start:.1f} s {tally}")
    print(f"total {total}")
    sys.exit(bool(total.differences))


if __name__ == "__main__":
    main()
