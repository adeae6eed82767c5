"""The engine of a frontend in a cluster: prompts are prepared here, and run elsewhere.

Media is fetched and hashed here, so that prompts can be placed (given to an engine) by their media.
If the headers of files are enough to compute layouts, the whole prompt is also expanded and
tokenised here. Nothing is decoded: the engine that gets the prompt processes what its caches lack.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from sensorium.engine.async_engine import AsyncEngine
from sensorium.engine.audio_request import AudioRequest
from sensorium.engine.inputs.input_processor import Outline
from sensorium.engine.inputs.renderer import AnyPrompt
from sensorium.engine.speech.live import TurnSession, TurnSource
from sensorium.engine.speech.models import SpeechModel
from sensorium.engine.speech.transcriber import AsyncTranscriber
from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.pipeline import OutlinedItem
from sensorium.render.prompts import EnginePrompt
from sensorium.scale import messages
from sensorium.scale.engines import Engines, Replicas
from sensorium.speech.live.session import LiveOptions
from sensorium.speech.options import SpeechOptions
from sensorium.speech.transcript import Segment, Transcript
from sensorium.types.errors import InvariantError
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

_FIRST_TOKENS = 256  # of a prompt without media, by which it is placed
_FIRST_CHARACTERS = 1024
_COST_UNKNOWN = 2**20  # an item that has to be decoded to be laid out costs more than others


class ClusterEngine(AsyncEngine):
    """An engine that prepares requests in this process, and runs them on engines of a cluster.

    `use` must be called before the first request.
    """

    _engines: Engines
    _peers: Replicas
    _encoders: Replicas | None

    @property
    def is_connected(self) -> bool:
        return self._is_alone and bool(self._engines.tally.replicas)

    async def use(self, engines: Engines, peers: Replicas, encoders: Replicas | None) -> None:
        """Send requests to these engines from now on. Wait until the first of them is ready.

        `peers` are all frontends of the cluster, including this one. `encoders` are the remote
        encoders, or `None`.
        """
        self._engines, self._peers, self._encoders = engines, peers, encoders
        self.run_alone(await engines.describe())

    async def generate(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
    ) -> RequestOutput:
        deltas = self.stream(prompt, params, request_id=request_id, group=group, may_repeat=True)
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.final is not None:
                    return delta.final
        raise InvariantError(f"request {request_id} ended without a result")

    async def stream(
        self,
        prompt: AnyPrompt,
        params: SamplingParams,
        *,
        request_id: str,
        group: str | None = None,
        may_repeat: bool = False,
    ) -> AsyncGenerator[RequestDelta, None]:
        self._check_open()
        self._num_preparing += 1
        try:
            outline = await self._preparation.outline(prompt, params)
        finally:
            self._num_preparing -= 1
        prompt = outline.prompt
        wire, files = await messages.run_long(
            messages.brings_tensors(prompt), messages.write_prompt, prompt
        )
        call = messages.Generate(
            prompt=wire, params=outline.params, request_id=request_id, group=group
        )
        answers = self._engines.run(
            call,
            key=choose_key(outline),
            files=files,
            uuids=messages.list_uuids(prompt),
            may_repeat=may_repeat,
        )
        token_ids: tuple[int, ...] = ()
        has_output = is_repeated = False
        async with aclosing(answers):
            async for answer in answers:
                if isinstance(answer, messages.Accepted):
                    is_repeated = has_output
                if not isinstance(answer, messages.Delta):
                    continue
                has_output = True
                token_ids = answer.delta.prompt_token_ids or token_ids
                delta = messages.restore_prompt(
                    answer.delta, text=outline.text, token_ids=token_ids
                )
                # Repeated output was counted before. The final output has all of it.
                yield replace(delta, deltas=()) if is_repeated else delta

    async def open_audio(
        self, params: SamplingParams, *, request_id: str, delay_ms: int | None = None
    ) -> AudioRequest:
        self._check_open()
        # An id that no other frontend uses, because engines distinguish audio requests by it.
        audio_id = f"{request_id}.{uuid.uuid4().hex}"
        _, stream = self.renderer.begin_stream(params, request_id=audio_id, delay_ms=delay_ms)
        call = messages.OpenAudio(params=params, request_id=audio_id, delay_ms=delay_ms)
        answers = self._engines.run(call, key=f"sound/{audio_id}")
        replica = ""
        try:
            async for answer in answers:
                if isinstance(answer, messages.Accepted):
                    replica = answer.replica
                if isinstance(answer, messages.Opened):
                    break
        except BaseException:
            await answers.aclose()
            raise
        link = _AudioLink(self._engines, answers, audio_id, replica)
        return AudioRequest(stream, send=link.send, deltas=link.get_deltas(), abort=link.abort)

    async def start_transcript(
        self,
        file: MediaBytes,
        options: SpeechOptions,
        *,
        request_id: str,
        cache_salt: str | None,
        session: _Session | None,
    ) -> AsyncGenerator[messages.Answer, None]:
        """Return the answers of the engine that transcribes a file."""
        self._check_open()
        self._inputs.switched_off.check("audio")
        digest = await asyncio.to_thread(self._inputs.readonly.hasher.digest_source, file)
        call = messages.Transcribe(
            digest=digest, options=options, request_id=request_id, cache_salt=cache_salt
        )
        # Audio of a live session goes to the engine of the session, other audio by its bytes.
        key, replica = (digest, None) if session is None else (session.key, session.replica)
        # The file always comes with the call, since a part of known audio may be needed after the
        # first segments, when nothing can be repeated.
        files = {digest: file}
        return self._engines.run(call, key=key, files=files, replica=replica, sends_all=True)

    async def reset_cache(self, level: str) -> None:
        if level == "mm":
            await self._peers.call_all("forget_media")
        if self._encoders is not None:
            await self._encoders.reset_cache(level)
        await self._engines.reset_cache(level)

    def forget_media(self) -> None:
        """Empty the media caches of this frontend only."""
        self._forget_own_media()

    async def read_engine_metrics(self) -> list[bytes]:
        """Return the values of the metrics of all engines, see `scale.metrics`."""
        return await self._engines.read_metrics()

    def _check_open(self) -> None:
        if self._is_closed:
            self._get_client()  # raises the error of an engine that is closed


class _AudioLink:
    """The connection of streaming audio with the engine that has its request."""

    def __init__(
        self,
        engines: Engines,
        answers: AsyncGenerator[messages.Answer, None],
        audio_id: str,
        replica: str,
    ) -> None:
        self._engines = engines
        self._answers = answers
        self._audio_id = audio_id
        self._replica = replica
        self._parts: asyncio.Queue[messages.AppendAudio] = asyncio.Queue()
        self._sender = asyncio.create_task(self._send_parts())
        self._closing: asyncio.Task[None] | None = None

    def send(self, features: torch.Tensor | None, is_last: bool) -> None:
        self._parts.put_nowait(messages.write_audio(self._audio_id, features, is_last=is_last))

    async def get_deltas(self) -> AsyncIterator[RequestDelta]:
        """Yield the text as it comes. Raise an error if the engine is gone or takes no more audio.

        An engine that is being removed takes no more calls, and would wait for the rest of the
        audio.
        """
        try:
            while (answer := await self._get_next()) is not None:
                if isinstance(answer, messages.Delta):
                    yield answer.delta
        finally:
            self._sender.cancel()

    async def _get_next(self) -> messages.Answer | None:
        """Return the next answer, or `None` at the end; raise errors of engine and sender."""
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({reading, self._sender}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
        self._sender.result()  # raises its error
        raise InvariantError("the sender of streaming audio has ended without an error")

    async def _read(self) -> messages.Answer | None:
        return await anext(self._answers, None)

    def abort(self) -> None:
        self._sender.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        with suppress(RuntimeError):  # a caller still reads, and the cancelled call ends that
            await self._answers.aclose()

    async def _send_parts(self) -> None:
        """Send parts of the audio, one after the other, because their order matters."""
        while True:
            part = await self._parts.get()
            await self._engines.append_audio(part, replica=self._replica)


@dataclass(slots=True, kw_only=True)
class _Session:
    """A live session. Each of its turns is an audio file of its own."""

    key: str  # by which its first turn is placed
    replica: str | None = None  # the engine that had its last turn, and gets the next one


class ClusterTranscriber(AsyncTranscriber):
    """A transcriber that lets an engine of a cluster transcribe whole audio files.

    Equal files go to the same engine. The files of one live session go to the engine that had the
    first one, for as long as it lives.
    """

    def __init__(
        self, engine: ClusterEngine, model: SpeechModel[Any], session: _Session | None = None
    ) -> None:
        super().__init__(engine, model)
        self._cluster = engine
        self._session = session

    def start_session(self) -> ClusterTranscriber:
        return ClusterTranscriber(self._cluster, self._model, _Session(key=uuid.uuid4().hex))

    async def transcribe(
        self,
        media: bytes | MediaBytes,
        options: SpeechOptions,
        *,
        request_id: str,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Segment | Transcript, None]:
        file = media if isinstance(media, MediaBytes) else MediaBytes(media)
        answers = await self._cluster.start_transcript(
            file, options, request_id=request_id, cache_salt=cache_salt, session=self._session
        )
        async with aclosing(answers):
            async for answer in answers:
                if isinstance(answer, messages.Accepted) and self._session is not None:
                    self._session.replica = answer.replica
                if isinstance(answer, messages.Part):
                    part = answer.segment or answer.transcript
                    if part is not None:
                        yield part


class ClusterTurnSource(TurnSource):
    """A source of live sessions. Each session stays on one engine of a cluster."""

    def __init__(self, transcriber: ClusterTranscriber) -> None:
        super().__init__(transcriber)
        self._cluster = transcriber

    def open(self, options: LiveOptions) -> TurnSession:
        own = self._cluster.start_session()
        return TurnSession(own, options, make_detector=self._make_detector)


# ---- placement


def choose_key(outline: Outline) -> str:
    """Return the key that decides which engine gets a prompt.

    The key is made of the media item that costs most to process. Items that the client only names
    count as most expensive, because an engine must have them. An item with a uuid is identified by
    that, with or without its bytes. The key of a prompt without media is made of its beginning.
    """
    prompt = outline.prompt
    if outline.items:
        item = max(outline.items, key=_estimate_cost)
        if item.item.uuid is None:
            return item.mm_hash
        return _name(prompt, item.modality, item.item.uuid)
    if prompt.rendered is not None:
        for modality, hashes in prompt.rendered.mm_hashes.items():
            if hashes:
                return _name(prompt, str(modality), str(hashes[0]))
    beginning: object = tuple(prompt.token_ids[:_FIRST_TOKENS])
    if prompt.text is not None:
        beginning = prompt.text[:_FIRST_CHARACTERS]
    return _digest(prompt.cache_salt, beginning)


def _estimate_cost(item: OutlinedItem) -> tuple[bool, int]:
    if item.item.media is None:
        return True, 0
    if item.layout is not None:
        return False, item.layout.num_embeds
    source = item.item.media
    return False, _COST_UNKNOWN + (len(source.data) if isinstance(source, MediaBytes) else 0)


def _name(prompt: EnginePrompt, modality: str, given: str) -> str:
    return _digest(prompt.uuid_scope, prompt.cache_salt, modality, given)


def _digest(*values: object) -> str:
    return blake2b(repr(values).encode(errors="surrogatepass"), digest_size=16).hexdigest()
