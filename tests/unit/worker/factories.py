"""Requests and their parts in one line each."""

from __future__ import annotations

from functools import cache

from sensorium.types.multimodal import MultiModalFeatureSpec, PlaceholderRange
from sensorium.types.request import EngineCoreRequest
from sensorium.types.sampling import SamplingParams
from sensorium.types.scheduling import BlockIds, EncoderInput, ScheduledRequest
from sensorium.worker.request_states import PromptPositions, RequestState, RequestTable

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def make_feature(
    mm_hash: str,
    offset: int,
    length: int,
    is_embed: tuple[bool, ...] | None = None,
    modality: str = "image",
) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        modality=modality, mm_hash=mm_hash, mm_position=PlaceholderRange(offset, length, is_embed)
    )


def make_request(
    prompt_token_ids: tuple[int, ...],
    *features: MultiModalFeatureSpec,
    request_id: str = "r",
    params: SamplingParams = GREEDY,
    **changes: object,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling_params=params,
        mm_features=features,
        **changes,
    )


@cache
def get_table(num_groups: int) -> RequestTable:
    """Return the table in which all requests of these tests have their rows."""
    return RequestTable(num_groups)


def make_state(
    request: EngineCoreRequest,
    block_ids: BlockIds = ((),),
    *,
    output_token_ids: tuple[int, ...] = (),
    mrope: PromptPositions | None = None,
) -> RequestState:
    table = get_table(len(block_ids))
    state = RequestState(request, output_token_ids, table=table, mrope=mrope)
    state.add_blocks(block_ids)
    return state


def make_scheduled(
    request_id: str,
    start: int,
    end: int,
    *,
    block_ids: BlockIds = ((),),
    num_sampled: int = 1,
    encoder_inputs: tuple[EncoderInput, ...] = (),
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        num_computed_tokens=start,
        num_new_tokens=end - start,
        new_block_ids=block_ids,
        num_sampled=num_sampled,
        encoder_inputs=encoder_inputs,
    )
