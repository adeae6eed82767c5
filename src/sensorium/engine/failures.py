"""Errors of single entries in a call of `LLM`: the other entries are finished all the same."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

from sensorium.speech.transcript import Transcript
from sensorium.types.errors import CapacityError, RequestError
from sensorium.types.outputs import RequestOutput

logger = logging.getLogger(__name__)


def make_failure(error: Exception, name: str) -> RequestError:
    """Return the `RequestError` of an entry that failed, named like "prompt 3". A bug is logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, CapacityError):
        return RequestError(str(error))
    logger.error("%s fails", name, exc_info=error)
    return RequestError(f"internal error: {type(error).__name__}: {error}")


def raise_first_error(results: Sequence[RequestOutput | Transcript], name: str) -> None:
    """Raise the error of the first result that has one, with all results as its `outputs`.

    If there are several results, `name` and the index are put in front of the error's path.
    """
    for index, result in enumerate(results):
        if result.error is not None:
            raised = copy.copy(result.error)
            if len(results) > 1:
                raised.path = (name, index, *result.error.path)
            raised.outputs = tuple(results)
            raise raised from result.error
