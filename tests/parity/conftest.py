"""Reference models, loaded once and asked once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parity.kept_tokens import KeptTokens
from tests.parity.reference import Reference, ReferenceOf


@pytest.fixture(scope="session")
def reference_of(
    tiny_model: Callable[[str], str], pytestconfig: pytest.Config
) -> Iterator[ReferenceOf]:
    """The reference of a family, with the expected tokens of all its cases."""
    mode = pytestconfig.getoption("references")
    references: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in references:
            directory = tiny_model(family)
            kept = KeptTokens(family, directory, mode=mode)
            references[family] = Reference(directory, family, kept)
        return references[family]

    yield get
    if mode == "write":
        for reference in references.values():
            if reference.kept is not None:
                reference.kept.write()
