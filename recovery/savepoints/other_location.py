"""Refuses a checkpoint location that is of another query than a job's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress

from recovery.savepoints.location_files import (
    IDENTITY_FILE,
    Batches,
    LocationFiles,
    query_id_of,
    text_of,
)
from recovery.savepoints.state_at_epoch import last_epochs
from snapshot.formats.record import Manifest
from statebackend.errors import ObjectNotFoundError, SettingError

__all__ = ["refuse_other_query"]


def refuse_other_query(
    manifests: Sequence[Manifest], job: str, location: LocationFiles, batches: Batches
) -> None:
    """Raise where the location is not of the query that ran the job last.

    Its batches would be taken for the job's: the sources would not stand where the state does.

    Raises:
        SettingError: it is of another query. CheckpointLocationError: it is of none.
    """
    written = [one for one in manifests if one.kind == "checkpoint"]
    ids = [one.query_id for one in written if one.query_id]
    if not ids or query_id_of(location) == ids[-1]:
        return
    newest = max(one.epoch for one in written)
    raise SettingError(
        f"{location.path} is not the checkpoint location of job {job!r}: it is of another query"
        f"{_owner(location)} and stands at batch {batches.last_commit}. The job stands at batch "
        f"{min(last_epochs(manifests).values(), default=newest)}.",
        todo="Give the checkpointLocation that the job's query was started with last.",
    )


def _owner(location: LocationFiles) -> str:
    """Whose it is, where it says so."""
    with suppress(ObjectNotFoundError, ValueError, KeyError, TypeError):
        found = json.loads(text_of(location, IDENTITY_FILE))
        return f" (of job {found['job']!r})"
    return ""
