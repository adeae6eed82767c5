"""The engine in one process, for offline use: prompts in, outputs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from sensorium.engine.builder import build_engine
from sensorium.engine.config import EngineOptions
from sensorium.engine.input_processor import InputProcessor
from sensorium.engine.output_processor import OutputProcessor
from sensorium.types.errors import ModelError, RequestError
from sensorium.types.outputs import CompletionOutput, RequestOutput
from sensorium.types.prompts import Prompt
from sensorium.types.request import FinishReason
from sensorium.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


class LLM:
    """A model that is ready to generate.

    `model` is a directory or a hub id. What is not given is chosen to fit the model and the
    machine:

    - `max_model_len`: the context, from the model's config, cut to what the KV cache holds;
    - `max_num_seqs`, `max_num_batched_tokens`: requests and tokens a step at most (32 and 2048 on a
      CPU, 256 and 8192 on CUDA);
    - `kv_cache_memory_bytes`: enough for all requests at full length, but at most a share of what
      is free; `block_size` tokens make a block; `enable_prefix_caching` keeps full ones;
    - `encoder_cache_size`, `max_num_encoder_embeds`: embeddings kept, and encoded a step;
    - `limit_mm_per_prompt`: most items of a modality in a prompt, e.g. `{"image": 4}`;
    - `disable_chunked_mm_input`: an item's tokens are computed in one step;
    - `scheduling_policy`: "fcfs", or "priority" (a prompt's lower `priority` first);
    - `dtype="auto"`: the checkpoint's; on a CPU float32, unless it has bfloat16 instructions and
      the checkpoint is in bfloat16;
    - `revision`: the branch, tag or commit of a hub id; config, processor and weights are all of
      it. Hub ids go through the hub's own cache; `HF_HUB_OFFLINE=1` uses nothing else;
    - `trust_remote_code`: run code that a checkpoint brings (off: such a model is refused);
    - `gpu_memory_utilization`: the share of a CUDA device's memory that may be in use afterwards;
      a model that does not fit is refused before it is loaded, with the figures;
    - `use_tqdm_on_load`: progress of long loads, on a terminal;
    - `seed`: where requests without a seed of their own get theirs from, so that a script repeats.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
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
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        gpu_memory_utilization: float = 0.9,
        use_tqdm_on_load: bool = True,
        seed: int = 0,
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
            limit_mm_per_prompt={} if limit_mm_per_prompt is None else limit_mm_per_prompt,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
        )
        if not isinstance(model, str | os.PathLike):
            raise ModelError(f"model is a directory or a hub id, not {type(model).__name__}")
        engine = build_engine(
            os.fspath(model),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            options=options,
            revision=revision,
            trust_remote_code=trust_remote_code,
            use_tqdm_on_load=use_tqdm_on_load,
        )
        self.config = engine.config
        self.core = engine.core
        self.input_processor = InputProcessor(
            engine.processor,
            defaults=engine.defaults,
            limit_mm_per_prompt=options.limit_mm_per_prompt,
            seed=seed,
        )
        self._outputs = OutputProcessor(engine.processor.tokenizer)
        self._ids = count()

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
        entries = _as_prompts(prompts)
        params = _as_params(sampling_params, len(entries))
        run = _Run(self, entries, params)
        try:
            with tqdm(total=len(entries), disable=not use_tqdm, unit="req", desc="generate") as bar:
                outputs = run.finish(bar)
        finally:
            run.abort_rest()
        failed = [(index, output) for index, output in enumerate(outputs) if output.error]
        if failed and not return_errors:
            index, output = failed[0]
            error = RequestError(
                f"prompt {index}: {output.error}" if len(entries) > 1 else f"{output.error}"
            )
            error.outputs = tuple(outputs)
            raise error from output.error
        return outputs

    def _add(self, prompt: Prompt, params: SamplingParams) -> str:
        """Start one request; its id."""
        request_id = f"request-{next(self._ids)}"
        processed = self.input_processor.process(request_id, prompt, params)
        self.core.add_request(processed.request, processed.payloads)
        self._outputs.add_request(processed.request, processed.prompt)
        return request_id

    def _step(self) -> list[RequestOutput]:
        """Compute one step; the requests that ended with it."""
        finished, stopped = self._outputs.process(self.core.step())
        self.core.abort_requests(stopped)
        return finished

    def _abort(self, request_ids: Sequence[str]) -> None:
        self.core.abort_requests(request_ids)
        self._outputs.forget(request_ids)


class _Run:
    """One call of `generate`: feeds prompts as the engine takes them, so that media is not
    processed far ahead.
    """

    def __init__(
        self, llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> None:
        self._llm = llm
        self._todo = list(zip(range(len(prompts)), prompts, params, strict=True))[::-1]
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._index_of: dict[str, int] = {}  # requests in flight
        self._max_in_flight = 2 * llm.config.limits.max_num_seqs

    def finish(self, bar: tqdm[Any]) -> list[RequestOutput]:
        num_tokens = 0
        while self._todo or self._index_of:
            self._feed(bar)
            for output in self._llm._step() if self._index_of else ():
                self._outputs[self._index_of.pop(output.request_id)] = output
                num_tokens += len(output.outputs[0].token_ids)
                bar.update()
                bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
        return [output for output in self._outputs if output is not None]

    def _feed(self, bar: tqdm[Any]) -> None:
        while self._todo and len(self._index_of) < self._max_in_flight:
            index, prompt, params = self._todo.pop()
            try:
                self._index_of[self._llm._add(prompt, params)] = index
            except RequestError as error:
                self._refuse(index, prompt, error)
                bar.update()
            except Exception as error:
                # Our bug; the boundary at which one prompt fails and its neighbours don't.
                logger.exception("prompt %d could not be started", index)
                reason = f"internal error: {type(error).__name__}: {error}"
                self._refuse(index, prompt, RequestError(reason))
                bar.update()

    def _refuse(self, index: int, prompt: Prompt, error: RequestError) -> None:
        self._outputs[index] = _make_error_output(index, prompt, error)

    def abort_rest(self) -> None:
        """After an interruption: leave nothing running."""
        self._llm._abort(tuple(self._llm.core.scheduler.requests) + tuple(self._index_of))


def _make_error_output(index: int, prompt: Prompt, error: RequestError) -> RequestOutput:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    completion = CompletionOutput(index=0, text="", token_ids=(), finish_reason=FinishReason.ERROR)
    return RequestOutput(
        request_id=f"refused-{index}",
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=(),
        outputs=(completion,),
        finished=True,
        error=error,
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is text, a mapping or a list of token ids; anything else is many."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts are text, token ids, mappings or a list of them, not {type(prompts).__name__}"
        )
    if len(prompts) > 0 and all(isinstance(entry, Integral) for entry in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling params are SamplingParams, not {type(params).__name__}")
    for entry in params:
        if not isinstance(entry, SamplingParams):
            raise RequestError(f"sampling params are SamplingParams, not {type(entry).__name__}")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts")
    return list(params)
