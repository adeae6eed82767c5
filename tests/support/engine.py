"""Drives an engine step by step and watches what its scheduler decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from sensorium import LLM, RequestOutput, SamplingParams
from sensorium.engine.inputs.input_processor import ProcessedRequest
from sensorium.multimodal.cache.mirror import MirrorSender
from sensorium.types.multimodal import MultiModalKwargsItem, Transfer
from sensorium.types.request import EngineCoreRequest
from sensorium.types.scheduling import SchedulerOutput
from sensorium.worker.encoder_runner import EncoderRunner
from sensorium.worker.graphs.encoder_graphs import EncoderGraphs
from sensorium.worker.graphs.recorder import Recorder

MAX_STEPS = 5000
# How many tokens a KV cache has in addition to those of the longest request. With one of these
# numbers it is just too small for the requests that share it, so that one of them is preempted.
ROOMS = (16, 0, 7, 3, 12, 23, 29, 38, 47, 61, 80)


class Trace:
    """A record of every step that an engine's worker runs from now on."""

    def __init__(self, llm: LLM) -> None:
        self.steps: list[SchedulerOutput] = []
        runner: Any = llm.core.runner
        launch = runner.launch

        def launch_and_note(output: SchedulerOutput) -> Any:
            self.steps.append(output)
            return launch(output)

        runner.launch = launch_and_note

    @property
    def requests(self) -> dict[str, EngineCoreRequest]:
        return {s.request.request_id: s.request for step in self.steps for s in step.started}

    @property
    def most_requests_in_a_step(self) -> int:
        return max(len(step.scheduled) for step in self.steps)

    @property
    def num_encoded_items(self) -> int:
        return sum(len(s.encoder_inputs) for step in self.steps for s in step.scheduled)

    @property
    def preempted_ids(self) -> set[str]:
        """Return the requests that were taken from the worker and given to it again."""
        return {request_id for request_id, count in self._num_starts.items() if count > 1}

    @property
    def num_preemptions(self) -> int:
        """Count preemptions of requests that were resumed later."""
        return self._num_starts.total() - len(self._num_starts)

    @property
    def _num_starts(self) -> Counter[str]:
        return Counter(s.request.request_id for step in self.steps for s in step.started)

    @property
    def num_split_items(self) -> Counter[str]:
        """Count how often a step ended between two embeddings of one item: modality -> count."""
        requests = self.requests
        count: Counter[str] = Counter()
        for step in self.steps:
            for scheduled in step.scheduled:
                end = scheduled.num_computed_tokens + scheduled.num_new_tokens
                for feature in requests[scheduled.request_id].mm_features:
                    spans = feature.mm_position.extract_embeds_range()
                    count[feature.modality] += any(first < end < last for first, last in spans)
        return count


def make_llm(directory: str, **options: Any) -> LLM:
    values = {"max_model_len": 1024, "max_num_seqs": 8, "dtype": "float32", "device": "cpu"}
    return LLM(directory, **{**values, **options})


@cache
def make_probe(directory: str) -> LLM:
    """Return an engine from which only sizes are read. It is made once for each model."""
    return make_llm(directory, block_size=1)


def get_hf_model(llm: LLM) -> Any:
    return llm.core.runner._hf_model  # type: ignore[attr-defined]


def run_staggered(
    llm: LLM,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    steps_between: int = 3,
) -> list[RequestOutput]:
    """Run prompts that arrive some steps after each other. Return outputs in that order."""
    params_of = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    request_ids: list[str] = []
    outputs: dict[str, RequestOutput] = {}
    for step in range(MAX_STEPS):
        if step % steps_between == 0 and len(request_ids) < len(prompts):
            index = len(request_ids)
            request_ids.append(llm._add(prompts[index], params_of[index]))
        if llm.core.has_requests:
            outputs |= {output.request_id: output for output in llm._step()}
        elif len(request_ids) == len(prompts):
            return [outputs[request_id] for request_id in request_ids]
    raise AssertionError(f"not done after {MAX_STEPS} steps")


def get_token_ids(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    for output in outputs:
        assert output.error is None
    return [output.outputs[0].token_ids for output in outputs]


def get_largest_item(llm: LLM, prompts: Sequence[Any]) -> int:
    """Return the number of embeddings of the largest item in these prompts."""
    params = SamplingParams(max_tokens=1)
    processed = [process_with_tensors(llm, "any", prompt, params)[0] for prompt in prompts]
    features = [feature for entry in processed for feature in entry.request.mm_features]
    return max(feature.mm_position.get_num_embeds() for feature in features)


def get_kv_bytes(llm: LLM, num_tokens: int) -> int:
    """Return the bytes of KV cache in which an engine like this one holds `num_tokens` tokens."""
    runner: Any = llm.core.runner
    block_size = llm.config.block_size
    num_blocks = -(-num_tokens // block_size) + 1  # and the null block
    layers = runner._hf_model.probe_layers()
    element_size = runner._hf_model.dtype.itemsize
    per_token = sum(layer.num_elements_per_token for layer in layers) * element_size
    return num_blocks * block_size * per_token


def process_with_tensors(
    llm: LLM, request_id: str, prompt: Any, params: SamplingParams
) -> tuple[ProcessedRequest, dict[str, MultiModalKwargsItem]]:
    """Return a processed request and the tensors of its media by hash, without caching any."""
    processed = llm.input_processor.process(request_id, prompt, params, skip_mm_cache=True)
    handles = [item.handle for item in processed.items]
    llm.media_parts.readonly.cache.release(handles)
    return processed, {handle.mm_hash: handle.kwargs or {} for handle in handles}


def add_with_tensors(
    llm: LLM, request: EngineCoreRequest, payloads: Mapping[str, MultiModalKwargsItem]
) -> None:
    assert llm.core.add_request(request, Transfer(payloads=payloads)) is None


def assert_nothing_is_left(llm: LLM) -> None:
    """Assert that the engine holds nothing of any request.

    No request, no block in use, no encoder entry that is referenced or was never computed, no
    tensors of media, no text; and the worker has forgotten every request.
    """
    llm.core.step()  # the next step lists the requests that the worker must drop
    runner: Any = llm.core.runner
    scheduler = llm.core.scheduler
    encoder_cache = scheduler.encoder_cache.statistics()
    assert not llm.core.is_busy
    assert not scheduler.running
    assert not scheduler.waiting
    assert [pool.num_used for pool in scheduler.kv_cache.statistics()] == [0] * len(
        llm.config.groups
    )
    assert encoder_cache.num_references == 0
    assert encoder_cache.num_used_embeds == encoder_cache.num_evictable_embeds
    assert encoder_cache.num_entries == len(runner.encoder_cache)
    assert dict(llm.core.payloads) == {}
    assert llm.core.payloads.num_output_bytes == 0
    assert llm.core.loader is None or llm.core.loader.wait_s is None
    assert runner._states == {}
    assert runner._mrope == {}
    assert llm._driver.outputs._states == {}
    assert llm._driver.outputs._owners == {}
    assert len(llm._driver.parallel_sampling) == 0
    sender = llm.media_parts.caches.sender
    assert not isinstance(sender, MirrorSender) or len(sender._held) == 0


def capture_encoders(llm: LLM, recorder: Recorder) -> EncoderGraphs:
    """Let an engine capture its encoders, as the core of a server does."""
    runner: Any = llm.core.runner
    graphs = EncoderGraphs(runner._hf_model, recorder, max_bytes=1 << 30)
    runner.encoder_runner = EncoderRunner(runner._hf_model, runner.encoder_cache, graphs.encode)
    return graphs
