"""Measures what a request with many media items costs the core, per step and in all.

One running request with 32, 1,024 and 32,768 items. Each window of its prefill holds the same
number of items; windows from the middle half of the prefill are timed, the sizes in turn, so that
what the machine does meanwhile hits all of them alike. No model runs: this is the scheduler, its
accounting and the index work of gathering.

python benchmarks/core_step.py [--rounds N] [--record]

The last line of the output is JSON: medians in microseconds, totals in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from time import perf_counter_ns
from typing import Any

from records import write_record
from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup, ModelRunnerOutput, SchedulerOutput
from sensorium.worker.input_batch import get_gather_slices

SIZES = (32, 1024, 32768)
ITEM_LENGTH = 4  # tokens of an item, three of them embeddings
ITEM_STRIDE = 5  # an item and a token of text
ITEMS_PER_WINDOW = 4
WINDOW = ITEM_STRIDE * ITEMS_PER_WINDOW
BLOCK_SIZE = 16
DECODE_TOKENS = 1024
IS_EMBED = (False, True, True, True)

Samples = dict[str, dict[int, list[float]]]


def make_request(num_items: int, request_id: str) -> EngineCoreRequest:
    features = tuple(
        MultiModalFeatureSpec(
            modality="image",
            mm_hash=f"{request_id}-{index:064d}",
            mm_position=PlaceholderRange(index * ITEM_STRIDE, ITEM_LENGTH, IS_EMBED),
        )
        for index in range(num_items)
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_items * ITEM_STRIDE)),
        sampling_params=SamplingParams(max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True),
        mm_features=features,
    )


def make_scheduler(num_items: int, *, max_num_batched_tokens: int = WINDOW) -> Scheduler:
    num_tokens = num_items * ITEM_STRIDE + DECODE_TOKENS
    limits = Limits(
        max_model_len=num_tokens + 1,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        encoder_cache_size=num_items * ITEM_LENGTH,
        max_num_encoder_embeds=max_num_batched_tokens,
    )
    groups = [KVCacheGroup(num_blocks=num_tokens // BLOCK_SIZE + 8)]
    return Scheduler(
        limits,
        kv_cache=KVCacheManager(groups, block_size=BLOCK_SIZE),
        encoder_cache=EncoderCacheManager(limits.encoder_cache_size),
    )


def answer(output: SchedulerOutput) -> ModelRunnerOutput:
    """Return what a worker would answer; its token is always the same."""
    sampled = {entry.request_id: (7,) for entry in output.scheduled if entry.num_sampled}
    return ModelRunnerOutput(token_ids=sampled, logprobs={}, failed_encodes={})


class Subject:
    """A request of one size that is stepped again and again, begun anew when it is through."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self._num_begun = 0
        self._begin()

    def _begin(self) -> None:
        self._num_begun += 1
        self.scheduler = make_scheduler(self.num_items)
        core_request = make_request(self.num_items, f"r{self._num_begun}")
        self.scheduler.add_request(core_request)
        self.request = self.scheduler.requests[core_request.request_id]

    def step(self) -> float:
        """Run one step and return its schedule and update in microseconds."""
        start = perf_counter_ns()
        output = self.scheduler.schedule()
        middle = perf_counter_ns()
        result = answer(output)
        restart = perf_counter_ns()
        self.scheduler.update_from_output(output, result)
        return (middle - start + perf_counter_ns() - restart) / 1e3

    def move_to_middle(self) -> None:
        """Step until the middle half of the prefill."""
        num_tokens = self.request.num_prompt_tokens
        if self.request.num_computed_tokens + WINDOW > num_tokens * 3 // 4:
            self._begin()
        while self.request.num_computed_tokens < num_tokens // 4:
            self.step()

    def move_to_decode(self) -> None:
        """Step until the prefill has ended, with tokens left to generate."""
        if self.request.num_output_tokens >= DECODE_TOKENS - 1:
            self._begin()
        while self.request.num_output_tokens == 0:
            self.step()

    def time_gather(self) -> float:
        start = perf_counter_ns()
        first = self.request.num_computed_tokens
        get_gather_slices(self.request.mm_features, first, first + WINDOW)
        return (perf_counter_ns() - start) / 1e3

    def time_free_item(self) -> float:
        """Release one item of the window, then let the step continue as usual."""
        output = self.scheduler.schedule()
        held = min(self.scheduler.encoder_cache.get_cached_input_ids(self.request))
        for entry in output.scheduled:
            for encoder_input in entry.encoder_inputs:
                self.scheduler.encoder_cache.mark_computed(encoder_input.key)
        start = perf_counter_ns()
        self.scheduler.encoder_cache.free_encoder_input(self.request, held)
        elapsed = (perf_counter_ns() - start) / 1e3
        self.scheduler.update_from_output(output, answer(output))
        return elapsed


def time_prefill(num_items: int) -> float:
    """The whole prefill in milliseconds."""
    subject = Subject(num_items)
    total_us = 0.0
    while subject.request.num_computed_tokens < subject.request.num_prompt_tokens:
        total_us += subject.step()
    return total_us / 1e3


def time_free_request(num_items: int) -> float:
    """Free a request that holds all its items and blocks, in milliseconds."""
    scheduler = make_scheduler(num_items, max_num_batched_tokens=num_items * ITEM_STRIDE)
    scheduler.add_request(make_request(num_items, "whole"))
    scheduler.schedule()
    start = perf_counter_ns()
    scheduler.abort_request("whole")
    return (perf_counter_ns() - start) / 1e6


def measure(num_rounds: int) -> dict[str, Any]:
    samples: Samples = defaultdict(lambda: defaultdict(list))
    subjects = [Subject(size) for size in SIZES]
    decoding = [Subject(size) for size in SIZES]
    for _ in range(num_rounds):
        for subject in subjects:
            subject.move_to_middle()
            gathered = subject.time_gather()
            samples["schedule_update"][subject.num_items].append(subject.step())
            samples["gather"][subject.num_items].append(gathered)
            subject.move_to_middle()
            samples["free"][subject.num_items].append(subject.time_free_item())
        for subject in decoding:
            subject.move_to_decode()
            samples["schedule_update_decode"][subject.num_items].append(subject.step())
    totals: dict[str, dict[int, list[float]]] = {"prefill": {}, "free": {}}
    for size in SIZES:
        repeats = 20 if size == SIZES[0] else 5
        totals["prefill"][size] = [time_prefill(size) for _ in range(repeats)]
        totals["free"][size] = [time_free_request(size) for _ in range(repeats)]
    median_us = {name: _summary(values, statistics.median) for name, values in samples.items()}
    p99_us = {name: _summary(values, _p99) for name, values in samples.items()}
    return {
        "step_us": median_us,
        "step_us_p99": p99_us,
        "total_ms": {name: _summary(values, statistics.median) for name, values in totals.items()},
        "ratio_32768_to_32": {
            name: round(values["32768"] / values["32"], 3) for name, values in median_us.items()
        },
    }


def _summary(values: dict[int, list[float]], function: Any) -> dict[str, float]:
    return {str(size): round(function(numbers), 3) for size, numbers in values.items()}


def _p99(numbers: list[float]) -> float:
    return statistics.quantiles(numbers, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=2000, help="timed windows per size (default 2000)"
    )
    parser.add_argument(
        "--record", action="store_true", help="write benchmarks/records/core_step.json"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds must be at least 2")
    figures = measure(arguments.rounds)
    for name, ratio in figures["ratio_32768_to_32"].items():
        print(f"{name:24s} {figures['step_us'][name]} us, 32768 items to 32: {ratio}x")
    if arguments.record:
        print(f"record: {write_record('core_step', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
