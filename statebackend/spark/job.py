"""A job in its store: a folder with a commit log and the objects that it names."""

from __future__ import annotations

from urllib.parse import quote

from blake3 import blake3

from recovery.rewind import LogProgress
from snapshot.lineage import OperatorLineage, resolve
from snapshot.log import CommitLog
from snapshot.record import Manifest
from snapshot.storage.base import ObjectStore
from snapshot.storage.open import open_store, probe
from statebackend import system
from statebackend.errors import MaxParallelismChangedError, ParallelismError, SettingError

__all__ = ["Job", "live_lineages"]


def _named_operators(manifests: list[Manifest]) -> dict[str, int] | None:
    """The operators (and their first epochs) of the run that wrote last."""
    named = [m.settings["operators"] for m in manifests if "operators" in m.settings]
    return named[-1] if named else None


def live_lineages(manifests: list[Manifest]) -> dict[str, OperatorLineage]:
    """The lineages of a log, without operators that the last run no longer had."""
    named = _named_operators(manifests)
    return {
        uid: lineage
        for uid, lineage in resolve(manifests).items()
        if named is None or named.get(uid) == lineage.first_epoch
    }


class Job:
    """A named job under a URI; opened (and the store probed) when it is first asked for anything.

    Args:
        uri: the folder of all jobs. name: this one.
    """

    def __init__(self, uri: str, name: str) -> None:
        if not isinstance(uri, str) or not uri:
            raise SettingError(f"The uri is {uri!r}.", todo="Give a file:/// URI.")
        if uri.startswith("memory:"):
            raise SettingError(
                f"The uri {uri!r} is in one process's memory, which executors do not share.",
                todo="Give a file:/// URI.",
            )
        if not isinstance(name, str) or not name.strip("."):
            raise SettingError(f"The job's name is {name!r}.", todo="Give job= a name.")
        self.uri, self.name = uri, name
        self.store_uri = f"{uri.rstrip('/')}/{quote(name, safe='')}"
        # Jobs of one name in two stores must not meet in a host's local directory.
        # By the URI as the store has it: /path and file:///path are one place.
        store = open_store(self.store_uri, new_id=system.new_id)  # refuses what cannot be a URI
        self.local_name = f"{name}-{blake3(store.uri.encode()).hexdigest()[:12]}"
        self._store: ObjectStore | None = None

    @property
    def store(self) -> ObjectStore:
        """The job's folder.

        Raises:
            StoreUnreachableError, StoreCapabilityError: it cannot be used, and why.
        """
        if self._store is None:
            store = open_store(self.store_uri, new_id=system.new_id)
            probe(store, new_id=system.new_id)
            self._store = store
        return self._store

    def log(self) -> CommitLog:
        """The job's commit log, to be read or claimed by this driver."""
        return CommitLog(
            self.store, job=self.name, writer=system.process_name(), new_id=system.new_id
        )

    def manifests(self) -> list[Manifest]:
        """What the log holds now."""
        return self.log().manifests()

    def lineages(self) -> dict[str, OperatorLineage]:
        """Every operator's lineage as the log has it now."""
        return live_lineages(self.manifests())

    def progress(self, manifests: list[Manifest]) -> LogProgress:
        """How far the log goes, for the decision at start."""
        ids = [m.query_id for m in manifests if m.query_id]
        lineages = live_lineages(manifests)
        last_epochs = {uid: one.last_epoch for uid, one in lineages.items()}
        newest = max(
            (one.epochs[one.last_epoch] for one in lineages.values() if one.epochs),
            key=lambda entry: entry.sequence,
            default=None,
        )
        for uid, one in lineages.items():
            entry = one.epochs.get(one.last_epoch)
            if entry and newest and entry.epoch == newest.epoch and entry.run != newest.run:
                # Another run had finished it; the one that repeated the epoch did not.
                last_epochs[uid] = entry.epoch - 1
        for uid, first_epoch in (_named_operators(manifests) or {}).items():
            last_epochs.setdefault(uid, first_epoch - 1)
        return LogProgress(
            job=self.name,
            uri=self.uri,
            query_id=ids[-1] if ids else None,
            last_epochs=last_epochs,
        )

    def check_parallelism(
        self, known: OperatorLineage, parallelism: int, max_parallelism: int
    ) -> None:
        """Refuse what the checkpoint does not allow.

        Raises:
            MaxParallelismChangedError, ParallelismError: naming both.
        """
        if known.max_parallelism != max_parallelism:
            raise MaxParallelismChangedError(
                f"Job {self.name!r} has max_parallelism {known.max_parallelism}, but "
                f"{max_parallelism} was asked for; it is fixed for the job's life.",
                todo=f"Give max_parallelism={known.max_parallelism}, or leave it out.",
            )
        if known.parallelism != parallelism:
            raise ParallelismError(
                f"Job {self.name!r} was run with parallelism {known.parallelism}, but "
                f"{parallelism} was asked for; this release does not rescale.",
                todo=f"Give parallelism={known.parallelism}, or leave it out.",
            )
