from __future__ import annotations

from sensorium.types.request import EngineCoreRequest, FinishReason
from sensorium.types.sampling import SamplingParams


def make(cache_salt: str | None, lora_id: str | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(1,),
        sampling_params=SamplingParams(),
        cache_salt=cache_salt,
        lora_id=lora_id,
    )


def test_salts_and_adapters_separate_encoder_outputs() -> None:
    values = (None, "", "a", "b", "None", "a/b", "'a'", "'a'/'b'")
    suffixes = {make(salt, lora_id).encoder_key_suffix for salt in values for lora_id in values}
    assert len(suffixes) == len(values) ** 2


def test_without_salt_and_adapter_the_hash_is_the_key() -> None:
    assert make(None, None).encoder_key_suffix == ""


def test_finish_reasons_read_as_on_the_wire() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]
