"""Processors that can't be called like the others: one small file per family, by `model_type`."""

from sensorium.multimodal.families.voxtral import call_voxtral
from sensorium.multimodal.processor_call import ProcessorCall

PROCESSOR_CALLS: dict[str, ProcessorCall] = {"voxtral": call_voxtral}
