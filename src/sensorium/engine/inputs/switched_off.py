"""Keeps the modalities of a model that can't be used on this server, and the reasons.

A core finds them by its trial, a frontend by its warm-up. Errors of requests, the list of models
and log lines all get the reason from here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sensorium.types.errors import RequestError

logger = logging.getLogger(__name__)


class SwitchedOff:
    """The modalities that a frontend can't use, each with the reason."""

    def __init__(self, of_core: Mapping[str, str] | None = None) -> None:
        self._of_core = dict(of_core or {})  # modality -> reason, of the current core
        self._own: dict[str, str] = {}  # modality -> reason, of this frontend's warm-up

    @property
    def reasons(self) -> dict[str, str]:
        """Return why modalities are off: modality -> reason."""
        return {**self._of_core, **self._own}

    def take_core(self, reasons: Mapping[str, str]) -> None:
        """Replace the reasons of an earlier core with those of a new one."""
        self._of_core = dict(reasons)

    def add(self, modality: str, reason: str) -> None:
        """Switch a modality off for as long as this frontend lives."""
        self._own[modality] = reason
        log_switched_off(modality, reason)

    def check(self, modality: str) -> None:
        """Raise a `RequestError` with the reason if the modality is off."""
        reason = self.reasons.get(modality)
        if reason is not None:
            raise RequestError(f"{modality} is switched off on this server: {reason}")


def log_switched_off(modality: str, reason: str) -> None:
    """Log that a modality is switched off, in one line."""
    line = " ".join(reason.split())
    logger.warning("%s is switched off, and requests with it are refused: %s", modality, line)
