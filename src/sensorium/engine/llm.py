"""The engine in one process, for offline use: prompts in, outputs out."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from itertools import count
from typing import Any, Self, Unpack

import torch
from tqdm import tqdm

from sensorium.embedded import EMBEDDED_MODEL
from sensorium.engine.build.builder import Engine, Source, build_engine
from sensorium.engine.build.config import EngineOptions
from sensorium.engine.build.media_options import MediaKwargs, MediaOptions, make_media_options
from sensorium.engine.delivery import Delivery
from sensorium.engine.inputs.chat_batch import Chat, ChatKwargs, Messages, make_chats
from sensorium.engine.inputs.input_processor import InputProcessor, ProcessedRequest
from sensorium.engine.inputs.prompt_batch import as_params, as_prompts
from sensorium.engine.inputs.renderer import Renderer
from sensorium.engine.outputs.output_processor import OutputProcessor
from sensorium.engine.outputs.parallel_sampling import ParallelSampling
from sensorium.engine.run import Run
from sensorium.models.checkpoint import blame_checkpoint
from sensorium.multimodal.cache.interface import SenderCache
from sensorium.multimodal.pipeline import PerceivedItem
from sensorium.types.errors import ModelError, RequestError, SensoriumError, make_record
from sensorium.types.outputs import RequestDelta, RequestOutput
from sensorium.types.prompts import Prompt
from sensorium.types.request import EngineCoreOutput, FinishReason
from sensorium.types.sampling import SamplingParams


class LLM:
    """A model that is ready to generate. Not thread-safe.

    `model` is a directory or a hub id; without one, or as "sensorium-mini", it is the model that
    comes with the package. What is not given is chosen to fit the model and the machine:

    - `max_model_len`: the context, from the model's config, cut to what the KV cache holds;
    - `max_num_seqs`, `max_num_batched_tokens`: requests and tokens a step at most (32 and 2048 on a
      CPU, 256 and 8192 on CUDA);
    - `kv_cache_memory_bytes`: enough for all requests at full length, but at most a share of what
      is free; `block_size` tokens make a block; `enable_prefix_caching` keeps full ones;
    - `encoder_cache_size`, `max_num_encoder_embeds`: embeddings kept, and encoded a step;
    - `limit_mm_per_prompt`: most items of a modality in a prompt, e.g. `{"image": 4}`;
    - `disable_chunked_mm_input`: an item's tokens are computed in one step;
    - `scheduling_policy`: "fcfs", or "priority" (a prompt's lower `priority` first);
    - `attention_backend`: "flashinfer", "varlen", "triton", "torch", or "auto", the first that runs
      the model here;
    - `enforce_eager`: no CUDA graphs; `cuda_graph_sizes`: the batch sizes that have one (default:
      1, 2, 4, 8, then every eighth up to `max_num_seqs`); `fusion=False`: no fused kernels;
    - `dtype="auto"`: the checkpoint's; on a CPU float32, unless it has bfloat16 instructions and
      the checkpoint is in bfloat16;
    - `revision`: the branch, tag or commit of a hub id; config, processor and weights are all of
      it. Hub ids go through the hub's own cache; `HF_HUB_OFFLINE=1` uses nothing else;
    - `trust_remote_code`: run code that a checkpoint brings (off: such a model is refused);
    - `gpu_memory_utilization`: the share of a CUDA device's memory that may be in use afterwards;
      a model that does not fit is refused before it is loaded, with the figures;
    - `generation_config`: "auto": what a request leaves open is as in the checkpoint's
      `generation_config.json`; "none": that counts only for its end-of-sequence tokens, so that a
      silent request samples at temperature 1, and bans no tokens;
    - `structured_string_limit`: bounds answers that follow a JSON schema, whose free strings get at
      most so many characters; by default the model's directory sets it, which few do; 0: no limit;
    - `use_tqdm_on_load`: progress of long loads, on a terminal;
    - `seed`: where requests without a seed of their own get theirs from, so that a script repeats.

    Of media, see `sensorium.engine.build.media_options.MediaOptions`: `mm_processor_cache_gb` (4;
    0 is off) and `mm_processor_cache_type` ("lru" or "shm") for what was processed before,
    `mm_processor_pool_size` processes to process in (0: this one), `mm_processor_kwargs` and
    `media_io_kwargs` for every item, `allowed_local_media_path`, `allowed_media_domains` and
    `media_limits` (a `sensorium.MediaLimits`) for where media may come from and what it may cost,
    `enable_mm_embeds` for media that comes as its encoder's output (off), `allow_larger_media` for
    prompts with options that enlarge an item beyond what `mm_processor_kwargs` can (off).
    `close` ends processes and threads; `with LLM(...) as llm` does too.
    """

    _is_closed = False

    def __init__(
        self,
        model: str | os.PathLike[str] = EMBEDDED_MODEL,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        encoder_cache_size: int | None = None,
        max_num_encoder_embeds: int | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        disable_chunked_mm_input: bool = False,
        scheduling_policy: str = "fcfs",
        attention_backend: str = "auto",
        enforce_eager: bool = False,
        fusion: bool = True,
        cuda_graph_sizes: Sequence[int] | None = None,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        gpu_memory_utilization: float = 0.9,
        generation_config: str = "auto",
        structured_string_limit: int | None = None,
        use_tqdm_on_load: bool = True,
        seed: int = 0,
        **media: Unpack[MediaKwargs],
    ) -> None:
        options = EngineOptions(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            encoder_cache_size=encoder_cache_size,
            max_num_encoder_embeds=max_num_encoder_embeds,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            disable_chunked_mm_input=disable_chunked_mm_input,
            scheduling_policy=scheduling_policy,
            attention_backend=attention_backend,
            enforce_eager=enforce_eager,
            fusion=fusion,
            cuda_graph_sizes=cuda_graph_sizes,
            limit_mm_per_prompt={} if limit_mm_per_prompt is None else limit_mm_per_prompt,
            gpu_memory_utilization=gpu_memory_utilization,
            generation_config=generation_config,
            structured_string_limit=structured_string_limit,
            seed=seed,
        )
        source = Source(
            model=_as_text(model),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_tqdm_on_load=use_tqdm_on_load,
        )
        self._load(source, options, make_media_options(media))

    def _load(self, source: Source, options: EngineOptions, media_options: MediaOptions) -> None:
        with blame_checkpoint(source.model):
            engine = build_engine(source, options=options, media=media_options)
        self.config, self.core, self.perception = engine.config, engine.core, engine.perception
        self.input_processor = _make_input_processor(engine, options, media_options)
        self._num_threads = media_options.mm_processor_pool_size
        # What follows requests from their arrival to their end.
        self._delivery = Delivery(self.core, self._sender, engine.perception.pipeline)
        self._outputs = OutputProcessor(engine.processor.tokenizer)
        self._siblings, self._ids = ParallelSampling(partial(_release, self._sender)), count()

    @property
    def _sender(self) -> SenderCache:
        return self.perception.caches.sender

    def close(self) -> None:
        """End the processes and threads that perceive; nothing can be generated afterwards."""
        self._is_closed = True
        self.perception.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this LLM is closed")

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
        """Generate for one prompt or many, batched; the outputs are in the order of the prompts.

        A prompt that can't be served doesn't touch the others: they finish. Then its `RequestError`
        is raised, with all outputs in `error.outputs`; or, with `return_errors`, it is the `error`
        of its own output.
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
        """Answer one conversation or many, batched; errors as in `generate`.

        Messages are OpenAI's: `{"role": "user", "content": "text"}`, or content as a list of parts,
        `{"type": "text", "text": ...}`, `{"type": "image_url", "image_url": {"url": ...}}`,
        `{"type": "image", "image": <PIL image, array, bytes or URL>}` and the same for audio and
        video (also `input_audio`); a `uuid` beside media names it, and later stands for it.
        `options` are those of `sensorium.engine.inputs.chat_batch.ChatKwargs`.
        """
        chats = make_chats(messages, options)
        return self._generate(chats, sampling_params, use_tqdm, return_errors)

    def stream(
        self, prompt: Prompt | Chat, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestDelta, None, None]:
        """The answer to one prompt as it grows: news after each step, the last with `final`.

        Nothing happens before the first `next`, which also raises what is wrong with the prompt. A
        request that fails later raises its `RequestError`. Closing the iterator ends the request.
        """
        self._check_open()
        (params,) = as_params(sampling_params, 1)
        request_id = self._add(prompt, params, is_streamed=True)
        news = self._streams[request_id]
        try:
            is_ended = False
            while not is_ended:
                while not news:
                    self._step()
                    if not news and not self._is_alive(request_id):
                        raise RequestError("the request was given up by an interruption")
                delta = news.popleft()
                if delta.final is not None:
                    is_ended = True
                    _check_error(delta.final)
                yield delta
        finally:
            self._abort((request_id,))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[ChatKwargs],
    ) -> Generator[RequestDelta, None, None]:
        """`stream` for one conversation; `options` as in `chat`."""
        chats = make_chats(messages, options)
        if len(chats) != 1:
            raise RequestError(f"one conversation can be streamed, not {len(chats)}")
        return self.stream(chats[0], sampling_params)

    @cached_property
    def renderer(self) -> Renderer:
        return Renderer(self.input_processor)

    @cached_property
    def _streams(self) -> dict[str, deque[RequestDelta]]:
        """News that were not read yet, of the requests that are streamed."""
        return {}

    def _generate(
        self,
        entries: Sequence[Prompt | Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        return_errors: bool,
    ) -> list[RequestOutput]:
        self._check_open()
        params = as_params(sampling_params, len(entries))
        run = Run(self, entries, params, num_threads=self._num_threads)
        try:
            with tqdm(total=len(entries), disable=not use_tqdm, unit="req", desc="generate") as bar:
                outputs = run.finish(bar)
        finally:
            run.close()
        failed = [(i, output.error) for i, output in enumerate(outputs) if output.error]
        if failed and not return_errors:
            index, error = failed[0]
            raised = copy.copy(error)
            if len(entries) > 1:
                raised.path = ("prompts", index, *error.path)
            raised.outputs = tuple(outputs)
            raise raised from error
        return outputs

    def _add(
        self, prompt: Prompt | Chat, params: SamplingParams, *, is_streamed: bool = False
    ) -> str:
        """Start one request; its id."""
        return self._start(self._make_ready(prompt, params)(), is_streamed=is_streamed)

    def _make_ready(
        self,
        prompt: Prompt | Chat,
        params: SamplingParams,
        *,
        cancelled: Future[None] | None = None,
    ) -> Callable[[], ProcessedRequest]:
        """What turns a prompt into a request, in any thread. Ids and seeds are given out now, in
        the order of the prompts.
        """
        request_id, seed = f"request-{next(self._ids)}", self.input_processor.draw_seed()

        def make_ready() -> ProcessedRequest:
            options: Any = {"request_id": request_id, "seed": seed, "cancelled": cancelled}
            return self.renderer.render(prompt, params, **options).processed

        return make_ready

    def _start(self, processed: ProcessedRequest, *, is_streamed: bool = False) -> str:
        """Start one request; its id."""
        request, items = processed.request, processed.items
        request_id = request.request_id
        self._outputs.add_request(request, processed.prompt, is_streamed=is_streamed)
        if is_streamed:
            self._streams[request_id] = deque()
        has_siblings = False
        try:
            first, has_siblings = self._siblings.add(request, items)
            reports = self._delivery.deliver(first, items)
            self._outputs.add_reports(request_id, reports)
        except BaseException:  # a refusal, a bug or an interruption: nothing is left behind
            self._abort((request_id,))
            raise
        finally:
            if not has_siblings:
                self._release(items)
        return request_id

    def _release(self, items: Sequence[PerceivedItem]) -> None:
        _release(self._sender, items)

    def _is_alive(self, request_id: str) -> bool:
        child_ids = self._outputs.get_child_ids((request_id,))
        return any(child_id in self.core.scheduler.requests for child_id in child_ids)

    def _step(self) -> list[RequestOutput]:
        """Compute one step; the requests that ended with it. News of streams go to these."""
        news = self.core.step()
        finished, stopped = self._outputs.process(news)
        self.core.abort_requests(stopped)
        finished += self._start_siblings(news)
        for delta in self._outputs.take_deltas():
            self._streams[delta.request_id].append(delta)
        return finished

    def _start_siblings(self, news: Sequence[EngineCoreOutput]) -> list[RequestOutput]:
        """The requests that failed at it."""
        failed: list[RequestOutput] = []
        for children, items in self._siblings.take_ready(news):
            try:
                for child in children:
                    self._delivery.deliver(child, items)
            except SensoriumError as error:
                failed += self._fail(child.request_id, error)
            finally:
                self._release(items)
        return failed

    def _fail(self, child_id: str, error: SensoriumError) -> list[RequestOutput]:
        """Fail the request because one of its n completions could not be started."""
        end = EngineCoreOutput(
            request_id=child_id, finish_reason=FinishReason.ERROR, error=make_record(error)
        )
        ended, stopped = self._outputs.process([end])
        self.core.abort_requests(stopped)
        return ended

    def _abort(self, request_ids: Sequence[str]) -> None:
        """By the callers' ids, or the core's."""
        child_ids = self._outputs.get_child_ids(request_ids)
        self._siblings.drop(child_ids)
        self.core.abort_requests((*child_ids, *request_ids))
        self._outputs.forget(request_ids)
        for request_id in request_ids:
            self._streams.pop(request_id, None)


def _release(sender: SenderCache, items: Sequence[PerceivedItem]) -> None:
    """They have been sent: they may be evicted again."""
    sender.release([item.handle for item in items])


def _make_input_processor(
    engine: Engine, options: EngineOptions, media: MediaOptions
) -> InputProcessor:
    inputs = InputProcessor(
        engine.processor,
        pipeline=engine.perception.pipeline,
        readonly=engine.perception.readonly,
        defaults=engine.defaults,
        grammars=engine.grammars,
        limit_mm_per_prompt=options.limit_mm_per_prompt,
        mm_processor_kwargs=media.mm_processor_kwargs,
        media_io_kwargs=media.media_io_kwargs,
        seed=options.seed,
        switched_off=engine.switched_off,
    )
    inputs.max_model_len = engine.config.limits.max_model_len
    return inputs


def _as_text(model: object) -> str:
    if not isinstance(model, str | os.PathLike):
        raise ModelError(f"model is a directory or a hub id, not {type(model).__name__}")
    return str(os.fspath(model))


def _check_error(output: RequestOutput) -> None:
    if output.error is not None:
        output.error.outputs = (output,)
        raise output.error
