"""Rounds of loads against one server, or against two in turns, and the figures of both.

Two servers are compared only if they did the same work: they are sent the same bytes, and must
count the same prompt tokens, for each kind of request before the first round and for every request
in the rounds. Each answer must be as long as it was asked to be, and transcripts must be the same
on both sides.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from load_clients import Answer, Clients, Part, ask_in_turn
from server_loads import CHECK_ROUND, WARM_ROUND, Batch, Load, num_kinds

_WARM_TOKENS = 16
Round = dict[str, Any]  # figure -> number
Sides = dict[str, str]  # "ours", and perhaps "peer" -> address


class UnlikeWorkError(Exception):
    """Two servers were about to be compared that don't do the same work."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice of servers, loads and rounds to be measured."""

    sides: Sides
    loads: dict[str, Load]
    probes: dict[str, Load]
    seed: int
    model: str
    num_rounds: int
    num_words: int | None  # of each transcript; None: as many as it has, the same on both sides

    def make_batch(self, name: str, load: Load, number: int) -> Batch:
        return Batch(name=name, load=load, seed=self.seed, round=number, model=self.model)


@dataclass(kw_only=True)
class Results:
    """What was measured of a load: rounds by side, and the prompt tokens that were counted."""

    load: Load
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    num_prompt_tokens: set[int] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)  # of transcripts

    def add(self, name: str, side: str, figures: Round, answers: list[Answer]) -> None:
        of_side = self.rounds.setdefault(side, [])
        of_side.append(figures)
        self.num_prompt_tokens |= {a.num_prompt_tokens for a in answers if a.num_prompt_tokens}
        self.texts |= {answer.text for answer in answers if answer.text}
        print(f"round {len(of_side)}, {name}, {side}: {json.dumps(figures)}", flush=True)

    def summarize(self) -> dict[str, Any]:
        load = self.load
        figures: dict[str, Any] = {
            "what": load.what,
            "headline": load.headline,
            "num_requests": load.num_requests,
            "num_at_once": load.num_at_once,
            "num_prompt_tokens": _get_range(self.num_prompt_tokens),
            **self.rounds,
        }
        if load.max_tokens:
            figures["max_tokens"] = load.max_tokens
        if self.texts:
            figures["num_texts"] = len(self.texts)
            figures["num_words"] = _get_range({len(text.split()) for text in self.texts})
            joined = "\n".join(sorted(self.texts)).encode()
            figures["hash_of_texts"] = hashlib.sha256(joined).hexdigest()[:12]
        if "peer" in self.rounds:
            figures["ratio"] = get_ratios(self.rounds["ours"], self.rounds["peer"])
        return figures


def get_ratios(ours: list[Round], peers: list[Round]) -> dict[str, float]:
    """Return the median of the ratios of ours to the peer's within one round, by figure."""
    return {
        name: round(
            statistics.median(a[name] / b[name] for a, b in zip(ours, peers, strict=True)), 3
        )
        for name in ours[0]
        if name not in ("all_ms", "busiest_client") and all(other[name] for other in peers)
    }


def get_version(url: str) -> Any:
    """Return what a server answers to `GET /version`."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/version", timeout=60) as answer:
        return json.loads(answer.read())


# ---- is the work the same?


def check_kinds(plan: Plan) -> dict[str, list[int]]:
    """Return how many prompt tokens each kind of request has; both servers must agree."""
    counts: dict[str, list[int]] = {}
    for name, whole in {**plan.probes, **plan.loads}.items():
        load = replace(whole, max_tokens=min(1, whole.max_tokens))
        batch = plan.make_batch(name, load, CHECK_ROUND)
        requests = [(i, load.path, batch.make_body(i)) for i in range(num_kinds(load))]
        found = {side: ask_in_turn(url, requests) for side, url in plan.sides.items()}
        compare(name, load, found, plan.num_words)
        counts[name] = [a.num_prompt_tokens for a in found["ours"] if a.num_prompt_tokens]
        print(f"{name}: {_describe(load, found['ours'])}, by {' and '.join(found)}", flush=True)
    return counts


def _describe(load: Load, answers: list[Answer]) -> str:
    counts = sorted(answer.num_prompt_tokens or 0 for answer in answers)
    if load.media == "clip":
        return f"{len(answers[0].text.split())} words a transcript"
    return f"{' to '.join(str(count) for count in _get_range(counts))} prompt tokens"


def _get_range(counts: Iterable[int]) -> list[int]:
    """Return the least and the most, or the only one."""
    found = sorted(set(counts))
    return [found[0], found[-1]] if len(found) > 1 else found


def compare(name: str, load: Load, answers: dict[str, list[Answer]], num_words: int | None) -> None:
    """Raise `UnlikeWorkError` if the same requests were different work for two servers."""
    ordered = {
        side: sorted(found, key=lambda answer: answer.index) for side, found in answers.items()
    }
    for side, found in ordered.items():
        _check_lengths(name, side, load, found, num_words)
    for ours, peers in zip(ordered["ours"], ordered.get("peer", ordered["ours"]), strict=True):
        counts = ours.num_prompt_tokens, peers.num_prompt_tokens
        if counts[0] != counts[1] and None not in counts:
            raise UnlikeWorkError(
                f"{name}: our server counts {counts[0]} prompt tokens and the peer {counts[1]} for "
                f"the same request ({load.what}), so the two can't be compared. Serve the same "
                "model on both, with the same chat template and the same limits of its processor."
            )
        if ours.text != peers.text:
            raise UnlikeWorkError(
                f"{name}: our server hears {ours.text[:80]!r} and the peer {peers.text[:80]!r} in "
                f"the same clip ({load.what}), so the two can't be compared. Serve the same model "
                "on both."
            )


def _check_lengths(
    name: str, side: str, load: Load, answers: list[Answer], num_words: int | None
) -> None:
    if load.media == "clip":
        lengths = {len(answer.text.split()) for answer in answers}
        wanted, unit = num_words, "words"
    else:
        lengths = {answer.num_tokens or 0 for answer in answers}
        wanted, unit = load.max_tokens, "tokens"
    if wanted is not None and lengths != {wanted}:
        raise UnlikeWorkError(
            f"{name}: the answers of {side} have {sorted(lengths)[:8]} {unit} where each should "
            f"have {wanted}, so their times can't be compared. Serve a model whose answers have "
            f"that length{' or say another with --words' if unit == 'words' else ''}."
        )


# ---- rounds


def measure(plan: Plan, clients: Clients) -> dict[str, Any]:
    """Return the figures of all loads: of each round and side, and the ratios."""
    results = {name: Results(load=load) for name, load in {**plan.probes, **plan.loads}.items()}
    warm_up(plan, clients)
    for number in range(plan.num_rounds):
        # The side that goes first changes, so that none is always the one behind the other.
        sides = dict(list(plan.sides.items())[:: -1 if number % 2 else 1])
        run_probes(plan, number, sides, results)
        for name, load in plan.loads.items():
            run_load(plan, plan.make_batch(name, load, number), clients, sides, results[name])
    return {name: found.summarize() for name, found in results.items()}


def warm_up(plan: Plan, clients: Clients) -> None:
    """Send a short form of each load, so that no round has what a server does once."""
    run_probes(plan, WARM_ROUND, plan.sides, {})
    for name, whole in plan.loads.items():
        load = replace(
            whole,
            num_requests=min(whole.num_at_once, whole.num_requests),
            max_tokens=min(_WARM_TOKENS, whole.max_tokens),
        )
        if not load.repeats:
            batch = plan.make_batch(name, load, WARM_ROUND)
            run_load(plan, batch, clients, plan.sides, None)


def run_load(
    plan: Plan, batch: Batch, clients: Clients, sides: Sides, results: Results | None
) -> None:
    """Send the same requests to one server after the other."""
    clients.prepare(batch)
    parts: dict[str, list[Part]] = {}
    for side, url in sides.items():
        if batch.load.are_known:
            clients.send_first(url)
        parts[side] = clients.send(url)
    answers = {side: [a for part in found for a in part.answers] for side, found in parts.items()}
    compare(batch.name, batch.load, answers, plan.num_words)
    if results is not None:
        for side, found in parts.items():
            results.add(batch.name, side, get_figures(batch.load, found), answers[side])


def get_figures(load: Load, parts: list[Part]) -> Round:
    answers = [answer for part in parts for answer in part.answers]
    wall_s = max(part.end for part in parts) - min(part.start for part in parts)
    figures: Round = {"requests_per_s": round(len(answers) / wall_s, 2)}
    if load.media != "clip":
        num_tokens = sum(answer.num_tokens or 0 for answer in answers)
        figures["tokens_per_s"] = round(num_tokens / wall_s, 1)
        figures |= _get_quantiles("ttft", [answer.first_s for answer in answers])
    figures |= _get_quantiles("latency", [answer.total_s for answer in answers])
    # The share of its time that the busiest client worked: near 1, the clients are the bound.
    figures["busiest_client"] = round(max(part.busy_s for part in parts) / wall_s, 2)
    return figures


def _get_quantiles(name: str, seconds: list[float]) -> Round:
    return {
        f"{name}_p{share}_ms": round(float(np.percentile(seconds, share)) * 1e3, 1)
        for share in (50, 99)
    }


def run_probes(plan: Plan, number: int, sides: Sides, results: dict[str, Results]) -> None:
    """Ask each server for one thing after another; figures are medians."""
    batches = [plan.make_batch(name, load, number) for name, load in plan.probes.items()]
    num_requests = batches[0].load.num_requests if batches and results else 1
    requests = [
        (index, batch.load.path, batch.make_body(index))
        for index in range(num_requests)
        for batch in batches
    ]
    answers = {side: ask_in_turn(url, requests) for side, url in sides.items()}
    for place, batch in enumerate(batches):
        own = {side: found[place :: len(batches)] for side, found in answers.items()}
        compare(batch.name, batch.load, own, plan.num_words)
        for side, found in own.items():
            if results:
                times = [round(answer.first_s * 1e3, 1) for answer in found]
                figures = {"ttft_p50_ms": round(statistics.median(times), 1), "all_ms": times}
                results[batch.name].add(batch.name, side, figures, found)
