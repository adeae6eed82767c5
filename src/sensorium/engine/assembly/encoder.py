"""Builds a remote encoder: a model's towers (encoders), and the parts that prepare their media."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sensorium.engine.assembly.frontend import (
    Frontend,
    build_frontend,
    build_readonly_caches,
    check_remote_encoder,
    read_checkpoint,
)
from sensorium.engine.assembly.options import EncodeOptions, LoadingOptions, MediaOptions
from sensorium.engine.assembly.tiers import build_tiers, make_identity
from sensorium.engine.encoding.service import EncodingService
from sensorium.engine.encoding.towers import TowerThread
from sensorium.engine.encoding.wire import Identity
from sensorium.models.checkpoint import find_weights
from sensorium.models.hf_model import HfModel
from sensorium.models.loading import load_model, resolve_device, resolve_dtype
from sensorium.multimodal.media import MediaBytes
from sensorium.multimodal.processing.dummy_media import exceeds_limits, make_dummy_file
from sensorium.multimodal.processing.item_worker import ItemJob
from sensorium.types.errors import CapacityError, ModelError, RequestError
from sensorium.utils.process import report_step

_CLOSE_S = 5.0  # for the towers to end what they are working on


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A remote encoder with all of its parts."""

    service: EncodingService
    towers: TowerThread
    frontend: Frontend
    hf_model: HfModel
    identity: Identity

    def close(self) -> bool:
        """End all threads and processes; return False if the towers do not end in time."""
        has_ended = self.towers.close(_CLOSE_S)
        self.frontend.media_parts.close()
        return has_ended


def build_encoder(
    loading: LoadingOptions, *, options: EncodeOptions, media: MediaOptions
) -> Encoder:
    """Load a model's encoders without its decoder, and build the parts that prepare media for them.

    An item of each modality is encoded as a trial. Raise a `ModelError` if the model has no
    encoders, or if they can't be run without the decoder.
    """
    checkpoint = read_checkpoint(loading)
    directory, hf_config = checkpoint.directory, checkpoint.hf_config
    identity = make_identity(loading, directory, hf_config, media)
    tiers = build_tiers(loading, directory, hf_config, media)
    frontend = build_frontend(
        loading, checkpoint, media, build_readonly_caches(media), tiers=tiers, starts_early=True
    )
    try:
        check_remote_encoder(frontend.processor)
        find_weights(loading.model, directory, use_tqdm=loading.use_tqdm_on_load)
        report_step("loading the weights of the encoders")
        device = resolve_device(loading.device)
        hf_model = load_model(
            str(directory),
            hf_config,
            dtype=resolve_dtype(loading.dtype, hf_config, device),
            device=device,
            trust_remote_code=loading.trust_remote_code,
            use_tqdm=loading.use_tqdm_on_load,
            towers_only=True,
        )
    except BaseException:
        frontend.media_parts.close()
        raise
    most = options.max_batch_embeds or (8192 if device.type == "cuda" else 2048)
    towers = TowerThread(hf_model, max_embeds=most)
    try:
        _try_towers(towers, frontend, media)
    except BaseException:
        towers.close(_CLOSE_S)
        frontend.media_parts.close()
        raise
    return Encoder(
        service=_make_service(frontend, towers, options, media),
        towers=towers,
        frontend=frontend,
        hf_model=hf_model,
        identity=msgspec.structs.replace(identity, processor=frontend.processor.fingerprint),
    )


def _make_service(
    frontend: Frontend, towers: TowerThread, options: EncodeOptions, media: MediaOptions
) -> EncodingService:
    media_parts = frontend.media_parts
    return EncodingService(
        media_parts.readonly.backend,
        towers,
        limits=media.get_limits(),
        capacity_bytes=media.capacity_bytes,
        max_items=options.max_items,
        tiers=media_parts.tiers,
        check_stored=media_parts.readonly.check_stored,
    )


def _try_towers(towers: TowerThread, frontend: Frontend, media: MediaOptions) -> None:
    """Encode a small item of each modality, and raise a `ModelError` if one can't be encoded."""
    report_step("encoding an item of each modality as a trial")
    own, limits = frontend.own_options, media.get_limits()
    backend = frontend.media_parts.readonly.backend
    for modality in frontend.processor.modalities:
        processor_kwargs, decode_options = own.resolve(modality, is_encoded=True)
        job = ItemJob(
            mm_hash="",
            modality=modality,
            decode_options=decode_options,
            processor_kwargs=processor_kwargs,
        )
        try:
            source = MediaBytes(make_dummy_file(modality))
            finished = backend.start(job, source).result(limits.flight_timeout_s)
            towers.submit(finished.result).result(limits.flight_timeout_s)
        except (RequestError, CapacityError, TimeoutError) as error:
            if exceeds_limits(modality, limits):
                continue
            raise ModelError(f"{modality} can't be encoded remotely: {error}") from error
