"""Modalities that a server refuses or limits although its model takes them, with the reasons."""

from __future__ import annotations

import msgspec


class Restrictions(msgspec.Struct, frozen=True, kw_only=True):
    """The modalities that a model's trial found to work in part or not at all, with reasons."""

    switched_off: dict[str, str] = {}  # modality -> why requests with it are refused
    only_one: dict[str, str] = {}  # modality -> why a prompt may have only one item of it
