"""From what was typed to stores: options, the jobs under a URI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from recovery.inspect.job_list import split_jobs
from snapshot.formats.record import LOG_PREFIX
from snapshot.storage.object_store import ObjectInfo, ObjectStore
from snapshot.storage.store_options import StoreOptions
from snapshot.storage.stores_by_uri import open_store
from snapshot.storage.uris import job_folder
from statebackend import system
from statebackend.errors import NotRestorableError, SettingError

__all__ = ["Place", "is_on_s3", "place_of"]

DEADLINE_S: Final = 20.0  # somebody is waiting for the answer
_SHOWN: Final = 5


@dataclass(frozen=True)
class Place:
    """The folder of all jobs."""

    uri: str
    options: StoreOptions

    def open(self, uri: str = "") -> ObjectStore:
        """The store at the URI, or at one below it; nothing is read yet."""
        return open_store(uri or self.uri, new_id=system.new_id, options=self.options)

    def job(self, name: str) -> ObjectStore:
        """A job's own folder."""
        return self.open(job_folder(self.uri, name))

    def listed(self) -> dict[str, list[ObjectInfo]]:
        """Every job with its objects; one listing of everything below the URI."""
        return split_jobs(self.uri, self.open().list(""))

    def jobs(self, job: str | None) -> Iterator[tuple[str, ObjectStore]]:
        """The one job that was asked for, or all.

        Raises:
            SettingError: none was asked for, and there are none.
        """
        names = [job] if job is not None else list(self.listed())
        if not names:
            raise SettingError(
                f"There is no job under {self.uri}.",
                todo="Give the uri= that the query was started with, without the job's name.",
            )
        for name in names:
            yield name, self.job(name)

    def stored(self, job: str | None) -> str:
        """As `one`; a job that was asked for has a log.

        Raises:
            NotRestorableError: it has none.
        """
        name = self.one(job)
        if job is None or self.job(name).list(LOG_PREFIX):
            return name
        others = list(self.listed())
        there = f"the jobs there are {_names(others)}" if others else "no job is there"
        raise NotRestorableError(
            f"There is no job {name!r} under {self.uri}: {there}.",
            todo="Name one of them with --job."
            if others
            else "Give the uri= that the query was started with, without the job's name.",
        )

    def one(self, job: str | None) -> str:
        """The job that was asked for, or the only one.

        Raises:
            SettingError: none was asked for, and there is none, or there are several.
        """
        names = [name for name, _ in self.jobs(job)]
        if len(names) > 1:
            raise SettingError(
                f"There are {len(names)} jobs under {self.uri}: {_names(names)}.",
                todo="Name one with --job.",
            )
        return names[0]


def _names(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def is_on_s3(uri: str) -> bool:
    """Whether a URI is of a store that is reached with an endpoint and a region."""
    return uri.partition(":")[0] in ("s3", "s3a", "s3n")


def place_of(uri: str, endpoint: str, region: str) -> Place:
    """Flags first, then the environment; then boto3's own choice.

    The environment counts for S3 only, so that it may be set for good.
    """
    if is_on_s3(uri):
        endpoint = endpoint or os.environ.get("STATEBACKEND_S3_ENDPOINT", "")
        region = region or os.environ.get("STATEBACKEND_S3_REGION", "")
    options = StoreOptions(endpoint_url=endpoint, region=region, deadline_s=DEADLINE_S)
    return Place(uri, options)
