"""What a worker of the pool runs: made once by a factory in the worker, called once per job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sensorium.types.multimodal import MultiModalKwargsItem


class CostlyJobError(Exception):
    """A job is more work than it was given time for: it is to be run as a long one."""

    def __init__(self, cost_s: float) -> None:
        super().__init__(f"about {cost_s:.1f} s of work")
        self.cost_s = cost_s


class Handler(Protocol):
    """Made by `factory(settings: bytes)`. Called from one thread."""

    def __call__(
        self, job: bytes, block: memoryview, *, max_cost_s: float
    ) -> tuple[bytes, MultiModalKwargsItem]:
        """A reply and tensors, which may be none. `block` is writable, the worker's own, and not
        kept after the call. The message of a `RequestError` or a `CapacityError` reaches the
        caller; of any other error only that there was one. A handler that sees that the job is
        more than `max_cost_s` of work raises `CostlyJobError` instead of doing it.
        """
        ...

    def acknowledge(self) -> None:
        """The parent has consumed the last reply. Not called after an error."""
        ...

    def close(self) -> None:
        """The worker ends. Not called when it is killed."""
        ...
