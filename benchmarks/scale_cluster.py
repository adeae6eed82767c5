"""Routers of Ray Serve side by side, with engines that have no model. `scale.py serve` uses it.

Two cores can't carry four models. So an engine here is the scheduler of a real one, with its KV
blocks and its encoder cache, and a worker that waits as long as a model would compute.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.scale import placement
from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreOutput, EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup, ModelRunnerOutput

STEP_S = 0.008  # of a step, whatever is in it
ENCODE_S = 0.12  # more for each image that is encoded
NUM_TOKENS = 8  # of an answer
NUM_EMBEDS = 64  # of an image
CACHE_SIZE = 100  # images in an encoder cache
NUM_REPLICAS = 4
# Of the work that all engines can do one request after the other, if each image is encoded once.
LOAD = 0.7
NUM_BLOCKS = 6  # the parts of the trace that the routers serve in turns
NUM_IDLE = 40  # requests one after the other, for the costs without any queue
MAX_QUEUE = 10_000
TEXT = "Describe what you see in the picture, in one sentence. " * 4
# At its default of infinity, Ray's router would send all requests to one engine here.
TEXT_IMBALANCE = 5
_RAY_PREFIX = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)


@dataclass
class Question:
    """What a router sees of a request; Ray's own looks for `prompt`."""

    prompt: str
    image: str


class SimulatedEngine:
    """An engine with the scheduler and the encoder cache of a real one, and a worker that waits.

    A step takes `STEP_S`, and `ENCODE_S` more for each image that it encodes.
    """

    def __init__(self) -> None:
        self._scheduler = _make_scheduler()
        self._outputs: dict[str, asyncio.Queue[EngineCoreOutput]] = {}
        self._numbers = count()
        self._running: asyncio.Task[None] | None = None

    async def run(self, question: Question, **_: object) -> AsyncIterator[bool]:
        """Yield something for each token, and whether the image was in the encoder cache."""
        request_id = str(next(self._numbers))
        own = self._outputs[request_id] = asyncio.Queue()
        self._scheduler.add_request(_make_request(request_id, question.image))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_steps())
        while True:
            output = await own.get()
            yield output.num_encoder_hits > 0
            if output.finish_reason is not None:
                return

    async def clear(self) -> None:
        self._scheduler = _make_scheduler()

    async def _run_steps(self) -> None:
        while self._outputs:
            step = self._scheduler.schedule()
            entries = [entry for each in step.scheduled for entry in each.encoder_inputs]
            await asyncio.sleep(STEP_S + ENCODE_S * len(entries))
            tokens = {each.request_id: (7,) for each in step.scheduled if each.num_sampled}
            result = ModelRunnerOutput(token_ids=tokens, logprobs={}, failed_encodes={})
            for output in self._scheduler.update_from_output(step, result):
                own = self._outputs[output.request_id]
                own.put_nowait(output)
                if output.finish_reason is not None:
                    del self._outputs[output.request_id]


def _make_scheduler() -> Scheduler:
    limits = Limits(
        max_model_len=NUM_EMBEDS + NUM_TOKENS + 8,
        max_num_batched_tokens=2048,
        max_num_seqs=MAX_QUEUE,
        encoder_cache_size=CACHE_SIZE * NUM_EMBEDS,
        max_num_encoder_embeds=2048,
    )
    groups = [KVCacheGroup(num_blocks=4096)]
    return Scheduler(
        limits,
        kv_cache=KVCacheManager(groups, block_size=16, enable_prefix_caching=False),
        encoder_cache=EncoderCacheManager(limits.encoder_cache_size),
    )


def _make_request(request_id: str, image: str) -> EngineCoreRequest:
    place = PlaceholderRange(0, NUM_EMBEDS)
    feature = MultiModalFeatureSpec(modality="image", mm_hash=image, mm_position=place)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(NUM_EMBEDS + 4)),
        sampling_params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        mm_features=(feature,),
    )


class LeastQueueRouter(RequestRouter):
    """A router that leaves the choice to Ray, which takes the shortest queue that it has read."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        return [shuffled]


ROUTERS: dict[str, dict[str, Any]] = {
    "media": {
        "request_router_class": "sensorium.scale.router:MediaAffinityRouter",
        "request_router_kwargs": {"deployment": "media", "max_queue": MAX_QUEUE},
    },
    "round robin": {
        "request_router_class": "ray.serve.experimental.round_robin_router:RoundRobinRouter"
    },
    "least queue": {"request_router_class": "scale_cluster:LeastQueueRouter"},
    "text": {
        "request_router_class": _RAY_PREFIX,
        "request_router_kwargs": {"imbalanced_threshold": TEXT_IMBALANCE},
    },
}


@dataclass
class Found:
    """What became of the requests that one router has placed."""

    num_hits: int = 0
    waits: list[float] = field(default_factory=list)  # until the first token, in seconds
    idle: list[float] = field(default_factory=list)  # beyond the engine's own time, without a queue


def run_cluster(traces: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Serve each trace with all routers in turns, and return the figures by trace and router."""
    ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"location": "NoServer"})
        handles = {name: _deploy(name, options) for name, options in ROUTERS.items()}
        return {label: asyncio.run(_compare(handles, trace)) for label, trace in traces.items()}
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def _deploy(name: str, options: dict[str, Any]) -> Any:
    deployment = serve.deployment(
        name=name.replace(" ", "-"),
        num_replicas=NUM_REPLICAS,
        max_ongoing_requests=MAX_QUEUE,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(**options),
    )(SimulatedEngine)
    return serve.run(deployment.bind(), name=name.replace(" ", "-"), route_prefix=None)


async def _compare(handles: dict[str, Any], trace: Sequence[str]) -> dict[str, Any]:
    for handle in handles.values():
        await handle.broadcast("clear").results_async(timeout_s=60)
    found = {name: Found() for name in handles}
    tally = placement.get_tally("media")
    placed_before, seconds_before, spilled_before = (
        tally.num_placed,
        tally.seconds,
        tally.num_spilled,
    )
    num_images = len(set(trace))
    work_s = STEP_S * NUM_TOKENS * len(trace) + ENCODE_S * num_images
    rate = LOAD * NUM_REPLICAS * len(trace) / work_s
    size = -(-len(trace) // NUM_BLOCKS)
    turns = list(handles)
    for block in range(NUM_BLOCKS):
        for name in turns[block % len(turns) :] + turns[: block % len(turns)]:
            part = trace[block * size : (block + 1) * size]
            await _send(handles[name], part, rate, found[name], seed=block)
            print(f"  block {block + 1} of {NUM_BLOCKS}: {name}", flush=True)
    num_placed = tally.num_placed - placed_before
    own_ms = 1000 * (tally.seconds - seconds_before) / max(1, num_placed)
    num_spilled = tally.num_spilled - spilled_before
    for name, handle in handles.items():
        await _measure_idle(handle, found[name])
    best = (len(trace) - num_images) / len(trace)
    rows = {name: _summarise(each, len(trace), best) for name, each in found.items()}
    rows["media"] |= {
        "own_ms_per_request": round(own_ms, 3),
        "spilled": round(num_spilled / max(1, num_placed), 4),
    }
    return {
        "num_requests": len(trace),
        "num_images": num_images,
        "hit_rate_of_one_unbounded_server": round(best, 4),
        "requests_per_s": round(rate, 1),
        "routers": rows,
    }


def _summarise(found: Found, num_requests: int, best: float) -> dict[str, float]:
    waits = sorted(found.waits)
    rate = found.num_hits / num_requests
    return {
        "hit_rate": round(rate, 4),
        "of_best": round(rate / best, 4),
        "ttft_p50_ms": round(1000 * waits[len(waits) // 2], 1),
        "ttft_p95_ms": round(1000 * waits[int(0.95 * len(waits))], 1),
        "beyond_engine_idle_ms": round(1000 * statistics.median(found.idle), 2),
    }


async def _send(
    handle: Any, images: Sequence[str], rate: float, found: Found, *, seed: int
) -> None:
    """Send requests at random times, as clients do, and wait for all of them."""
    chance = random.Random(seed)
    tasks = []
    due = time.perf_counter()
    for image in images:
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_ask(handle, image, found)))
    await asyncio.gather(*tasks)


async def _ask(handle: Any, image: str, found: Found) -> None:
    began = time.perf_counter()
    stream = handle.options(stream=True).run.remote(Question(TEXT, image), routing_key=image)
    hits: list[bool] = []
    async for is_hit in stream:
        if not hits:
            found.waits.append(time.perf_counter() - began)
        hits.append(is_hit)
    found.num_hits += hits[-1]


async def _measure_idle(handle: Any, found: Found) -> None:
    """Ask for an image that is known, again and again, and note what is not the engine's step."""
    apart = Found()
    for _ in range(2 * NUM_IDLE):  # the first ones encode the image, wherever they go
        await _ask(handle, "idle", apart)
    found.idle = [wait - STEP_S for wait in apart.waits[NUM_IDLE:]]
