"""Makes the Ray Serve deployments of a cluster, with the CPUs and GPUs that each needs."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from sensorium.scale.encoders import MAX_ITEMS, EncoderReplica
from sensorium.scale.ingress import NAME, Frontend
from sensorium.scale.options import ScaleOptions
from sensorium.scale.replica import EngineReplica
from sensorium.server.options import ServeOptions

ENGINE = "Engine"
ENCODER = "Encoder"
_ROUTER = "sensorium.scale.router:MediaAffinityRouter"
_HEALTH_S = 2.0  # between two checks of a process
_SPARE_REQUESTS = 64  # that a frontend takes beyond its limit, to refuse them in its own words
_GRACE_S = 10.0  # for a process to end, after the time in which requests may end


def make_application(options: ServeOptions, scale: ScaleOptions) -> serve.Application:
    """Return the application of Ray Serve that runs a model on several engines.

    Ray must be connected, because the number of GPUs for an engine depends on the cluster.
    """
    deploy = partial(
        serve.deployment,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=options.shutdown_timeout + _GRACE_S,
        graceful_shutdown_wait_loop_s=0.5,
    )
    quiet = {"enable_access_log": False}  # Ray's lines have no paths; frontends log their own
    engine = deploy(
        name=ENGINE,
        logging_config=quiet,
        # Streaming audio takes one request, and each part of it another one for a moment.
        max_ongoing_requests=2 * options.max_concurrent_requests,
        ray_actor_options={
            "num_cpus": scale.engine_cpus,
            "num_gpus": _count_gpus(options, scale),
        },
        request_router_config=_make_router(ENGINE, options.max_concurrent_requests),
        **_get_numbers(scale),
    )(EngineReplica)
    frontend = deploy(
        name=NAME,
        logging_config=quiet,
        num_replicas=scale.frontends,
        max_ongoing_requests=options.max_concurrent_requests + _SPARE_REQUESTS,
        ray_actor_options={"num_cpus": scale.frontend_cpus},
    )(serve.ingress(None)(Frontend))
    if not scale.encoders:
        return frontend.bind(options, engine.bind(options))
    gpus = _count_gpus(options, scale) if scale.encoder_gpus is None else scale.encoder_gpus
    encoder = deploy(
        name=ENCODER,
        logging_config=quiet,
        num_replicas=scale.encoders,
        max_ongoing_requests=MAX_ITEMS,
        ray_actor_options={"num_cpus": scale.encoder_cpus, "num_gpus": gpus},
        request_router_config=_make_router(ENCODER, MAX_ITEMS),
    )(EncoderReplica)
    encoders = encoder.bind(options)
    return frontend.bind(options, engine.bind(options, encoders), encoders)


def _make_router(deployment: str, max_queue: int) -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=_ROUTER,  # type: ignore[arg-type]
        request_router_kwargs={"deployment": deployment, "max_queue": max_queue},
    )


def _get_numbers(scale: ScaleOptions) -> dict[str, Any]:
    if scale.max_replicas is None or scale.max_replicas <= scale.replicas:
        return {"num_replicas": scale.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.replicas,
            initial_replicas=scale.replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=scale.target_requests,
            upscale_delay_s=scale.upscale_delay,
            downscale_delay_s=scale.downscale_delay,
        )
    }


def _count_gpus(options: ServeOptions, scale: ScaleOptions) -> float:
    if scale.engine_gpus is not None:
        return scale.engine_gpus
    may_use = options.loading.device.startswith(("auto", "cuda"))
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return 1.0 if may_use and resources.get("GPU", 0) >= 1 else 0.0
