"""The jobs under a URI, each in a line; and what is a savepoint and no job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from recovery.inspect.tolerant_log import read_one
from snapshot.formats.record import Manifest, parse_record_name
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from snapshot.storage.store_probe import PROBE_DEADLINE_S
from snapshot.storage.uris import folder_name
from statebackend.errors import FormatError, ObjectNotFoundError, SettingError

__all__ = [
    "BEGUN_NAME",
    "SAVEPOINT_NAME",
    "JobSummary",
    "refuse_savepoint",
    "split_jobs",
    "summarise",
]

# A folder with one of these is a savepoint (see recovery.savepoints.savepoint), not a job.
BEGUN_NAME: Final = "savepoint.begun"
SAVEPOINT_NAME: Final = "savepoint.json"
_SAVEPOINTS_OWN: Final = "savepoint."  # how both begin
_DELETED: Final = b'"deleted":true'  # in what begins one, see `recovery.savepoints.savepoint.Begun`


def _job_of(folder: str) -> str | None:
    """The job whose folder this is; None for the folder of none."""
    job = unquote(folder)
    try:
        return job if folder_name(job) == folder else None
    except SettingError:
        return None


def refuse_savepoint(folder: ObjectStore) -> None:
    """Refuse to take a savepoint's folder, or what is left of one, for a job's; one small listing.

    A mark of deletion that came late, and is all that is there, is none.

    Raises:
        SettingError: it is one.
    """
    # Listed, not read: where a name is absent, some stores tell a restricted role nothing else
    # than that access is denied.
    with folder.limited(PROBE_DEADLINE_S):
        names = {info.name for info in folder.list(_SAVEPOINTS_OWN)}
        if SAVEPOINT_NAME in names:
            raise _savepoint(folder.uri)
        with suppress(ObjectNotFoundError):
            if BEGUN_NAME in names and _DELETED not in folder.get(BEGUN_NAME):
                raise _savepoint(folder.uri)


def _savepoint(uri: str) -> SettingError:
    return SettingError(
        f"{uri} is the folder of a savepoint: it is no job's, and not the folder of all jobs.",
        todo="Give the uri= and job= of a job. A new one begins with a savepoint by savepoint=; "
        "`statebackend savepoint` looks at one, and deletes it.",
    )


def split_jobs(uri: str, listing: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """The jobs in a listing of the folder of all jobs: those with a log, with their objects.

    What lies deeper, or in a folder that `job_folder` gives to no job, is no job under this URI,
    nor is a savepoint.

    Args:
        uri: of the folder of all jobs.

    Raises:
        SettingError: this is the folder of one job, or of a savepoint.
    """
    inside: dict[str, list[ObjectInfo]] = {}
    with_log: set[str] = set()
    savepoints: set[str] = set()
    for info in sorted(listing, key=lambda one: one.name not in (BEGUN_NAME, SAVEPOINT_NAME)):
        if info.name in (BEGUN_NAME, SAVEPOINT_NAME):
            raise _savepoint(uri)
        if parse_record_name(info.name) is not None:
            raise SettingError(
                f"{uri} is the folder of one job, not the folder of all jobs.",
                todo="Leave out its last part, and give that as --job.",
            )
        folder, _, name = info.name.partition("/")
        inside.setdefault(folder, []).append(ObjectInfo(name, info.size_bytes, info.modified_ms))
        if parse_record_name(name) is not None:
            with_log.add(folder)
        elif name in (BEGUN_NAME, SAVEPOINT_NAME):
            savepoints.add(folder)
    jobs = with_log - savepoints
    found = {job: inside[folder] for folder in jobs if (job := _job_of(folder)) is not None}
    return dict(sorted(found.items()))


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """One job in a list.

    Attributes:
        epoch: the newest that an operator has finished; None = none yet.
        generation, writer: of the newest record.
        modified_ms: when something was last written, by the store's clock; None = not known.
        problem: why the newest record does not read; empty if it does.
    """

    job: str
    uri: str
    epoch: int | None
    generation: int
    writer: str
    objects: int
    size_bytes: int
    modified_ms: int | None
    problem: str = ""


def summarise(store: ObjectStore, job: str, listing: Sequence[ObjectInfo]) -> JobSummary:
    """One job in short: reads records from the newest down to the newest checkpoint.

    Args:
        store: the job's folder. listing: of that folder.
    """
    found = (parse_record_name(info.name) for info in listing)
    sequences = sorted((s for s in found if s is not None), reverse=True)
    tip: Manifest | None = None
    epoch, problem = None, ""
    for sequence in sequences:
        try:
            manifest = read_one(store, sequence, job)
        except ObjectNotFoundError:
            continue
        except FormatError as error:
            problem = problem or error.what
            continue
        tip = tip or manifest
        if manifest.kind == "checkpoint":
            epoch = manifest.epoch
            break
    times = [info.modified_ms for info in listing if info.modified_ms is not None]
    return JobSummary(
        job=job,
        uri=store.uri,
        epoch=epoch,
        generation=tip.generation if tip else 0,
        writer=tip.writer if tip else "",
        objects=len(listing),
        size_bytes=sum(info.size_bytes for info in listing),
        modified_ms=max(times, default=None),
        problem=problem,
    )
