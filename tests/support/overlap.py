"""Whether engines under test launch a step before the results of the last one are read.

By default that is done on a GPU only. Under test it is also done on a CPU, so that the same loop
is tested there, unless the tests run with `--no-overlap`. Processes that tests start inherit it.
"""

from __future__ import annotations

import os

_NAME = "SENSORIUM_TESTS_OVERLAP"


def turn_on() -> None:
    os.environ[_NAME] = "1"
    apply()


def is_on() -> bool:
    return _NAME in os.environ


def apply() -> None:
    """Make the engines of this process overlap their steps, if the tests are run so."""
    from sensorium.engine.assembly import config

    if is_on():
        config.OVERLAP_DEVICES |= {"cpu"}
