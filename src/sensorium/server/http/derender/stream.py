"""One chunk of a streamed answer, between the state that came with it and the one that goes on."""

from __future__ import annotations

from dataclasses import dataclass

from sensorium.server.http.derender.choice import ChoiceNews, ChoiceReader, Reading
from sensorium.server.http.derender.state import StreamState, read_state, write_state
from sensorium.server.http.protocol.derender import WireGenerateResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedNews:
    """`created` is the same in all chunks; `num_tokens`: so far, of all choices."""

    created: int
    num_tokens: int
    news: list[ChoiceNews]
    state: str


def read_chunk(
    reading: Reading,
    chunk: WireGenerateResponse,
    given: str | None,
    prompt_token_ids: tuple[int, ...],
) -> StreamedNews:
    """`given`: the state that came with the chunk before, `None` with the first. A choice whose
    end was told has no more news.
    """
    before = StreamState.start(chunk.created) if given is None else read_state(given)
    states = dict(before.choices)
    news: list[ChoiceNews] = []
    for index, choice in enumerate(chunk.choices):
        state = states.get(choice.index)
        reader = ChoiceReader(reading, prompt_token_ids=prompt_token_ids, state=state)
        if not reader.is_ended:
            path = f"generate_chunk.choices[{index}]"
            news.append(reader.add(choice, path, is_whole=False))
        states[choice.index] = reader.save()
    num_new = sum(len(choice.token_ids or ()) for choice in chunk.choices)
    num_tokens = before.num_completion_tokens + num_new
    return StreamedNews(
        created=before.created,
        num_tokens=num_tokens,
        news=news,
        state=write_state(before.created, num_tokens, states),
    )
