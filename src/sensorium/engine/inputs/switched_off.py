"""The modalities that a frontend refuses, or limits to one item a prompt, and why."""

from __future__ import annotations

import logging

from sensorium.types.errors import RequestError
from sensorium.types.restrictions import Restrictions

logger = logging.getLogger(__name__)


class SwitchedOff:
    """A table of refused and limited modalities, from the core and from this frontend's warm-up."""

    def __init__(self, of_core: Restrictions | None = None) -> None:
        self._of_core = of_core or Restrictions()
        self._own: dict[str, str] = {}  # modality -> reason, of this frontend's warm-up

    @property
    def reasons(self) -> dict[str, str]:
        """Return a dict from each modality that is switched off to the reason for it."""
        return {**self._of_core.switched_off, **self._own}

    @property
    def only_one(self) -> dict[str, str]:
        """Return a dict from each modality that is limited to one item a prompt to the reason."""
        reasons = self.reasons
        return {m: reason for m, reason in self._of_core.only_one.items() if m not in reasons}

    def take_core(self, restrictions: Restrictions) -> None:
        """Replace the restrictions of an earlier core; what `add` switched off stays off."""
        self._of_core = restrictions

    def add(self, modality: str, reason: str) -> None:
        """Switch a modality off until this frontend ends, and log a warning with the reason."""
        self._own[modality] = reason
        _log_switched_off(modality, reason)

    def check(self, modality: str, num_items: int = 1) -> None:
        """Raise a `RequestError` with the reason if a prompt may not have that many such items."""
        reason = self.reasons.get(modality)
        if reason is not None:
            raise RequestError(f"{modality} is switched off on this server: {reason}")
        reason = self.only_one.get(modality)
        if reason is not None and num_items > 1:
            raise RequestError(
                f"there are {num_items} {modality} items, but on this server a prompt may have "
                f"only one: {reason}"
            )


def log_restrictions(restrictions: Restrictions) -> None:
    """Log a warning for each modality that is switched off or limited to one item a prompt."""
    for modality, reason in restrictions.switched_off.items():
        _log_switched_off(modality, reason)
    for modality, reason in restrictions.only_one.items():
        line = " ".join(reason.split())
        logger.warning("%s is limited to one item in a prompt: %s", modality, line)


def _log_switched_off(modality: str, reason: str) -> None:
    line = " ".join(reason.split())
    logger.warning("%s is switched off, and requests with it are refused: %s", modality, line)
