"""Measures what attacks cost the neighbours: how long three honest clients wait during each one.

One server for each attack, on the embedded model or on a tiny Whisper; one is a cluster of
`sensorium deploy`. Quiet and attacked windows take turns in one run, so that both see the same
machine; in each window three clients ask side by side: one with text, one with a picture that is
cached and one with a picture that is new, or else with a clip that is cached, a new one and a
longer one. Every answer is checked. An attack passes if no answer is wrong or refused, the median
wait is at most twice the quiet one, and the longest at most three seconds more. The attacker is a
process of its own, on the same machine.

python benchmarks/attack_costs.py [--attacks NAME ...] [--windows N] [--rounds N] [--record]
    [--record-as NAME]

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attacks import (
    bad_handshakes,
    costly_media,
    damaged_disk_cache,
    endless_speech,
    enlarged_media,
    full_disk,
    greedy_stream,
    long_prompts,
    long_text,
    slow_bodies,
    slow_hosts,
    slow_store,
    small_pieces,
)
from attacks.neighbours import Answer, Neighbours
from live_server import LiveServer, read_metrics
from process_samples import list_tree
from records import write_record

MODEL = "sensorium-mini"
MAX_RATIO = 2.0
MAX_LONGER_S = 3.0
_WARM_S = 25.0  # of questions, before the first window
_MAX_END_S = 300.0  # for the requests of an attacker that are under way
_END_S = 120.0  # for a server
Attack = Callable[[str], AbstractContextManager[Any]]
# Something next to the server, made in a folder before it starts; it gives further flags.
Preparation = Callable[[str, Path], AbstractContextManager[tuple[str, ...]]]
AttackInFolder = Callable[[str, Path], AbstractContextManager[Any]]


@contextmanager
def _fill_disk(url: str) -> Iterator[None]:
    """Fill the disk of temporary files, which the server at `url` was started on."""
    del url
    with full_disk.attack(Path(os.environ["TMPDIR"])):
        yield


# Name -> flags of the server, and the attack. The number is that of its test.
ATTACKS: dict[str, tuple[tuple[str, ...], Attack]] = {
    "9 long text": (long_text.FLAGS, long_text.attack),
    "10 enlarged media": (enlarged_media.FLAGS, enlarged_media.attack),
    "11 slow hosts": (slow_hosts.FLAGS, slow_hosts.attack),
    "12 costly media": (costly_media.FLAGS, costly_media.attack),
    "12 costly media within the limits": (
        costly_media.FLAGS,
        lambda url: costly_media.attack(url, num_frames=costly_media.NUM_FRAMES_WITHIN),
    ),
    "13 slow bodies": (slow_bodies.FLAGS, slow_bodies.attack),
    "14 full disk": (full_disk.FLAGS, _fill_disk),
    "16 greedy stream": (greedy_stream.FLAGS, greedy_stream.attack),
    "21 endless speech": (endless_speech.FLAGS, endless_speech.attack),
    "22 bad handshakes": (bad_handshakes.FLAGS, bad_handshakes.attack),
    "23 small pieces": (small_pieces.FLAGS, small_pieces.attack),
    "23 small pieces behind deploy": (
        (*small_pieces.FLAGS, "--replicas", "1", "--frontends", "1"),
        small_pieces.attack,
    ),
    "24 long prompts": (long_prompts.FLAGS, long_prompts.attack),
}
# Attacks on a server with a store of media: also what prepares it. They need the same folder.
STORES: dict[str, tuple[tuple[str, ...], Preparation, AttackInFolder]] = {
    "25 damaged disk cache": (
        damaged_disk_cache.FLAGS,
        damaged_disk_cache.prepare,
        damaged_disk_cache.attack,
    ),
    "26 silent store": (slow_store.FLAGS, slow_store.prepare_silent, slow_store.attack_silent),
    "26 slow store": (slow_store.FLAGS, slow_store.prepare_slow, slow_store.attack_slow),
}
NAMES = (*ATTACKS, *STORES)
COMMANDS = {"23 small pieces behind deploy": "deploy"}  # others: serve
# Attacks on another model than the embedded one: what makes it, and the neighbours.
OTHERS: dict[str, tuple[Callable[[Path], str], type[Neighbours]]] = {
    "21 endless speech": (endless_speech.make_model, endless_speech.OpenStreams),
}


def measure(name: str, *, num_windows: int, num_rounds: int) -> dict[str, Any]:
    """Return the waits of all neighbours, quiet and attacked, for one attack."""
    quiet: list[Answer] = []
    attacked: list[Answer] = []
    with ExitStack() as stack:
        if name.startswith("14"):
            stack.enter_context(_use_small_disk())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        make_model, kind_of_neighbours = OTHERS.get(name, (lambda _: MODEL, Neighbours))
        url = stack.enter_context(_serve(name, make_model(folder / "model"), folder))
        neighbours = kind_of_neighbours(url)
        warm_at = time.monotonic() + _WARM_S
        neighbours.ask_while(lambda: time.monotonic() < warm_at)
        for _ in range(num_windows):
            quiet += neighbours.ask_while(lambda: False, min_rounds=num_rounds)
            with _attacking(name, url, folder):
                attacked += neighbours.ask_while(lambda: False, min_rounds=num_rounds)
        found: dict[str, Any] = {"faults": neighbours.list_faults([*quiet, *attacked])}
        if name in STORES:
            found["store"] = _count_store_faults(url)
    return found | {"kinds": {kind: _compare(kind, quiet, attacked) for kind in neighbours.kinds}}


@contextmanager
def _serve(name: str, model: str, folder: Path) -> Iterator[str]:
    """Run the server for an attack and what it needs, and give its address."""
    with ExitStack() as stack:
        if name in STORES:
            flags, prepare, _ = STORES[name]
            flags = (*flags, *stack.enter_context(prepare(model, folder)))
        else:
            flags, _ = ATTACKS[name]
        command = COMMANDS.get(name, "serve")
        server = LiveServer(model, "--port", "0", *flags, log=folder / "log", command=command)
        stack.enter_context(server)
        url = server.wait_for_url()
        yield url
        pids = list_tree(server.process.pid)
        server.stop()
        _wait_until_ended(pids)


def _wait_until_ended(pids: list[int]) -> None:
    """Wait until all processes of a server have ended: those of a cluster are many."""
    deadline = time.monotonic() + _END_S
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            raise SystemExit(f"processes of the server are still there: {left}")
        time.sleep(0.1)


def _count_store_faults(url: str) -> dict[str, float]:
    """Return how often the server had trouble with its stores, those of quiet windows included."""
    prefix = "sensorium:tier_faults_total"
    samples = read_metrics(url.rstrip("/")).items()
    return {key.removeprefix(prefix): value for key, value in samples if key.startswith(prefix)}


@contextmanager
def _attacking(name: str, url: str, folder: Path) -> Iterator[None]:
    """Attack from another process until the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_attack, args=(name, url, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()  # it has begun; an EOFError if it could not
        yield
        ours.send(None)
    finally:
        ours.close()
        process.join(_MAX_END_S)
        process.kill()


def _run_attack(name: str, url: str, folder: Path, pipe: Connection) -> None:
    with _begin(name, url, folder):
        pipe.send(None)
        with suppress(EOFError):
            pipe.recv()


def _begin(name: str, url: str, folder: Path) -> AbstractContextManager[Any]:
    if name in STORES:
        _, _, attack_in_folder = STORES[name]
        return attack_in_folder(url, folder)
    _, attack = ATTACKS[name]
    return attack(url)


@contextmanager
def _use_small_disk() -> Iterator[None]:
    """Let temporary files of processes that are started here lie on a disk of 1 MB."""
    before = os.environ.get("TMPDIR")
    with (
        tempfile.TemporaryDirectory(prefix="disk-", dir="/tmp") as folder,
        full_disk.small_disk(Path(folder) / "d") as disk,
    ):
        os.environ["TMPDIR"] = str(disk)
        try:
            yield
        finally:
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def _compare(kind: str, quiet: list[Answer], attacked: list[Answer]) -> dict[str, Any]:
    before = [answer.seconds for answer in quiet if answer.kind == kind]
    after = [answer.seconds for answer in attacked if answer.kind == kind]
    ratio = statistics.median(after) / statistics.median(before)
    longer_s = max(after) - max(before)
    return {
        "num_answers": len(before) + len(after),
        "median_quiet_s": round(statistics.median(before), 3),
        "median_ratio": round(ratio, 2),
        "longest_quiet_s": round(max(before), 3),
        "longest_longer_s": round(longer_s, 3),
        "passes": ratio <= MAX_RATIO and longer_s <= MAX_LONGER_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attacks", nargs="*", default=list(NAMES), metavar="NAME")
    parser.add_argument("--windows", type=int, default=3, help="of each kind (default 3)")
    parser.add_argument("--rounds", type=int, default=10, help="questions a window (default 10)")
    parser.add_argument("--record", action="store_true", help="write benchmarks/records")
    parser.add_argument("--record-as", default="attack_costs", metavar="NAME", help="its name")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in arguments.attacks:
        found = measure(name, num_windows=arguments.windows, num_rounds=arguments.rounds)
        figures[name] = found
        for kind, row in found["kinds"].items():
            verdict = "passes" if row["passes"] and not found["faults"] else "FAILS"
            print(
                f"{name:36} {kind:16} median {row['median_ratio']:5.2f}x, longest "
                f"{row['longest_longer_s']:+6.2f} s: {verdict}",
                flush=True,
            )
        for fault in found["faults"]:
            print(f"  {fault}")
        if arguments.record:  # now, because the next attack may end all this
            write_record(arguments.record_as, figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
