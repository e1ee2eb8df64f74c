"""The jobs under a URI: where each one lies, and each in a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from recovery.inspect import read_one
from snapshot.record import Manifest, parse_record_name
from snapshot.storage.base import ObjectInfo, ObjectStore
from statebackend.errors import FormatError, ObjectNotFoundError, SettingError

__all__ = ["JobSummary", "job_folder", "split_jobs", "summarise"]

_LOG_OF: Final = re.compile(r"(?:(.*)/)?log/[0-9]{20}\.ckpt")


def job_folder(uri: str, job: str) -> str:
    """The URI of a job's own folder."""
    if not job.strip("."):
        raise SettingError(f"The job's name is {job!r}.", todo="Give the job's name.")
    return f"{uri.rstrip('/')}/{quote(job, safe='')}"


def split_jobs(uri: str, listing: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """The jobs in a listing of the folder of all jobs: those with a log, with their objects.

    Args:
        uri: of the folder of all jobs.

    Raises:
        SettingError: this is the folder of one job.
    """
    infos = list(listing)
    found = (_LOG_OF.fullmatch(info.name) for info in infos)
    folders: dict[str, list[ObjectInfo]] = {match[1] or "": [] for match in found if match}
    if "" in folders:
        raise SettingError(
            f"{uri} is the folder of one job, not the folder of all jobs.",
            todo="Leave out its last part, and give that as --job.",
        )
    for info in infos:
        parts = info.name.split("/")
        for end in range(len(parts) - 1, 0, -1):
            folder = "/".join(parts[:end])
            if folder in folders:
                name = "/".join(parts[end:])
                folders[folder].append(ObjectInfo(name, info.size_bytes, info.modified_ms))
                break
    # A file: URI is decoded when it is opened, so there a job's folder has its name as it is.
    named = uri.startswith("file:")
    return {
        folder if named else unquote(folder): inside for folder, inside in sorted(folders.items())
    }


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
