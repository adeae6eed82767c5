"""bfloat16, stage by stage, against the same model run by Transformers in bfloat16 on the device.

How much two right computations may differ is measured, not assumed: `spread` is the largest
distance of Transformers' bfloat16 from Transformers' float32 over all that is compared. Ours is as
good a rounding as theirs, so its distance from float32 must be alike (root mean square at most 1.5
times theirs), and its distance from theirs at most that of two roundings (2 × spread). Tokens must
agree where the reference's margin is more than both candidates can move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from sensorium import LLM
from tests.parity.decoder_inputs import get_decoder_inputs, get_our_decoder_inputs
from tests.parity.reference import GREEDY, Expected
from tests.support.engine import get_token_ids, run_staggered

from .check_tokens import find_first_difference, get_margins
from .setting import DeviceReference, get_reference, make_device_llm

BUDGET = 24  # prompts come in chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Of ours and theirs, both in bfloat16, and the exact float32."""

    spread: float  # theirs to exact, largest
    distance: float  # ours to theirs, largest
    their_rms: float
    our_rms: float

    @property
    def tolerance(self) -> float:
        return 2 * self.spread

    def __str__(self) -> str:
        return (
            f"largest {self.distance:.3g} of {self.tolerance:.3g}, "
            f"rms {self.our_rms:.3g} to {self.their_rms:.3g}"
        )


def measure(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> Distances:
    a, b, c = (
        torch.cat([part.float().flatten() for part in parts]) for parts in (ours, theirs, exact)
    )
    assert a.isfinite().all()
    return Distances(
        spread=float((b - c).abs().max()),
        distance=float((a - b).abs().max()),
        their_rms=float((b - c).square().mean().sqrt()),
        our_rms=float((a - c).square().mean().sqrt()),
    )


def assert_close(distances: Distances, stage: str) -> None:
    assert distances.spread > 0, f"{stage}: nothing was rounded"
    assert distances.distance <= distances.tolerance, f"{stage}: {distances}"
    assert distances.our_rms <= 1.5 * distances.their_rms, f"{stage}: {distances}"


# ---- embeddings


def check_embeddings(name: str) -> str:
    """All that the decoder is given of a prompt: text, and what the encoders made of media."""
    rough, exact = get_reference(name, torch.bfloat16), get_reference(name, torch.float32)
    # Without graphs: what goes into a replay is not seen from outside.
    llm = make_device_llm(name, torch.bfloat16, enable_prefix_caching=False, enforce_eager=True)
    ours, theirs, right = [], [], []
    for entry, precise in zip(rough.expected, exact.expected, strict=True):
        embeds = get_our_decoder_inputs(llm, entry)[0]
        expected = get_decoder_inputs(rough, entry)["inputs_embeds"]
        assert embeds.dtype == torch.bfloat16
        assert embeds.shape == expected.shape, entry.case.name
        ours.append(embeds)
        theirs.append(expected)
        right.append(get_decoder_inputs(exact, precise)["inputs_embeds"])
    distances = measure(ours, theirs, right)
    assert_close(distances, "embeddings")
    return f"{sum(part.shape[1] for part in ours)} embeddings: {distances}"


# ---- logits and tokens


class _Force(transformers.LogitsProcessor):  # type: ignore[misc]
    """Makes `generate` choose given tokens."""

    def __init__(self, entry: Expected) -> None:
        self._entry = entry

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        index = input_ids.shape[1] - len(self._entry.prompt_token_ids)
        return _only(scores, self._entry.token_ids[index])


def _only(logits: torch.Tensor, token_id: int) -> torch.Tensor:
    forced = torch.full_like(logits, -1e4)
    forced[:, token_id] = 0
    return forced


def _force_reference(reference: DeviceReference, entry: Expected) -> torch.Tensor:
    tokens, logits = reference.generate(
        entry.inputs,
        ignore_eos=True,
        max_new_tokens=len(entry.token_ids),
        logits_processor=transformers.LogitsProcessorList([_Force(entry)]),
    )
    assert tokens == entry.token_ids
    return logits


def _force_ours(llm: LLM, entry: Expected) -> torch.Tensor:
    """Our logits at each generated position, the reference's tokens being chosen."""
    sampler: Any = llm.core.runner._sampler  # type: ignore[attr-defined]
    sample, seen = sampler.sample, []

    def force(logits: torch.Tensor, rows: Any, likeliest: Any = None) -> Any:
        del likeliest
        seen.append(logits.clone())  # a replay writes the next ones to the same place
        return sample(_only(logits, entry.token_ids[len(seen) - 1]), rows)

    sampler.sample = force
    try:
        (output,) = llm.generate(entry.prompt, GREEDY, use_tqdm=False)
    finally:
        sampler.sample = sample
    assert list(output.prompt_token_ids) == entry.prompt_token_ids, entry.case.name
    assert list(output.outputs[0].token_ids) == entry.token_ids, entry.case.name
    return torch.cat(seen)


def check_decoder(name: str, backend: str) -> str:
    llm = make_device_llm(
        name, torch.bfloat16, attention_backend=backend, max_num_batched_tokens=BUDGET
    )
    assert backend in ("auto", llm.config.attention_backend)
    rough, exact = get_reference(name, torch.bfloat16), get_reference(name, torch.float32)
    theirs = [entry.logits for entry in rough.expected]
    ours = [_force_ours(llm, entry) for entry in rough.expected]
    distances = measure(ours, theirs, [_force_reference(exact, e) for e in rough.expected])
    assert_close(distances, "logits")
    num_sure = 0
    for our_logits, entry in zip(ours, rough.expected, strict=True):
        choices = our_logits.argmax(-1).tolist()
        for choice, token, margin in zip(
            choices, entry.token_ids, get_margins(entry.logits), strict=True
        ):
            if margin > 2 * distances.tolerance:
                num_sure += 1
                assert choice == token, entry.case.name
    # Gemma 4's tiny models round so coarsely that no token is sure; all others have some.
    assert num_sure or name.startswith("gemma4"), "no token is sure: nothing was compared"
    num_equal = _check_free_run(llm, rough.expected, 2 * distances.tolerance)
    note = f"by {llm.config.attention_backend}: " if backend == "auto" else ""
    return f"{note}{distances}; {num_sure} sure tokens; free run: {num_equal} of {len(ours)} equal"


def _check_free_run(llm: LLM, expected: Sequence[Expected], threshold: float) -> int:
    """Batched and unforced: where tokens part, the reference was unsure. How many never part."""
    num_equal = 0
    outputs = run_staggered(llm, [entry.prompt for entry in expected], GREEDY)
    for tokens, entry in zip(get_token_ids(outputs), expected, strict=True):
        index = find_first_difference(tokens, entry.token_ids)
        if index is None:
            num_equal += 1
        else:
            margin = get_margins(entry.logits)[index]
            assert margin <= threshold, f"{entry.case.name}: token {index}, margin {margin:.3g}"
    return num_equal
