"""The checks of `checks.py` under pytest."""

from __future__ import annotations

import pytest
import torch

from .checks import Check, get_checks
from .setting import UnavailableError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Warnings of libraries on another machine say nothing about this code.
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("check", list(get_checks()), ids=lambda check: check.name)
def test_a_check_passes_on_the_device(check: Check) -> None:
    try:
        check.run()
    except UnavailableError as error:
        pytest.skip(str(error))
