"""The engine in one process, for offline use from Python."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import Any, Self, Unpack

from tqdm import tqdm

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.engine.assembly.builder import build_engine
from sensorium.engine.assembly.options import EngineOptions, LoadingOptions, MediaOptions
from sensorium.engine.driver import Delivery, ProcessAgain, RequestDriver, Step, advance
from sensorium.engine.failures import make_failure, raise_first_error
from sensorium.engine.inputs.input_processor import InputProcessor
from sensorium.engine.inputs.own_files import find_paths
from sensorium.engine.inputs.renderer import (
    Chat,
    ChatKwargs,
    Messages,
    Prepared,
    Renderer,
    make_chats,
)
from sensorium.engine.speech.batch import (
    TranscribeKwargs,
    TranscriptBatch,
    finish_transcripts,
    make_options,
)
from sensorium.engine.speech.models import read_speech_model
from sensorium.models.checkpoint import blame_checkpoint
from sensorium.render.prompts import as_params, as_prompts
from sensorium.speech.transcript import Transcript, TranscriptDelta
from sensorium.types.errors import RequestError, SensoriumError
from sensorium.types.options import check_names, make_group, takes_options
from sensorium.types.outputs import CompletionOutput, RequestDelta, RequestOutput
from sensorium.types.request import FinishReason, Prompt
from sensorium.types.sampling import SamplingParams


class LLM:
    """An engine with its model in this process, for generating from Python. Not thread-safe.

    `model` is a directory or a Hugging Face hub id. The default is "sensorium-mini", the model that
    comes with the package. Options that are left out are chosen to fit the model and the machine;
    `help(LLM.__init__)` and docs/options.md explain each of them. Models from the hub are kept in
    the hub's own cache. With `HF_HUB_OFFLINE=1` nothing is downloaded.

    `close`, or leaving a `with LLM(...) as llm` block, ends the processes and threads that process
    media.
    """

    _is_closed = False

    @takes_options(LoadingOptions, EngineOptions, MediaOptions)
    def __init__(self, model: str | os.PathLike[str] = EMBEDDED_MODEL, **options: Any) -> None:
        """Load a model and build its engine.

        Raises a `ModelError` if the model can't be run, and a `TypeError` for an unknown option.
        These are the options:
        """
        check_names(options, (LoadingOptions, EngineOptions, MediaOptions), caller="LLM()")
        loading = make_group(LoadingOptions, {**options, "model": model})
        running, media = make_group(EngineOptions, options), make_group(MediaOptions, options)
        with blame_checkpoint(loading.model):
            built, frontend, restrictions = build_engine(loading, options=running, media=media)
        self.config, self.core, self.media_parts = built.config, built.core, frontend.media_parts
        self.input_processor = InputProcessor(
            frontend.processor,
            pipeline=self.media_parts.pipeline,
            readonly=self.media_parts.readonly,
            defaults=built.defaults,
            grammars=built.grammars,
            limit_mm_per_prompt=running.limit_mm_per_prompt,
            mm_processor_kwargs=media.mm_processor_kwargs,
            media_io_kwargs=media.media_io_kwargs,
            seed=running.seed,
            restrictions=restrictions,
        )
        self.input_processor.max_model_len = self.config.limits.max_model_len
        self._speech = read_speech_model(frontend)
        self._num_threads = media.mm_processor_pool_size
        self._ids = count()
        self._driver = RequestDriver(
            frontend.processor.tokenizer,
            self.media_parts.caches.sender,
            kind=frontend.processor.kind,
        )

    def close(self) -> None:
        """End the processes and threads that process media. Nothing can be generated afterwards."""
        self._is_closed = True
        if self.core.loader is not None:
            self.core.loader.close()
        self.media_parts.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this LLM is closed: make a new one to generate again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_tokenizer(self) -> Any:
        return self.input_processor.processor.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        return_errors: bool = False,
    ) -> list[RequestOutput]:
        """Generate for one prompt or several, in batches, and return outputs in the prompts' order.

        `sampling_params` is one value for all prompts or one for each. If a prompt can't be served,
        the others are finished all the same. Then the `RequestError` of the first failed prompt is
        raised, with the outputs of all prompts in `error.outputs`. With `return_errors` nothing is
        raised: the output of a failed prompt has the error in its `error` field.
        """
        return self._generate(as_prompts(prompts), sampling_params, use_tqdm, return_errors)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        return_errors: bool = False,
        **options: Unpack[ChatKwargs],
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in batches, and return outputs in the same order.

        Messages have OpenAI's format: `{"role": "user", "content": "text"}`. The content may also
        be a list of parts: `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url":
        {"url": ...}}`, `{"type": "image", "image": <PIL image, array, bytes, path or URL>}` and the
        same for audio and video (also `input_audio`). A media part may have a `uuid`; a later part
        may give the `uuid` alone instead of the media. `options` are those of
        `sensorium.engine.inputs.renderer.ChatKwargs`. Errors are handled as in `generate`.
        """
        chats = make_chats(messages, options)
        if not self.input_processor.processor.kind.takes_prompts:
            raise RequestError("this model only transcribes speech: use `LLM.transcribe`")
        return self._generate(chats, sampling_params, use_tqdm, return_errors)

    def stream(
        self, prompt: Prompt | Chat, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestDelta, None, None]:
        """Yield the answer to one prompt while it is generated; the last delta has `final` set.

        Nothing is computed before the first `next`, so an error in the prompt is raised there. A
        request that fails later raises its `RequestError`. Closing the iterator aborts the request.
        """
        self._check_open()
        (params,) = as_params(sampling_params, 1)
        request_id = self._add(prompt, params, is_streamed=True)
        try:
            outputs, final = self._driver.outputs, None
            while final is None:
                if (delta := outputs.take_delta(request_id)) is None:
                    self._step_streams((request_id,))
                    continue
                final = delta.final
                if final is not None and final.error is not None:
                    final.error.outputs = (final,)
                    raise final.error
                yield delta
        finally:
            self._abort((request_id,))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatKwargs],
    ) -> Generator[RequestDelta, None, None]:
        """Yield the answer to one conversation, as `stream` does; `options` are those of `chat`."""
        chats = make_chats(messages, options)
        if len(chats) != 1:
            raise RequestError(f"only one conversation can be streamed, not {len(chats)}")
        return self.stream(chats[0], sampling_params)

    def transcribe(
        self,
        audios: Any,
        *,
        use_tqdm: bool = True,
        return_errors: bool = False,
        **options: Unpack[TranscribeKwargs],
    ) -> list[Transcript]:
        """Transcribe one audio item or a list of them, and return the transcripts.

        An item is the path of a file, a URL, the bytes of a file, or a pair of samples and their
        rate. It may have any length. The items of one call are computed together. `options` are
        those of `sensorium.speech.options.SpeechOptions`. Errors are handled as in `generate`.
        """
        with closing(self.stream_transcripts(audios, **options)) as deltas:
            results = finish_transcripts(deltas, use_tqdm=use_tqdm)
        if not return_errors:
            raise_first_error(results, "audios")
        return results

    def stream_transcripts(
        self, audios: Any, **options: Unpack[TranscribeKwargs]
    ) -> Generator[TranscriptDelta, None, None]:
        """Transcribe one audio item or a list of them, and yield each part as soon as it is final.

        The arguments are those of `transcribe`. The last delta of each item has its whole
        transcript as `final`; if an item failed, its `final` has an `error`, and the other items
        continue. Raise a `RequestError` at once if the model can't transcribe, or can't follow
        these options. Closing the generator aborts the transcripts that have not ended.
        """
        self._check_open()
        if self._speech is None:
            raise RequestError("this model does not transcribe audio")
        batch = TranscriptBatch(
            self._speech,
            self.media_parts.readonly,
            make_options(options, self._speech),
            add=partial(self._add, is_streamed=True),
            step=self._finish_streams,
            abort=self._abort,
            max_running=2 * self.config.limits.max_num_seqs,
        )
        return batch.run(audios if isinstance(audios, list) else [audios])

    @cached_property
    def renderer(self) -> Renderer:
        return Renderer(self.input_processor)

    def _generate(
        self,
        entries: Sequence[Prompt | Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        return_errors: bool,
    ) -> list[RequestOutput]:
        self._check_open()
        params = as_params(sampling_params, len(entries))
        batch = _Batch(self, entries, params)
        try:
            with tqdm(total=len(entries), disable=not use_tqdm, unit="req", desc="generate") as bar:
                outputs = batch.finish(bar)
        finally:
            batch.close()
        if not return_errors:
            raise_first_error(outputs, "prompts")
        return outputs

    def _add(
        self, prompt: Prompt | Chat, params: SamplingParams, *, is_streamed: bool = False
    ) -> str:
        """Turn a prompt into a request, start the request, and return its id."""
        return self._start(self._make_preparation(prompt, params)(), is_streamed=is_streamed)

    def _make_preparation(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        cancelled: Future[None] | None = None,
    ) -> Callable[[], Prepared]:
        """Return a function that turns a prompt into a request; any thread may call it."""
        # Ids and seeds are given out now, in the order of the prompts.
        request_id, seed = f"request-{next(self._ids)}", self.input_processor.draw_seed()

        return partial(
            self.renderer.render,
            find_paths(prompt),
            params,
            request_id=request_id,
            seed=seed,
            cancelled=cancelled,
        )

    def _start(self, prepared: Prepared, *, is_streamed: bool = False) -> str:
        """Start a prepared request and return its id; keep nothing of it if the core refuses it."""
        request_id = prepared.processed.request.request_id
        try:
            self._carry_out(self._driver.start(prepared, is_streamed=is_streamed))
        except BaseException:  # after a refusal, a bug or an interruption nothing may be left
            self._abort((request_id,))
            raise
        return request_id

    def _carry_out(self, delivery: Delivery) -> None:
        with closing(delivery):
            step = advance(delivery)
            while step is not None:
                step = advance(delivery, self._perform(step))

    def _perform(self, step: Step) -> object:
        if isinstance(step, ProcessAgain):
            return self.media_parts.pipeline.process_again(step.item)
        missing = self.core.add_request(step.request, step.make_transfer())
        if missing is not None:
            self.media_parts.caches.sender.handle_missing(missing)
        return missing

    def _step(self) -> list[RequestOutput]:
        """Compute one step, and return the outputs of requests that ended and are not streamed."""
        self.core.wait()
        progress = self._driver.process(self.core.step())
        self.core.abort_requests(progress.stopped_ids)
        finished = list(progress.finished)
        for request_id, delivery in progress.deliveries:
            try:
                self._carry_out(delivery)
            except SensoriumError as error:
                failure = self._driver.fail(request_id, error)
                self.core.abort_requests(failure.stopped_ids)
                finished += failure.finished
        return finished

    def _step_streams(self, request_ids: Collection[str]) -> None:
        """Compute one step, or raise a `RequestError` if the core has none of these requests."""
        child_ids = self._driver.outputs.get_child_ids(request_ids)
        if not any(child_id in self.core.scheduler.requests for child_id in child_ids):
            raise RequestError("the request was ended by an interruption, such as Ctrl-C")
        self._step()

    def _finish_streams(self, request_ids: Collection[str]) -> list[RequestOutput]:
        """Return the outputs of streamed requests that ended; if none has, first compute a step."""
        outputs = self._driver.outputs
        finished = outputs.take_finals(request_ids)
        if not finished:
            self._step_streams(request_ids)
            finished = outputs.take_finals(request_ids)
        return finished

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, given by their own ids or by the core's ids of their completions."""
        self.core.abort_requests((*self._driver.abort(request_ids), *request_ids))

    def _abort_returned(self) -> None:
        """Abort all requests except those that are streamed."""
        outputs = self._driver.outputs
        kept = {*outputs.streamed_ids, *outputs.get_child_ids(outputs.streamed_ids)}
        request_ids = (*outputs.request_ids, *self.core.scheduler.requests)
        self._abort([request_id for request_id in request_ids if request_id not in kept])


@dataclass(frozen=True, slots=True)
class _Preparing:
    """A prompt of a batch that is being turned into a request; `future` has the result."""

    index: int
    prompt: Prompt | Chat
    future: Future[Prepared]


class _Batch:
    """All prompts of one call of `LLM.generate` or `LLM.chat`, with their outputs.

    Only some of the prompts are started at a time, so that media is not processed long before it is
    needed. If media is processed in a pool of processes, an equal number of threads prepares
    prompts while the engine computes. Otherwise each prompt is prepared right before it is started.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt | Chat], params: Sequence[SamplingParams]
    ) -> None:
        self._llm = llm
        self._todo = deque(zip(range(len(prompts)), prompts, params, strict=True))
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._index_of: dict[str, int] = {}  # id of a request in flight -> index of its prompt
        self._max_in_flight = 2 * llm.config.limits.max_num_seqs
        num_threads = llm._num_threads
        self._max_preparing = max(1, 2 * num_threads)
        self._executor = ThreadPoolExecutor(num_threads, "prepare") if num_threads else None
        self._preparing: deque[_Preparing] = deque()
        self._cancelled: Future[None] = Future()

    def finish(self, bar: tqdm[Any]) -> list[RequestOutput]:
        """Run all prompts to their end, and return their outputs in the order of the prompts."""
        num_tokens = 0
        while self._todo or self._preparing or self._index_of:
            self._start_some(bar)
            for output in self._llm._step() if self._llm.core.is_busy else ():
                self._outputs[self._index_of.pop(output.request_id)] = output
                num_tokens += sum(len(entry.token_ids) for entry in output.outputs)
                bar.update()
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
        return [output for output in self._outputs if output is not None]

    def _start_some(self, bar: tqdm[Any]) -> None:
        while len(self._llm.core.scheduler.requests) < self._max_in_flight:
            self._prepare_some()
            if not self._preparing:
                return
            if not self._preparing[0].future.done() and self._llm.core.is_busy:
                return  # the engine steps while the next prompt is being prepared
            entry = self._preparing[0]
            if (error := self._start(entry)) is not None:
                self._outputs[entry.index] = _make_error_output(entry, error)
                bar.update()

    def _start(self, entry: _Preparing) -> RequestError | None:
        """Wait until a prompt is prepared, and start it; return the error if that fails."""
        try:
            entry.future.exception()  # waits; an interruption here leaves the entry in the queue
            self._preparing.popleft()
            self._index_of[self._llm._start(entry.future.result())] = entry.index
        except Exception as error:  # a bug fails this prompt only, not the others of the call
            return make_failure(error, f"prompt {entry.index}")
        return None

    def _prepare_some(self) -> None:
        while self._todo and len(self._preparing) < self._max_preparing:
            index, prompt, params = self._todo.popleft()
            prepare = self._llm._make_preparation(prompt, params, cancelled=self._cancelled)
            future = _run(prepare) if self._executor is None else self._executor.submit(prepare)
            self._preparing.append(_Preparing(index, prompt, future))

    def close(self) -> None:
        """Stop preparing prompts, and abort all requests except those that are streamed."""
        self._cancelled.set_result(None)
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        for entry in self._preparing:
            if not entry.future.cancelled() and entry.future.exception() is None:
                self._llm._driver.release(entry.future.result().processed.items)
        self._llm._abort_returned()


def _run(prepare: Callable[[], Prepared]) -> Future[Prepared]:
    future: Future[Prepared] = Future()
    try:
        future.set_result(prepare())
    except Exception as error:  # raised where the result is read
        future.set_exception(error)
    return future


def _make_error_output(entry: _Preparing, error: RequestError) -> RequestOutput:
    text = entry.prompt.get("prompt") if isinstance(entry.prompt, Mapping) else entry.prompt
    completion = CompletionOutput(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR)
    return RequestOutput(
        request_id=f"refused-{entry.index}",
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=(),
        outputs=(completion,),
        finished=True,
        error=error,
    )
