"""A worker that obeys `SchedulerOutput` and computes no tensors.

A KV slot holds the *name* of what its keys and values would depend on, so that a wrong block is
seen as a wrong name. It checks whatever a real worker relies on: a request reads only its own
content, each embedding comes from an entry that is there, and nothing is encoded that is held
already.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from sensorium.core.block_pool import NULL_BLOCK
from sensorium.types.errors import RequestError
from sensorium.types.request import EngineCoreRequest, TokenLogprobs
from sensorium.types.scheduling import (
    KVCacheGroup,
    ModelRunnerOutput,
    ScheduledRequest,
    SchedulerOutput,
)

GARBAGE = -1


class Contents:
    """Names of contents; equal names mean equal content.

    They are chained over adapter, salt, tokens, media and whether they were computed for a long
    request.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, int] = {}

    def get_root(
        self,
        request: EngineCoreRequest,
        *,
        is_encoder_decoder: bool = False,
        is_long: bool = False,
    ) -> int:
        received = [f.mm_hash for f in request.mm_features] if is_encoder_decoder else []
        return self._get((request.lora_id, request.cache_salt, is_long, *received))

    def get_next(self, parent: int, token_id: int, embed: tuple[str, int] | None) -> int:
        return self._get((parent, token_id, embed))

    def get_media(self, content: Hashable) -> int:
        return self._get(("media", content))

    def _get(self, content: Hashable) -> int:
        return self._names.setdefault(content, len(self._names))


def iter_embeds(request: EngineCoreRequest) -> Iterator[tuple[int, int, int]]:
    """Yield position, `mm_index` and embedding's index of each position that takes an embedding."""
    for mm_index, feature in enumerate(request.mm_features):
        place = feature.mm_position
        mask = place.is_embed if place.is_embed is not None else (True,) * place.length
        taken = [relative for relative, is_embed in enumerate(mask) if is_embed]
        for embed_index, relative in enumerate(taken):
            yield place.offset + relative, mm_index, embed_index


@dataclass
class Row:
    """What the worker keeps of a request. `embed_at`: position → (mm_index, which embedding)."""

    request: EngineCoreRequest
    token_ids: list[int]
    names: list[int]  # names[p]: what position p - 1 holds; names[0] is the root
    embed_at: dict[int, tuple[int, int]]
    tables: list[list[int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    is_long: bool = False
    is_broken: bool = False  # it failed, which the scheduler may not know yet
    has_media: bool = False  # its blocks for cross-attention hold its media

    def get_used_items(self) -> set[int]:
        """Return the items with some positions computed and some not."""
        used = set()
        for position in range(self.num_cached_tokens, self.num_computed_tokens):
            mm_index, _ = self.embed_at.get(position, (None, None))
            if mm_index is not None:
                used.add(mm_index)
        ends = [feature.mm_position.end for feature in self.request.mm_features]
        return {mm_index for mm_index in used if ends[mm_index] > self.num_computed_tokens}

    def get_keys(self) -> list[str]:
        return [self.get_key(mm_index) for mm_index in range(len(self.request.mm_features))]

    def list_media(self) -> list[Hashable]:
        """Return what the positions of layers with cross-attention must hold."""
        sizes = [f.mm_position.get_num_embeds() for f in self.request.mm_features]
        keys = tuple(self.get_keys())
        return [(keys, position) for position in range(sum(sizes))]

    def get_key(self, mm_index: int) -> str:
        return self.request.mm_features[mm_index].mm_hash + self.request.encoder_key_suffix


class SimulatedWorker:
    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        *,
        block_size: int,
        is_encoder_decoder: bool = False,
        long_after: int | None = None,
    ) -> None:
        self.rows: dict[str, Row] = {}
        self.encoded_keys: set[str] = set()
        self._groups = tuple(groups)
        self._block_size = block_size
        self._is_encoder_decoder = is_encoder_decoder
        self._long_after = long_after
        self._contents = Contents()
        self._failed_keys: set[str] = set()  # not encoded, which the scheduler may not know yet
        self._slots: dict[tuple[int, int, int], int] = {}

    def execute(
        self,
        output: SchedulerOutput,
        *,
        token_id: int,
        num_forced: int = 0,
        failing_hashes: Collection[str] = (),
        failing_requests: Collection[str] = (),
    ) -> ModelRunnerOutput:
        """Obey a step; every request that samples gets `token_id`.

        Those with tokens that the host has to read get it `num_forced` times more, as if a rule
        left no choice after it. Items of `failing_hashes` fail, and so do `failing_requests`.
        """
        self._drop_and_start(output)
        failed = self._encode(output, failing_hashes)
        healthy = []
        missing = failed | (self._failed_keys - self.encoded_keys)
        self._failed_keys = failed
        for scheduled in output.scheduled:
            row = self._extend(scheduled)
            is_healthy = missing.isdisjoint(self._needed_keys(row, scheduled))
            is_healthy = is_healthy and scheduled.request_id not in failing_requests
            is_healthy = is_healthy and not row.is_broken
            row.is_broken = not is_healthy
            self._write(row, scheduled, is_healthy=is_healthy)
            healthy += [scheduled] if is_healthy else []
        for scheduled in healthy:
            self._read(self.rows[scheduled.request_id], scheduled)
        sampled: dict[str, tuple[int, ...]] = {}
        scored: dict[str, tuple[TokenLogprobs, ...]] = {}
        for scheduled in healthy:
            row = self.rows[scheduled.request_id]
            scored[scheduled.request_id] = self._score(row, scheduled)
            row.num_computed_tokens += scheduled.num_new_tokens
            row.has_media = self._is_encoder_decoder
            assert scheduled.num_sampled == (row.num_computed_tokens == len(row.token_ids))
            if scheduled.num_sampled:
                is_read = row.request.sampling_params.has_penalties
                chosen = (token_id,) * (1 + num_forced * is_read)
                sampled[scheduled.request_id] = chosen
                row.token_ids += chosen
        return ModelRunnerOutput(
            token_ids=sampled,
            logprobs={},
            failed_encodes=dict.fromkeys(sorted(failed), "it can't be encoded"),
            failed_requests=dict.fromkeys(failing_requests, RequestError("no sense comes of it")),
            prompt_logprobs={name: entries for name, entries in scored.items() if entries},
        )

    def _score(self, row: Row, scheduled: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
        """The rank names the position of the prompt token that an entry is about."""
        if row.request.sampling_params.prompt_logprobs is None:
            return ()
        start = scheduled.num_computed_tokens
        end = min(start + scheduled.num_new_tokens, len(row.request.prompt_token_ids) - 1)
        return tuple(
            TokenLogprobs(logprob=-1.0, rank=position + 1, top_token_ids=(), top_logprobs=())
            for position in range(start, end)
        )

    def _drop_and_start(self, output: SchedulerOutput) -> None:
        self.encoded_keys.difference_update(output.freed_encoder_keys)
        for request_id in output.stopped_request_ids:
            self.rows.pop(request_id, None)
        starts = {s.request_id: s.num_computed_tokens for s in output.scheduled}
        for started in output.started:
            request = started.request
            assert request.request_id not in self.rows, "started, but never stopped"
            self.rows[request.request_id] = Row(
                request=request,
                token_ids=[*request.prompt_token_ids, *started.output_token_ids],
                names=[
                    self._contents.get_root(
                        request,
                        is_encoder_decoder=self._is_encoder_decoder,
                        is_long=started.is_long,
                    )
                ],
                embed_at={}
                if self._is_encoder_decoder
                else {position: (i, embed) for position, i, embed in iter_embeds(request)},
                tables=[[] for _ in self._groups],
                num_computed_tokens=starts[request.request_id],
                num_cached_tokens=starts[request.request_id],
                is_long=started.is_long,
                has_media=started.has_media,
            )

    def _encode(self, output: SchedulerOutput, failing_hashes: Collection[str]) -> set[str]:
        failed: set[str] = set()
        for scheduled in output.scheduled:
            row = self.rows[scheduled.request_id]
            for encoder_input in scheduled.encoder_inputs:
                key = encoder_input.key
                assert key == row.get_key(encoder_input.mm_index)
                assert key not in self.encoded_keys | failed, "encoded although it is held"
                if row.request.mm_features[encoder_input.mm_index].mm_hash in failing_hashes:
                    failed.add(key)
                else:
                    self.encoded_keys.add(key)
        return failed

    def _extend(self, scheduled: ScheduledRequest) -> Row:
        row = self.rows[scheduled.request_id]
        is_long = self._long_after is not None and len(row.token_ids) > self._long_after
        assert row.is_broken or row.is_long == is_long, "it goes on with keys of the other kind"
        if not row.is_broken:
            assert row.num_computed_tokens == scheduled.num_computed_tokens
        assert scheduled.num_new_tokens > 0
        new_block_ids = scheduled.new_block_ids or [()] * len(row.tables)
        for table, new_ids in zip(row.tables, new_block_ids, strict=True):
            table.extend(new_ids)
        return row

    def _needed_keys(self, row: Row, scheduled: ScheduledRequest) -> set[str]:
        start = scheduled.num_computed_tokens
        end = start + scheduled.num_new_tokens
        if self._is_encoder_decoder:
            # Cross-attention needs all of them, and keeps what it needs after the first step.
            return set() if row.has_media else set(row.get_keys())
        return {row.get_key(row.embed_at[p][0]) for p in range(start, end) if p in row.embed_at}

    def _write(self, row: Row, scheduled: ScheduledRequest, *, is_healthy: bool) -> None:
        start = scheduled.num_computed_tokens
        if is_healthy:
            missing = self._needed_keys(row, scheduled) - self.encoded_keys
            assert not missing, f"{scheduled.request_id} needs {missing}, which no step encoded"
        for position in range(start, start + scheduled.num_new_tokens):
            name = self._get_name(row, position) if is_healthy else GARBAGE
            for group_index, group in enumerate(self._groups):
                if not group.is_cross:
                    self._slots[self._get_slot(row, group_index, position)] = name
        for slot, name in self._list_media_slots(row):
            if not row.has_media:
                self._slots[slot] = name if is_healthy else GARBAGE

    def _read(self, row: Row, scheduled: ScheduledRequest) -> None:
        start = scheduled.num_computed_tokens
        for slot, name in self._list_media_slots(row):
            assert self._slots.get(slot) == name, f"{scheduled.request_id} has another's audio"
        for group_index, group in enumerate(self._groups):
            if group.is_cross:
                continue
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, start + scheduled.num_new_tokens):
                found = self._slots.get(self._get_slot(row, group_index, position))
                assert found == self._get_name(row, position), (
                    f"{scheduled.request_id} reads another's content at {position}"
                )

    def _list_media_slots(self, row: Row) -> list[tuple[tuple[int, int, int], int]]:
        """Return where the media of a request are for cross-attention, and what is there."""
        return [
            (self._get_slot(row, group_index, position), self._contents.get_media(content))
            for group_index, group in enumerate(self._groups)
            if group.is_cross
            for position, content in enumerate(row.list_media())
        ]

    def _get_slot(self, row: Row, group_index: int, position: int) -> tuple[int, int, int]:
        block_id = row.tables[group_index][position // self._block_size]
        assert block_id != NULL_BLOCK, f"position {position} has no block"
        return group_index, block_id, position % self._block_size

    def _get_name(self, row: Row, position: int) -> int:
        while len(row.names) <= position + 1:
            place = len(row.names) - 1
            embed = None
            if place in row.embed_at:
                mm_index, embed_index = row.embed_at[place]
                embed = row.request.mm_features[mm_index].mm_hash, embed_index
            row.names.append(self._contents.get_next(row.names[-1], row.token_ids[place], embed))
        return row.names[position + 1]
