"""Paths and names that no file can have are refused as such."""

from __future__ import annotations

from typing import Any

import pytest

from sensorium.render.messages import load_chat_template, parse_part
from sensorium.types.errors import RequestError


@pytest.mark.parametrize("template", [3, "", b"{{ messages }}"])
def test_a_template_that_is_none_is_refused(template: Any) -> None:
    with pytest.raises(RequestError, match="chat_template: must be"):
        load_chat_template(template)


def test_a_name_too_long_for_a_file_is_a_name() -> None:
    assert load_chat_template("x" * 5000) == "x" * 5000


def test_a_path_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        parse_part({"type": "image", "path": "\ud800"})
