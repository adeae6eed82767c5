"""Imports Ray Serve before the tests do, because it warns about itself when it is imported."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
