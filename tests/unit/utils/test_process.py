from __future__ import annotations

import pytest

from sensorium.utils import process


def test_the_listener_learns_of_the_beginning_and_of_the_end_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_listeners", [])
    heard: list[bool] = []
    with process.long_work():
        pass
    process.listen_for_long_work(heard.append)
    with process.long_work():
        assert heard == [True]
    assert heard == [True, False]
    with pytest.raises(ZeroDivisionError), process.long_work():
        1 // 0  # noqa: B018
    assert heard == [True, False] * 2
