"""What a server can't do with the media that its model takes, and why."""

from __future__ import annotations

import msgspec


class Restrictions(msgspec.Struct, frozen=True, kw_only=True):
    """The modalities that a model's trial found to work in part or not at all, with reasons."""

    switched_off: dict[str, str] = {}  # requests with it are refused
    only_one: dict[str, str] = {}  # a prompt may have one item of it
