"""A real core with a worker that computes nothing."""

from __future__ import annotations

from types import SimpleNamespace

from sensorium.core.admission import Limits
from sensorium.core.encoder_cache_manager import EncoderCacheManager
from sensorium.core.kv_cache_manager import KVCacheManager
from sensorium.core.scheduler import Scheduler
from sensorium.engine.core_process.engine_core import EngineCore, PayloadStore
from sensorium.multimodal.cache.interface import ReceiverCache
from sensorium.multimodal.cache.mirror import MirrorReceiver
from sensorium.types.request import EngineCoreRequest
from sensorium.types.scheduling import KVCacheGroup, ModelRunnerOutput, SchedulerOutput

LIMITS = Limits(
    max_model_len=64,
    max_num_batched_tokens=16,
    max_num_seqs=4,
    encoder_cache_size=8,
    max_num_encoder_embeds=8,
)
NUM_ENCODER_BYTES = 4096
NUM_ENCODED, NUM_LOADED = 5, 2


class IdleRunner:
    """Samples token 1 for all requests."""

    num_encoder_bytes = NUM_ENCODER_BYTES
    encoder_runner = SimpleNamespace(num_encoded=NUM_ENCODED, num_loaded=NUM_LOADED, store=None)

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def forget_request(self, request_id: str) -> None: ...

    def is_done_within(self, _seconds: float, _step: SchedulerOutput) -> bool:
        return False

    def launch(self, output: SchedulerOutput) -> SchedulerOutput:
        return output

    def finish(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sampled = {s.request_id: (1,) for s in output.scheduled if s.num_sampled}
        return ModelRunnerOutput(token_ids=sampled, logprobs={}, failed_encodes={})


def make_core(receiver: ReceiverCache | None = None, *, num_blocks: int = 17) -> EngineCore:
    """Make a core with 16 blocks of 4 tokens, unless another size is given."""
    scheduler = Scheduler(
        LIMITS,
        kv_cache=KVCacheManager([KVCacheGroup(num_blocks=num_blocks)], block_size=4),
        encoder_cache=EncoderCacheManager(8),
    )
    return EngineCore(scheduler, IdleRunner(), PayloadStore(receiver or MirrorReceiver()))
