"""Finds a checkpoint location whose state was kept by Spark's own operator."""

from __future__ import annotations

import contextlib
import re
from typing import Final

from statebackend.errors import CheckpointLocationError, ObjectNotFoundError
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from statebackend.spark.start.query_identity import identity_at

__all__ = ["refuse_sparks_own"]

_FOLDER: Final = "state"
_METADATA: Final = "/_metadata/"
_NAME: Final = re.compile(rb'"operatorName":"([^"]+)"')
# Of the operators that the backend's stand for; others, such as dedupe, stay Spark's.
_OURS_TO_BE: Final = ("transformwithstate", "groupswithstate", "inpandaswithstate")


def refuse_sparks_own(location: CheckpointLocation) -> None:
    """Refuse a location where Spark's own stateful operator ran, and none of ours.

    Args:
        location: with committed batches, of a job that has no state.

    Raises:
        CheckpointLocationError: naming the operators; or it cannot be read.
    """
    if identity_at(location) is not None:
        return
    found: dict[str, None] = {}
    for name in location.files(_FOLDER):
        if _METADATA in name:
            with contextlib.suppress(ObjectNotFoundError):
                text = b"".join(location.chunks(name))
                found.update(dict.fromkeys(one.decode() for one in _NAME.findall(text)))
    theirs = [name for name in found if any(one in name.lower() for one in _OURS_TO_BE)]
    if theirs:
        raise CheckpointLocationError(
            f"The checkpoint location {location.path} holds the state of Spark's own operator "
            f"({', '.join(theirs)}), which this library cannot go on with.",
            todo="Bring it over by `statebackend import-spark`, and begin with that savepoint at a "
            "new checkpoint location: see docs/howto/move-a-spark-job.md.",
        )
