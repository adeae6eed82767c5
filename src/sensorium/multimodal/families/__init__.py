"""Processors that can't be called like the others: one small file per family, by `model_type`."""

from collections.abc import Callable

from sensorium.multimodal.families.voxtral import call_voxtral
from sensorium.multimodal.processor_call import ProcessorResult

PROCESSOR_CALLS: dict[str, Callable[..., ProcessorResult]] = {"voxtral": call_voxtral}
