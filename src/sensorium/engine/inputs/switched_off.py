"""The modalities that a frontend refuses, and why."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sensorium.types.errors import RequestError

logger = logging.getLogger(__name__)


class SwitchedOff:
    """A table of the modalities (image, video, audio) that this frontend refuses, with the reasons.

    A reason comes either from the current engine core (`of_core`) or from this frontend's warm-up.
    """

    def __init__(self, of_core: Mapping[str, str] | None = None) -> None:
        self._of_core = dict(of_core or {})  # modality -> reason, of the current core
        self._own: dict[str, str] = {}  # modality -> reason, of this frontend's warm-up

    @property
    def reasons(self) -> dict[str, str]:
        """Return a dict from each modality that is switched off to the reason for it."""
        return {**self._of_core, **self._own}

    def take_core(self, reasons: Mapping[str, str]) -> None:
        """Replace the reasons that an earlier engine core gave with those of a new core.

        Modalities that this frontend switched off with `add` stay off.
        """
        self._of_core = dict(reasons)

    def add(self, modality: str, reason: str) -> None:
        """Switch a modality off until this frontend ends, and log a warning with the reason."""
        self._own[modality] = reason
        log_switched_off(modality, reason)

    def check(self, modality: str) -> None:
        """Raise a `RequestError` with the reason if this modality is switched off."""
        reason = self.reasons.get(modality)
        if reason is not None:
            raise RequestError(f"{modality} is switched off on this server: {reason}")


def log_switched_off(modality: str, reason: str) -> None:
    """Log a warning that a modality is switched off, with the reason, all in one line."""
    line = " ".join(reason.split())
    logger.warning("%s is switched off, and requests with it are refused: %s", modality, line)
