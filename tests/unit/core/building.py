"""Makes schedulers in one line, and reads what a step has scheduled."""

from __future__ import annotations

from dataclasses import replace

from sensorium.core.admission import Limits
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import KVCacheGroup, SchedulerOutput
from tests.property.scheduler_driver import SchedulerDriver
from tests.property.strategies import CacheSizes

LIMITS = Limits(
    max_model_len=100,
    max_num_batched_tokens=8,
    max_num_seqs=8,
    encoder_cache_size=20,
    max_num_encoder_embeds=20,
)


def make_driver(
    *,
    policy: str = "fcfs",
    num_blocks: int = 101,
    block_size: int = 1,
    windows: tuple[int | None, ...] = (None,),
    enable_prefix_caching: bool = True,
    is_ahead: bool = False,
    **changes: int | bool,
) -> SchedulerDriver:
    """Make a driver with `LIMITS`, in which `changes` replace some."""
    groups = tuple(KVCacheGroup(num_blocks=num_blocks, window=window) for window in windows)
    sizes = CacheSizes(
        block_size=block_size, groups=groups, enable_prefix_caching=enable_prefix_caching
    )
    return SchedulerDriver(replace(LIMITS, **changes), sizes, policy, is_ahead=is_ahead)  # type: ignore[arg-type]


def tokens(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def get_windows(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """Return the tokens `[start, end)` that each request was given."""
    return {
        s.request_id: (s.num_computed_tokens, s.num_computed_tokens + s.num_new_tokens)
        for s in output.scheduled
    }


def run(driver: SchedulerDriver, num_steps: int = 1) -> list[dict[str, tuple[int, int]]]:
    """Run steps, and return the windows of each."""
    windows = []
    for _ in range(num_steps):
        output = driver.schedule()
        windows.append(get_windows(output))
        driver.finish_step(output, token_id=1)
    return windows
