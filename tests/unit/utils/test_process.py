from __future__ import annotations

import pytest

from sensorium.utils import process


def test_the_listener_is_called_at_the_start_and_at_the_end_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_listeners", [])
    reported: list[bool] = []
    with process.long_work():
        pass
    process.listen_for_long_work(reported.append)
    with process.long_work():
        assert reported == [True]
    assert reported == [True, False]
    with pytest.raises(ZeroDivisionError), process.long_work():
        1 // 0  # noqa: B018
    assert reported == [True, False] * 2
