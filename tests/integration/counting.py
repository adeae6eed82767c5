"""Counts what a test asked of a server, under the names of the server's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from threading import Lock

from tests.support.clients import Answer, Message, get_content, get_media

CHAT = "/v1/chat/completions"


class Tally:
    """Expected counts, with the keys of `ServerProcess.get_metrics`. Safe for threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def add_answer(self, messages: list[Message], answer: Answer) -> None:
        """Count a chat that was answered.

        All of its completions must have found the same prefix in the cache.
        """
        num_choices = len(answer.choices)
        num_prompt_tokens = answer.usage.prompt_tokens
        lengths = [len(choice.token_ids) for choice in answer.choices]
        with self._lock:
            self._add_media(messages, answer, num_choices)
            self._add_ends(answer)
            for name, amount in (
                ("vllm:prompt_tokens_total", num_prompt_tokens),
                ("vllm:prompt_tokens_cached_total", answer.num_cached_tokens),
                ("vllm:generation_tokens_total", answer.usage.completion_tokens),
                ("vllm:prefix_cache_queries_total", num_choices * num_prompt_tokens),
                ("vllm:prefix_cache_hits_total", num_choices * answer.num_cached_tokens),
                ("vllm:request_prompt_tokens_sum", num_prompt_tokens),
                ("vllm:request_prompt_tokens_count", 1),
                ("vllm:request_generation_tokens_sum", sum(lengths)),
                ("vllm:request_generation_tokens_count", num_choices),
                ("vllm:request_max_num_generation_tokens_sum", max(lengths)),
                ("vllm:request_params_n_sum", num_choices),
                ("vllm:time_to_first_token_seconds_count", 1),
                ("vllm:e2e_request_latency_seconds_count", 1),
                ("vllm:request_queue_time_seconds_count", 1),
                (_make_http_name("2xx"), 1),
            ):
                self._counts[name] += amount

    def _add_media(self, messages: list[Message], answer: Answer, num_choices: int) -> None:
        processor, encoder = answer.get_hits("processor"), answer.get_hits("encoder")
        self._counts["vllm:mm_cache_queries_total"] += len(processor)
        self._counts["vllm:mm_cache_hits_total"] += processor.count("hit")
        for part in get_media(messages):
            source = "bytes" if part["type"] == "input_audio" else "data"
            name = f'sensorium:media_bytes_total{{source="{source}"}}'
            self._counts[name] += len(get_content(part))
        num_encoded = len(encoder) - encoder.count("skipped")
        for name, amount in (
            ("queries", num_choices * num_encoded),
            ("hits", num_choices * encoder.count("hit")),
        ):
            self._counts[f'sensorium:cache_{name}_total{{level="encoder"}}'] += amount

    def _add_ends(self, answer: Answer) -> None:
        for choice in answer.choices:
            reason = choice.finish_reason
            self._counts[f'vllm:request_success_total{{finished_reason="{reason}"}}'] += 1

    def add_refusal(self, reason: str) -> None:
        """Count a chat that was refused."""
        with self._lock:
            self._counts[f'sensorium:refused_requests_total{{reason="{reason}"}}'] += 1
            self._counts[_make_http_name("4xx")] += 1

    def compare(
        self, before: Mapping[str, float], after: Mapping[str, float]
    ) -> dict[str, tuple[float, float]]:
        """Return the series that differ: name -> what the server counted, and what the test did.

        All series of each metric that the test counted are compared, so that a count under a wrong
        label is found.
        """
        families = {name.partition("{")[0] for name in self._counts}
        names = {name for name in after if name.partition("{")[0] in families}
        names = {name for name in names | set(self._counts) if _is_of_chats(name)}
        found = {name: after.get(name, 0) - before.get(name, 0) for name in names}
        return {
            name: (found[name], self._counts[name])
            for name in sorted(names)
            if found[name] != self._counts[name]
        }


def _make_http_name(status: str) -> str:
    return f'http_requests_total{{handler="{CHAT}",method="POST",status="{status}"}}'


def _is_of_chats(name: str) -> bool:
    """Return whether a series depends only on the chats that a `Tally` counts.

    The test itself calls other routes, and a `Tally` counts no cache but the encoder's.
    """
    if name.startswith("http_requests_total"):
        return f'handler="{CHAT}"' in name
    return "sensorium:cache_" not in name or 'level="encoder"' in name
