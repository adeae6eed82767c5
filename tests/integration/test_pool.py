"""The pool of processes, with real ones: what it computes, and what it survives."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from sensorium.multimodal.item_codec import as_buffers, encode_header
from sensorium.multimodal.pool import pool as pool_module
from sensorium.multimodal.pool.channel import NO_MEMORY, NOT_PROCESSED
from sensorium.multimodal.pool.pool import PoolReply, ProcessPool
from sensorium.multimodal.single_flight import SingleFlight
from sensorium.types.errors import (
    CapacityError,
    FailedRequestError,
    InvariantError,
    MediaFetchError,
    RequestError,
)
from tests.integration.pool_tensors import make_tensors
from tests.support.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
HANDLERS = "tests.integration.pool_handlers"
SOON_S = 120.0
MakePool = Callable[..., ProcessPool]


def is_running(process_id: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def get_threads() -> set[threading.Thread]:
    """To be compared as sets, not counted: threads of earlier tests may end at any time."""
    return set(threading.enumerate())


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def count_ended(pool: ProcessPool) -> tuple[int, int]:
    statistics = pool.statistics()
    return statistics.num_done, statistics.num_failed


def ask(pool: ProcessPool, job: str, *blocks: Any, deadline_s: float = SOON_S) -> str:
    reply = pool.submit(job.encode(), blocks, deadline_s=deadline_s).result(SOON_S)
    return str(reply.reply.decode())


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    pools = []

    def make(
        size: int = 1,
        *,
        factory: str = "make_servant",
        inherited_fds: Sequence[int] = (),
        **constants: float,
    ) -> ProcessPool:
        for name, value in constants.items():
            monkeypatch.setattr(pool_module, f"_{name.upper()}", value)
        pool = ProcessPool(
            size,
            handler=f"{HANDLERS}:{factory}",
            settings=str(tmp_path).encode(),
            inherited_fds=inherited_fds,
        )
        pools.append(pool)
        return pool

    threads = get_threads()
    yield make
    for pool in pools:
        process_ids = pool.get_process_ids()
        pool.close()
        assert not any(map(is_running, process_ids))
    wait_until(lambda: get_threads() <= threads)


@pytest.fixture(scope="module")
def servants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """One worker for all tests that do it no harm; it is never replaced."""
    settings = str(tmp_path_factory.mktemp("notes")).encode()
    pool = ProcessPool(1, handler=f"{HANDLERS}:make_servant", settings=settings)
    assert pool.wait_until_ready(SOON_S)  # otherwise the worker starts with the first job
    yield pool
    assert pool.statistics().num_restarts == 0
    pool.close()


def begin(pool: ProcessPool, directory: Path, words: str, **options: Any) -> Any:
    """A job that sleeps or waits, once it does."""
    before = set(directory.glob("sleeping-*"))
    job = pool.submit(words.encode(), deadline_s=SOON_S, **options)
    wait_until(lambda: set(directory.glob("sleeping-*")) != before)
    return job


@pytest.mark.parametrize("num_floats", [10, 2_500_000], ids=["40 B", "10 MB"])
def test_tensors_come_back_bit_by_bit(servants: ProcessPool, num_floats: int) -> None:
    job = servants.submit(f"tensors {num_floats}".encode(), deadline_s=SOON_S)
    kwargs = job.result(SOON_S).kwargs
    expected = make_tensors(num_floats)
    assert list(kwargs) == list(expected)
    for name, tensor in expected.items():
        assert kwargs[name].dtype == tensor.dtype
        assert kwargs[name].shape == tensor.shape
        assert torch.equal(kwargs[name], tensor), name
    kwargs["pixel_values"].add_(1.0)  # they are ours to write


def test_large_results_that_are_kept_hold_no_descriptors(servants: ProcessPool) -> None:
    ask(servants, "pid")
    gc.collect()
    num_descriptors = count_descriptors()
    jobs = [servants.submit(b"tensors 50000", deadline_s=SOON_S) for _ in range(20)]
    kept = [job.result(SOON_S).kwargs for job in jobs]
    assert count_descriptors() <= num_descriptors
    assert all(torch.equal(item["bytes"], torch.arange(5, dtype=torch.uint8)) for item in kept)


@pytest.mark.parametrize("num_bytes", [0, 1, 65536, 65537, 10_000_000])
def test_the_input_arrives_whole_as_one_block(servants: ProcessPool, num_bytes: int) -> None:
    content = random.Random(num_bytes).randbytes(num_bytes)
    middle = num_bytes // 3
    pieces = content[:middle], b"", bytearray(content[middle:])
    assert ask(servants, "checksum", *pieces) == str(crc32(content))
    num_descriptors, num_theirs = count_descriptors(), int(ask(servants, "descriptors"))
    for _ in range(20):
        assert ask(servants, "checksum", *pieces) == str(crc32(content))
    assert int(ask(servants, "descriptors")) == num_theirs
    assert count_descriptors() < num_descriptors + 10  # other threads open some, not twenty


def test_many_small_pieces_arrive_in_order(servants: ProcessPool) -> None:
    pieces = [bytes([number % 251]) * 97 for number in range(2500)]
    assert ask(servants, "checksum", *pieces) == str(crc32(b"".join(pieces)))


def test_tensors_travel_to_a_worker_and_back(servants: ProcessPool) -> None:
    tensors = make_tensors(100_000)
    header = encode_header(tensors).hex()
    job = servants.submit(f"decode {header}".encode(), as_buffers(tensors), deadline_s=SOON_S)
    kwargs = job.result(SOON_S).kwargs
    assert all(torch.equal(kwargs[name], tensor) for name, tensor in tensors.items())


def test_a_worker_computes_with_one_thread(servants: ProcessPool) -> None:
    assert ask(servants, "num_threads") == "1"


def test_a_mistake_in_a_callback_reaches_its_caller_and_costs_no_worker(
    servants: ProcessPool,
) -> None:
    before = servants.get_process_ids()
    seen = []

    def on_reply(reply: PoolReply) -> str:
        seen.append(reply.reply)
        raise ValueError("a mistake of the caller")

    job = servants.submit(b"double 4", deadline_s=SOON_S, on_reply=on_reply)
    with pytest.raises(ValueError, match="of the caller"):
        job.result(SOON_S)
    with pytest.raises(RequestError):
        ask(servants, "refuse request")
    assert seen == [b"8"]
    assert ask(servants, "double 5") == "10"
    assert servants.get_process_ids() == before


def test_the_result_is_what_the_callback_makes_of_it(servants: ProcessPool) -> None:
    job = servants.submit(
        b"double 4", deadline_s=SOON_S, on_reply=lambda reply: int(reply.reply) + 1
    )
    assert job.result(SOON_S) == 9


@pytest.mark.parametrize(
    ("job", "kind", "message"),
    [
        ("refuse request", RequestError, "a reason for the caller"),
        ("refuse capacity", CapacityError, "a reason for the caller"),
        ("refuse odd", MediaFetchError, "a reason for the caller"),
        ("bug", FailedRequestError, NOT_PROCESSED),
        ("long_reply 17000000", FailedRequestError, NOT_PROCESSED),
        ("eat", RequestError, NO_MEMORY),
    ],
)
def test_an_error_keeps_its_type_and_message(
    servants: ProcessPool, job: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        ask(servants, job)
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_inherited_descriptors_have_the_same_numbers(make_pool: MakePool) -> None:
    descriptor = os.memfd_create("inherited")
    try:
        os.write(descriptor, b"from the parent")
        pool = make_pool(inherited_fds=[descriptor])
        assert ask(pool, f"read {descriptor}") == "from the parent"
    finally:
        os.close(descriptor)


def test_an_invalid_job_is_refused_at_once(servants: ProcessPool) -> None:
    with pytest.raises(InvariantError):
        servants.submit(bytes(17_000_000), deadline_s=SOON_S)
    with pytest.raises(TypeError):
        servants.submit(b"echo", [memoryview(b"abcdef")[::2]], deadline_s=SOON_S)


def test_a_worker_that_dies_idle_is_replaced_and_no_job_notices(make_pool: MakePool) -> None:
    pool = make_pool(max_retries=0)
    first = int(ask(pool, "pid"))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    assert int(ask(pool, "pid")) != first
    (second,) = pool.get_process_ids()
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: pool.get_process_ids() not in ([], [second]))  # without any job
    assert pool.statistics().num_restarts == 2


def test_a_job_whose_worker_is_killed_runs_again(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool()
    job = begin(pool, tmp_path, "sleep_once 7")
    os.kill(pool.get_process_ids()[0], signal.SIGKILL)
    assert job.result(SOON_S).reply == b"7"
    assert pool.statistics().num_restarts == 1


def test_a_job_whose_worker_is_killed_twice_may_be_tried_again(
    make_pool: MakePool, tmp_path: Path
) -> None:
    """A process that is killed from outside is not the job's fault."""
    pool = make_pool()
    job = begin(pool, tmp_path, "sleep 300")
    first = pool.get_process_ids()
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: len(list(tmp_path.glob("sleeping-*"))) == 2)
    os.kill(pool.get_process_ids()[0], signal.SIGKILL)
    with pytest.raises(CapacityError, match="ended from outside"):
        job.result(SOON_S)
    assert ask(pool, "double 21") == "42"


def test_a_job_that_crashes_its_worker_fails_alone(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(2)
    neighbour = begin(pool, tmp_path, "wait_for release")
    poison = pool.submit(b"abort", deadline_s=SOON_S)
    unlucky = pool.submit(b"abort_once here", deadline_s=SOON_S)
    with pytest.raises(RequestError, match=r"^the process that worked on the media item crashed"):
        poison.result(SOON_S)
    assert unlucky.result(SOON_S).reply == b"here"
    (tmp_path / "release").touch()
    assert neighbour.result(SOON_S).reply == b"release"
    wait_until(lambda: count_ended(pool) == (2, 1))  # a future wakes its waiter, then it is counted
    assert pool.statistics().num_restarts >= 2


def test_a_job_over_its_deadline_is_ended_and_not_tried_again(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    first = int(ask(pool, "pid"))
    with pytest.raises(RequestError, match="in time"):
        ask(pool, "sleep 300", deadline_s=4.0)
    assert not is_running(first)
    assert ask(pool, "double 3") == "6"
    assert len(list(tmp_path.glob("sleeping-*"))) == 1


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("make_nothing", "ValueError: no such model"),
        ("make_nothing_but_a_crash", "the worker process ended with signal 6 while it started"),
        ("not_there", "AttributeError"),
    ],
)
def test_a_worker_that_can_not_start_fails_the_jobs_with_its_reason(
    make_pool: MakePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factory: str,
    reason: str,
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_PAUSE_S", 600.0)  # in which jobs are refused at once
    pool = make_pool(factory=factory)
    job = pool.submit(b"double 1", deadline_s=SOON_S)
    with pytest.raises(CapacityError, match=f"^media can't be processed, .*: {reason}") as caught:
        job.result(SOON_S)
    assert 1 < caught.value.retry_after_s <= 600
    with pytest.raises(CapacityError, match=reason):
        pool.submit(b"double 1", deadline_s=SOON_S)
    with pytest.raises(CapacityError, match=reason):
        pool.wait_until_ready(SOON_S)
    time.sleep(0.7)  # no start is tried while there is no job
    if factory == "make_nothing":
        assert (tmp_path / "starts").read_text() == "xxx"


def test_workers_are_tried_again_when_a_job_comes_later(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_MAX_PAUSE_S", 0.3)
    (tmp_path / "broken").touch()
    pool = make_pool(factory="make_servant_unless_broken")
    with pytest.raises(CapacityError, match=r"^media can't be processed, .*: it is broken$"):
        ask(pool, "double 1")
    (tmp_path / "broken").unlink()
    time.sleep(0.3)
    assert ask(pool, "double 1") == "2"


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """One of them idle, one in the middle of a job."""
    script = f"""
import sys, time
from sensorium.multimodal.pool.pool import ProcessPool
pool = ProcessPool(2, handler="{HANDLERS}:make_servant", settings=sys.argv[1].encode())
assert pool.wait_until_ready({SOON_S})
pool.submit(b"sleep 60", deadline_s=100)
print(*pool.get_process_ids(), flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        try:
            assert parent.stdout is not None
            process_ids = [int(word) for word in parent.stdout.readline().split()]
            assert len(process_ids) == 2
            wait_until(lambda: bool(list(tmp_path.glob("sleeping-*"))))
            assert all(map(is_running, process_ids))
        finally:
            parent.kill()
        wait_until(lambda: not any(map(is_running, process_ids)))


def test_a_program_that_never_closes_its_pool_ends_and_so_do_the_workers(tmp_path: Path) -> None:
    script = f"""
import sys
from sensorium.multimodal.pool.pool import ProcessPool
pool = ProcessPool(1, handler="{HANDLERS}:make_servant", settings=sys.argv[1].encode())
print(pool.submit(b"pid", deadline_s={SOON_S}).result().reply.decode(), flush=True)
pool.submit(b"sleep 60", deadline_s=100)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120.0,
        check=True,
    )
    assert result.stderr == ""
    wait_until(lambda: not is_running(int(result.stdout)))


def test_a_worker_ignores_ctrl_c(make_pool: MakePool) -> None:
    pool = make_pool()
    process_id = int(ask(pool, "pid"))
    os.kill(process_id, signal.SIGINT)
    assert int(ask(pool, "pid")) == process_id


def test_random_deaths_lose_no_job_and_leak_nothing(make_pool: MakePool) -> None:
    """One or both are killed, whatever they do, whenever both are there again."""
    generator = random.Random(3)
    gc.collect()  # objects of earlier tests: their descriptors would be closed in this one
    num_descriptors, threads = count_descriptors(), get_threads()
    pool = make_pool(2, max_queued=20, max_retries=4)
    assert pool.wait_until_ready(SOON_S)
    seen, stop = set(pool.get_process_ids()), threading.Event()

    def kill_now_and_then() -> None:
        while not stop.wait(generator.uniform(0.02, 0.1)):
            process_ids = pool.get_process_ids()
            seen.update(process_ids)
            if pool.statistics().num_workers == 2 == len(process_ids):
                for victim in generator.sample(process_ids, generator.choice([1, 2])):
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    jobs: list[Future[PoolReply]] = []
    ends_at = time.monotonic() + SOON_S
    try:
        while len(jobs) < 200 or (
            pool.statistics().num_restarts < 2 and time.monotonic() < ends_at
        ):
            jobs.append(pool.submit(f"double {len(jobs)}".encode(), deadline_s=SOON_S))
        answers = [int(job.result(SOON_S).reply) for job in jobs]
    finally:
        stop.set()
        killer.join()
    assert answers == [2 * number for number in range(len(jobs))]
    assert pool.statistics().num_restarts > 1
    seen.update(pool.get_process_ids())
    pool.close()
    assert not any(map(is_running, seen))
    wait_until(lambda: get_threads() <= threads)
    wait_until(lambda: count_descriptors() <= num_descriptors)


def test_a_job_that_is_cancelled_before_its_turn_never_runs(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    blocker = begin(pool, tmp_path, "wait_for release")
    unwanted = pool.submit(b"touch unwanted", deadline_s=SOON_S)
    wanted = pool.submit(b"touch wanted", deadline_s=SOON_S)
    assert unwanted.cancel()
    assert wait_for_futures([unwanted], timeout=SOON_S).done
    assert pool.statistics().num_queued == 1
    (tmp_path / "release").touch()
    wanted.result(SOON_S)
    assert blocker.result(0).reply == b"release"
    assert not (tmp_path / "unwanted").exists()
    assert pool.statistics().num_cancelled == 1


def test_the_result_of_a_job_that_is_cancelled_while_it_runs_is_dropped(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    seen: list[PoolReply] = []
    job = begin(pool, tmp_path, "wait_for release", on_reply=seen.append)
    (process_id,) = pool.get_process_ids()
    assert job.cancel()
    (tmp_path / "release").touch()
    with pytest.raises(CancelledError):
        job.result(SOON_S)
    assert int(ask(pool, "pid")) == process_id  # it was left to finish
    assert seen == []


def test_a_full_queue_makes_callers_wait_and_then_refuses_them(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(max_queued=2)
    begin(pool, tmp_path, "wait_for release")
    jobs = [pool.submit(b"double 1", deadline_s=SOON_S) for _ in range(2)]
    start = time.monotonic()
    with pytest.raises(CapacityError, match="too many"):
        pool.submit(b"double 1", deadline_s=0.1)
    assert time.monotonic() - start >= 0.1
    (tmp_path / "release").touch()
    late = pool.submit(b"double 5", deadline_s=SOON_S)  # waits for room, and gets it
    assert late.result(SOON_S).reply == b"10"
    assert all(job.done() for job in jobs)


def test_a_job_that_waits_past_its_deadline_is_refused_though_no_worker_is_free(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    blocker = begin(pool, tmp_path, "sleep 300")
    job = pool.submit(b"touch late", deadline_s=0.1)
    with pytest.raises(CapacityError):
        job.result(SOON_S)
    assert not blocker.done()
    pool.close()
    assert not (tmp_path / "late").exists()


def test_closing_ends_everything_and_fails_what_is_not_done(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(2, grace_s=0.5)
    assert pool.wait_until_ready(SOON_S)
    running = begin(pool, tmp_path, "sleep 60")
    ask(pool, "pid")
    process_ids = pool.get_process_ids()
    queued = [pool.submit(b"sleep 60", deadline_s=100) for _ in range(3)]
    pool.close()
    pool.close()
    for job in [running, *queued]:
        with pytest.raises(CapacityError):
            job.result(0)
    assert not any(map(is_running, process_ids))
    with pytest.raises(CapacityError):
        pool.submit(b"double 1", deadline_s=1.0)
    assert pool.statistics().num_workers == pool.statistics().num_queued == 0


def test_an_idle_worker_may_clean_up_when_the_pool_is_closed(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(grace_s=SOON_S)
    process_id = ask(pool, "pid")
    pool.close()
    assert (tmp_path / f"closed-{process_id}").exists()


def test_a_pool_that_is_dropped_takes_its_workers_along(tmp_path: Path) -> None:
    threads = get_threads()
    settings = str(tmp_path).encode()
    pool = ProcessPool(1, handler=f"{HANDLERS}:make_servant", settings=settings)
    process_id = int(ask(pool, "pid"))
    del pool
    gc.collect()
    wait_until(lambda: not is_running(process_id))
    wait_until(lambda: get_threads() <= threads)


def test_a_pool_that_was_never_used_has_no_workers(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.get_process_ids() == []
    pool.close()


def test_a_flight_of_one_waiter_that_leaves_is_taken_from_the_queue(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool()
    begin(pool, tmp_path, "wait_for release")
    single_flight: SingleFlight[str, PoolReply] = SingleFlight()
    with pytest.raises(TimeoutError):
        single_flight.get(
            "key", lambda: pool.submit(b"touch left", deadline_s=SOON_S), timeout_s=0.05
        )
    (tmp_path / "release").touch()
    reply = single_flight.get(
        "key", lambda: pool.submit(b"double 2", deadline_s=SOON_S), timeout_s=SOON_S
    )
    assert reply.reply == b"4"
    assert not (tmp_path / "left").exists()


def test_a_result_is_freed_without_the_garbage_collector(servants: ProcessPool) -> None:
    single_flight: SingleFlight[str, PoolReply] = SingleFlight()
    gc.collect()
    gc.disable()
    try:
        reply = single_flight.get(
            "key", lambda: servants.submit(b"tensors 50000", deadline_s=SOON_S), timeout_s=SOON_S
        )
        watched = weakref.ref(reply.kwargs["pixel_values"])
        del reply
        wait_until(lambda: watched() is None)
    finally:
        gc.enable()


def test_a_worker_starts_without_torch_and_transformers(make_pool: MakePool) -> None:
    pool = make_pool()
    for module in ("torch", "numpy", "transformers", "PIL"):
        assert ask(pool, f"modules {module}") == "False", module


def test_what_a_worker_writes_is_logged(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    ask(make_pool(1), "say hello")
    expected = [f"a worker process of the media pool: {text}" for text in ("hello", "hello, too")]
    wait_until(lambda: [text for text in caplog.messages if text in expected] == expected)


def test_a_pool_is_starting_until_its_first_worker_was_ready_and_never_again(
    make_pool: MakePool,
) -> None:
    pool = make_pool()
    assert pool.is_starting
    assert pool.wait_until_ready(SOON_S)
    assert not pool.is_starting
    (process_id,) = pool.get_process_ids()
    os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: pool.get_process_ids() != [process_id])
    assert not pool.is_starting


def test_a_pool_that_can_not_start_is_not_starting(make_pool: MakePool) -> None:
    pool = make_pool(factory="make_nothing")
    with pytest.raises(CapacityError):
        pool.wait_until_ready(SOON_S)
    assert not pool.is_starting


def test_a_pool_that_was_closed_is_not_starting(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.close()
    assert not pool.is_starting
