"""What uuids stand for, within their scope, and which of them are forgotten."""

from __future__ import annotations

import pytest

from sensorium.multimodal.names import BoundSource, UuidBindings, UuidScope
from sensorium.types.errors import RequestError

CAT = BoundSource(digest="a" * 64, is_encoded=True)
DOG = BoundSource(digest="b" * 64, is_encoded=True)
ALL = UuidScope()


def test_the_least_recently_used_binding_is_forgotten() -> None:
    bindings = UuidBindings(max_entries=2)
    bindings.bind("old", CAT, modality="image", scope=ALL)
    bindings.bind("new", DOG, modality="image", scope=ALL)
    assert bindings.get("old", modality="image", scope=ALL) == CAT
    bindings.bind("newest", DOG, modality="image", scope=ALL)
    assert bindings.get("old", modality="image", scope=ALL) == CAT
    assert bindings.get("new", modality="image", scope=ALL) is None
    assert len(bindings._sources) == 2


def test_clients_and_salts_are_separate() -> None:
    bindings = UuidBindings()
    scopes = [
        UuidScope(client=client, cache_salt=salt)
        for client in (None, "one", "two")
        for salt in (None, "one", "two")
    ]
    for number, scope in enumerate(scopes):
        source = BoundSource(digest=str(number), is_encoded=True)
        assert bindings.get("u", modality="image", scope=scope) is None
        bindings.check("u", source, modality="image", scope=scope)
        bindings.bind("u", source, modality="image", scope=scope)
    for number, scope in enumerate(scopes):
        found = bindings.get("u", modality="image", scope=scope)
        assert found is not None
        assert found.digest == str(number)
        with pytest.raises(RequestError, match="first used for another image"):
            bindings.check("u", CAT, modality="image", scope=scope)
