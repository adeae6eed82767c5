"""The options of a cluster, in addition to those of its servers. Ray is not imported here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sensorium.types.errors import ModelError
from sensorium.types.options import DEPLOY, check_options, option

_option = partial(option, commands=DEPLOY)
_MAX_PROCESSES = 4096
_MAX_DELAY_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """The size of a cluster, and the needs of its processes. Invalid values raise `ModelError`."""

    replicas: int = _option(
        1,
        section="cluster",
        least=1,
        most=_MAX_PROCESSES,
        metavar="N",
        help="The number of engines. Each has a copy of the model.",
    )
    max_replicas: int | None = _option(
        None,
        kind="integer",
        least=1,
        most=_MAX_PROCESSES,
        metavar="N",
        default_text="that of --replicas",
        help="The most engines, if their number shall follow the load. --replicas is the least.",
    )
    target_requests: float = _option(
        16.0,
        above=0,
        most=1e6,
        metavar="N",
        help="The requests per engine that Ray aims at when the number of engines follows the "
        "load.",
    )
    upscale_delay: float = _option(
        30.0,
        least=0,
        most=_MAX_DELAY_S,
        metavar="SECONDS",
        help="For how long there must be too many requests before engines are added.",
    )
    downscale_delay: float = _option(
        600.0,
        least=0,
        most=_MAX_DELAY_S,
        metavar="SECONDS",
        help="For how long there must be too few requests before engines are removed. Their caches "
        "are lost.",
    )
    frontends: int = _option(
        1,
        least=1,
        most=_MAX_PROCESSES,
        metavar="M",
        help="The number of frontends. They serve HTTP, render prompts and name media.",
    )
    encoders: int = _option(
        0,
        least=0,
        most=_MAX_PROCESSES,
        metavar="N",
        help="The number of remote encoders, which encode media above --encode-above in place of "
        "the engines.",
    )
    encoder_cpus: float = _option(
        1.0,
        least=0,
        most=1e4,
        metavar="N",
        help="The CPU cores that Ray reserves for an encoder on its machine.",
    )
    encoder_gpus: float | None = _option(
        None,
        kind="number",
        least=0,
        most=1e3,
        metavar="N",
        default_text="that of --engine-gpus",
        help="The GPUs that Ray reserves for an encoder.",
    )
    engine_cpus: float = _option(
        1.0,
        least=0,
        most=1e4,
        metavar="N",
        help="The CPU cores that Ray reserves for an engine on its machine.",
    )
    engine_gpus: float | None = _option(
        None,
        kind="number",
        least=0,
        most=1e3,
        metavar="N",
        default_text="1 if the cluster has GPUs and --device allows it, else 0",
        help="The GPUs that Ray reserves for an engine.",
    )
    frontend_cpus: float = _option(
        1.0,
        least=0,
        most=1e4,
        metavar="N",
        help="The CPU cores that Ray reserves for a frontend on its machine.",
    )
    ray_address: str | None = _option(
        None,
        kind="text",
        metavar="ADDRESS",
        default_text="a new Ray on this machine",
        help='A Ray that runs already: "auto" for one on this machine, or HOST:PORT.',
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ModelError(
                f"max_replicas={self.max_replicas} is less than replicas={self.replicas}"
            )
