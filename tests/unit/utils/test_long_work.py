from __future__ import annotations

import pytest

from sensorium.utils import long_work


def test_the_listener_learns_of_the_beginning_and_of_the_end_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_work, "_listeners", [])
    heard: list[bool] = []
    with long_work.long_work():
        pass
    long_work.listen_for_long_work(heard.append)
    with long_work.long_work():
        assert heard == [True]
    assert heard == [True, False]
    with pytest.raises(ZeroDivisionError), long_work.long_work():
        1 // 0  # noqa: B018
    assert heard == [True, False] * 2
