"""Placement of requests on many replicas: in Ray Serve, and by simulation.

    python benchmarks/scale.py serve [--record]
    python benchmarks/scale.py simulate [--replicas N ...] [--plot FOLDER] [--record]

`serve` runs a real Ray Serve with four engines for each of four routers, which serve parts of the
same trace in turns (`scale_cluster.py`). Two cores can't carry four models: an engine is the
scheduler of a real one with an encoder cache for 100 images, and its worker is simulated: it waits
8 ms for a step and 120 ms for each image that it encodes. Answers have 8 tokens. Requests come at
random, at 70 % of what all engines could serve one request after the other if each image were
encoded once. `own_ms_per_request` is what our router itself takes for a request;
`beyond_engine_idle_ms` is all that Ray and the router take together, without any queue. The router
for texts is Ray's own.

`simulate` runs nothing but the rules. A replica serves one request after the other. It needs
`HIT_S` for an image that it has encoded and still holds, and `MISS_S` more for another. Its
cache holds the last 100 images.
For each replica there are 75 images and 300 requests; how often an image is used is geometric with
a mean of 4, and their order is random. Requests arrive at random, at 70 % of what all replicas can
serve if every image is encoded once. All ask the same question, as users of one application do.

The rules that are compared:
  media         ours: the home of the image, and elsewhere when that has too much to do
  round robin   one replica after the other
  least queue   the shortest queue
  text          the shortest queue of those that have had the longest common beginning of the text;
                of two at random if queues differ by more than 5. This is the rule of Ray 2.60's
                prefix router, which sees no media. By default it has no limit for queues, and
                would send everything to one replica here.

`hit rate` is the share of requests for which the image was in the cache, against that of one server
with all the memory of the world. `imbalance` is the work of the busiest replica against the mean.
`again` counts images that were encoded once more than needed, for each replica, after one of the
replicas was lost or a new one came in the middle of the trace.

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from records import write_record
from sensorium.scale.placement import Placement, rank_replicas

HIT_S, MISS_S = 0.1, 0.3
CACHE_SIZE = 100  # images in a replica's cache
IMAGES_PER_REPLICA = 75
MEAN_USES = 4.0
LOAD = 0.7
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TEXT_IMBALANCE = 5

Queues = dict[str, int]
Rule = Callable[[str, Queues], str]


@dataclass(slots=True)
class Replica:
    """A replica with its cache of images, its queue and what it has done."""

    images: OrderedDict[str, None] = field(default_factory=OrderedDict)  # least recently used first
    free_at: float = 0.0
    busy_s: float = 0.0

    def serve(self, image: str, now: float) -> tuple[bool, float]:
        """Return whether the image was in the cache, and when the request is done."""
        is_hit = image in self.images
        self.images[image] = None
        self.images.move_to_end(image)
        if len(self.images) > CACHE_SIZE:
            self.images.popitem(last=False)
        seconds = HIT_S if is_hit else HIT_S + MISS_S
        self.busy_s += seconds
        self.free_at = max(now, self.free_at) + seconds
        return is_hit, self.free_at


def make_trace(num_images: int, mean_uses: float, seed: int) -> list[str]:
    """Return the images of all requests, in their order."""
    chance = random.Random(seed)
    trace = []
    for number in range(num_images):
        uses = 1
        while chance.random() > 1 / mean_uses:
            uses += 1
        trace += [f"image {number}"] * uses
    chance.shuffle(trace)
    return trace


def make_media_rule() -> Rule:
    placement = Placement()

    def choose(image: str, queues: Queues) -> str:
        chosen = placement.rank(image, queues)[0]
        placement.note(image, chosen, rank_replicas(image, queues)[0])
        return chosen

    return choose


def make_round_robin() -> Rule:
    numbers = count()
    return lambda _image, queues: list(queues)[next(numbers) % len(queues)]


def make_least_queue() -> Rule:
    chance = random.Random(0)
    return lambda _image, queues: min(queues, key=lambda name: (queues[name], chance.random()))


def make_text_rule() -> Rule:
    """Return the rule of Ray's prefix router, for texts that all begin alike."""
    chance = random.Random(0)
    known: set[str] = set()  # replicas that have had such a text

    def choose(_image: str, queues: Queues) -> str:
        known.intersection_update(queues)
        is_even = max(queues.values()) - min(queues.values()) <= TEXT_IMBALANCE
        names = list(queues)
        among = known if known and is_even else chance.sample(names, min(2, len(names)))
        chosen = min(among, key=lambda name: (queues[name], name))
        known.add(chosen)
        return chosen

    return choose


RULES: dict[str, Callable[[], Rule]] = {
    "media": make_media_rule,
    "round robin": make_round_robin,
    "least queue": make_least_queue,
    "text": make_text_rule,
}


def simulate(
    trace: Sequence[str], num_replicas: int, rule: Rule, *, change: int = 0
) -> dict[str, float]:
    """Serve a trace, and return what was found.

    With `change`, so many replicas come (or go, if it is negative) in the middle of the trace.
    """
    chance = random.Random(1)
    replicas = {f"replica {number}": Replica() for number in range(num_replicas)}
    num_images = len(set(trace))
    work_s = HIT_S * len(trace) + MISS_S * num_images
    rate = LOAD * num_replicas * len(trace) / work_s
    done: list[tuple[float, str]] = []  # when a request of a replica ends
    queues = dict.fromkeys(replicas, 0)
    now, num_hits, waits = 0.0, 0, []
    for place, image in enumerate(trace):
        now += chance.expovariate(rate)
        if change and place == len(trace) // 2:
            for number in range(abs(change)):
                if change > 0:
                    name = f"replica {num_replicas + number}"
                    replicas[name], queues[name] = Replica(), 0
                else:
                    del queues[f"replica {number}"]
        while done and done[0][0] <= now:
            name = heapq.heappop(done)[1]
            if name in queues:
                queues[name] -= 1
        chosen = rule(image, queues)
        is_hit, ends = replicas[chosen].serve(image, now)
        heapq.heappush(done, (ends, chosen))
        queues[chosen] += 1
        num_hits += is_hit
        waits.append(ends - now)
    busy = [replica.busy_s for replica in replicas.values()]
    best = len(trace) - num_images
    waits.sort()
    return {
        "hit_rate": num_hits / best if best else 1.0,
        "num_missed_again": best - num_hits,
        "imbalance": max(busy) / statistics.mean(busy),
        "p50_s": waits[len(waits) // 2],
        "p95_s": waits[int(0.95 * len(waits))],
    }


def measure(counts: Sequence[int]) -> dict[str, Any]:
    figures: dict[str, Any] = {"by_replicas": {}, "changes": {}, "mean_uses_12": {}}
    for number in counts:
        trace = make_trace(IMAGES_PER_REPLICA * number, MEAN_USES, seed=number)
        rows = figures["by_replicas"][str(number)] = {}
        for name, make_rule in RULES.items():
            began = perf_counter()
            found = simulate(trace, number, make_rule())
            seconds = (perf_counter() - began) / len(trace)
            rows[name] = {key: round(value, 3) for key, value in found.items()}
            rows[name]["us_per_request"] = round(1e6 * seconds, 1)
        print(f"{number} replicas: {json.dumps(rows)}", flush=True)
        if number > 1:
            steady = simulate(trace, number, make_media_rule())["num_missed_again"]
            figures["changes"][str(number)] = {
                word: round(
                    (
                        simulate(trace, number, make_media_rule(), change=change)[
                            "num_missed_again"
                        ]
                        - steady
                    )
                    / IMAGES_PER_REPLICA,
                    3,
                )
                for word, change in (("lost", -1), ("new", 1))
            }
    trace = make_trace(IMAGES_PER_REPLICA * 4, 12.0, seed=4)
    for name, make_rule in RULES.items():
        found = simulate(trace, 4, make_rule())
        figures["mean_uses_12"][name] = {key: round(value, 3) for key, value in found.items()}
    return figures


def plot(figures: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    rows = figures["by_replicas"]
    counts = [int(number) for number in rows]
    for key, label in (
        ("hit_rate", "hit rate, against one unbounded server"),
        ("imbalance", "work of the busiest replica, against the mean"),
        ("p95_s", "seconds until an answer, 95th percentile"),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for name in RULES:
            axes.plot(counts, [rows[str(n)][name][key] for n in counts], marker="o", label=name)
        axes.set(xscale="log", xlabel="replicas", ylabel=label, xticks=counts)
        axes.set_xticklabels(map(str, counts))
        axes.minorticks_off()
        if key != "hit_rate":
            axes.set_yscale("log")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(folder / f"scale-{key.removesuffix('_s').replace('_', '-')}.png", dpi=110)
        pyplot.close(figure)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    changes = figures["changes"]
    for word, label in (("lost", "one replica is lost"), ("new", "one replica is new")):
        numbers = [int(number) for number in changes]
        axes.plot(numbers, [changes[str(n)][word] for n in numbers], marker="o", label=label)
    axes.set(
        xscale="log",
        xlabel="replicas",
        ylabel="images perceived again,\nin images of one replica",
        xticks=numbers,
    )
    axes.set_xticklabels(map(str, numbers))
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "scale-changes.png", dpi=110)
    pyplot.close(figure)


def serve_traces() -> dict[str, Any]:
    """Serve the traces of mean 4 and mean 12 with all routers, in a real Ray Serve."""
    # Before Ray is imported: it sends no reports, listens on 127.0.0.1 only, and its processes
    # find the modules of this folder.
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
    }
    import scale_cluster as cluster

    traces = {
        f"mean_uses_{mean:g}": make_fixed_trace(300, mean, seed=4) for mean in (MEAN_USES, 12.0)
    }
    settings = {
        "worker": "simulated: it waits for step_s, and encode_s for each image to encode",
        "num_replicas": cluster.NUM_REPLICAS,
        "images_in_cache": cluster.CACHE_SIZE,
        "tokens_of_an_answer": cluster.NUM_TOKENS,
        "step_s": cluster.STEP_S,
        "encode_s": cluster.ENCODE_S,
        "load": cluster.LOAD,
    }
    return {"settings": settings, **cluster.run_cluster(traces)}


def make_fixed_trace(num_images: int, mean_uses: float, seed: int) -> list[str]:
    """Return a trace with exactly `mean_uses` requests for an image on average."""
    trace = make_trace(num_images, mean_uses, seed)
    chance = random.Random(seed)
    names = sorted(set(trace))
    missing = round(num_images * mean_uses) - len(trace)
    trace += chance.choices(names, k=max(0, missing))
    counts = Counter(trace)
    while len(trace) > num_images * mean_uses:
        place = chance.randrange(len(trace))
        if counts[trace[place]] > 1:
            counts[trace.pop(place)] -= 1
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("serve", "simulate"))
    parser.add_argument("--replicas", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write the curves as PNG")
    parser.add_argument("--record", action="store_true", help="write a record")
    arguments = parser.parse_args()
    if arguments.command == "serve":
        figures = serve_traces()
        if arguments.record:
            print(f"record: {write_record('scale', figures).name}")
        print(json.dumps(figures))
        return
    figures = measure(arguments.replicas)
    if arguments.plot is not None:
        plot(figures, arguments.plot)
    if arguments.record:
        print(f"record: {write_record('scale_simulation', figures).name}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
