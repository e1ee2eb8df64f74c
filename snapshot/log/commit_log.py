"""The commit log: which checkpoints count, and who may add to them.

The log is a row of numbered slots in an object store. What a driver may do rests on one operation,
create-if-absent on the next slot, and on reading a slot back when the answer is not clear. The
decision what an answer means is `judge`, a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from snapshot.formats.record import (
    LOG_PREFIX,
    Manifest,
    Record,
    encode_record,
    parse_record_name,
    place,
    read_manifest,
    read_record,
    record_name,
)
from snapshot.log.record_cache import RecordCache
from snapshot.log.stale_listings import check_listed, has_grown
from snapshot.protocol.tenure import NoPatience, Patience, Tenure, Verdict, judge
from snapshot.storage.object_store import CreateOutcome, ObjectInfo, ObjectStore
from statebackend.errors import (
    CommitUnknownError,
    CorruptionError,
    FencedError,
    FormatError,
    ObjectNotFoundError,
    SettingError,
    StateBackendError,
    StoreUnreachableError,
)
from statebackend.threads import THREADS, Threads

__all__ = ["CommitLog", "NoPatience", "Patience", "RecordCache", "Tenure", "Verdict", "judge"]

T = TypeVar("T")
CLAIM_ATTEMPTS = 100
READ_ATTEMPTS = 10
WHOLE_BYTES = 1 << 20  # a record up to this size is read whole at once


class CommitLog:
    """The log of one job, in a store that is the job's own folder.

    Invariants, and who keeps them:

    1. A slot is written at most once: every write is a create-if-absent (`_write`).
    2. Slots are taken in order, without a gap from any record's `oldest_needed` to it: a claim
       goes to tip + 1, an append to the slot after the tenure's last (`append`, under a lock).
    3. The record with the highest sequence is never deleted, and neither is any claim record, nor
       anything at or above the tip's `oldest_needed`, which never falls (retention keeps the
       former, `append` the latter; this class deletes nothing). So the slot that a fenced driver
       would take next stays taken.
    4. A tenure starts only if its claim is at or above the `oldest_needed` of the tip *as listed
       after the claim was written*. A claimer that slept between reading the tip and writing may
       find a slot that retention has freed meanwhile, far below the tip: such a claim fences
       nobody, so it is void and the claimer tries again (`_is_live`).
    5. After a commit whose outcome is unknown, and after being fenced, a tenure appends nothing
       more: a late write can then only be its last one, which a successor sees or shuts out.
    6. Generations never fall along the log, and one generation has one writer.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        job: str,
        writer: str,
        new_id: Callable[[], str],
        patience: Patience | None = None,
        read_all: Callable[..., Iterable[Manifest]] = map,
        cache: RecordCache | None = None,
        threads: Threads = THREADS,
    ) -> None:
        """Open, without a request.

        Args:
            store: with create-if-absent (see `snapshot.storage.store_probe`).
            job: the job's name; a record of another job is refused.
            writer: this driver, for people (host, process, start).
            new_id: gives an id that is unique over all drivers on every call.
            patience: how a commit waits for a store that is down; without it, not at all.
            read_all: as ``map``, perhaps from several threads.
            cache: of records that were read; may be shared by logs of one job.
        """
        self._store = store
        self._job = job
        self._writer = writer
        self._new_id = new_id
        self._patience: Patience = patience or NoPatience()
        self._read_all = read_all
        self._threads = threads
        self._cache = cache or RecordCache(threads)
        self._listed: dict[int, ObjectInfo] = {}  # as of the last listing
        # What a driver's own log is known to hold, from the tip's oldest_needed on.
        self._live: dict[int, Manifest] = {}
        self._live_lock = threads.lock()

    # --- reading -----------------------------------------------------------------------------

    def sequences(self) -> list[int]:
        """Every sequence that is in the store, ascending; one listing.

        Old claim records and what retention has not yet deleted are among them.
        """
        found = {parse_record_name(info.name): info for info in self._store.list(LOG_PREFIX)}
        self._listed = {s: info for s, info in found.items() if s is not None}
        return sorted(self._listed)

    def manifests(self, listed: Sequence[int] | None = None) -> list[Manifest]:
        """The records that are needed, ascending: from the newest's `oldest_needed` to it.

        One listing, and one request (two for a large one) per record that was not read before.
        Empty for a new log.

        Args:
            listed: a listing that was made a moment ago (`Tenure.listed`), to save one.

        Raises:
            CorruptionError: a gap in that range, or a damaged or foreign record.
            StoreCapabilityError: the gap is in an old listing only.
            UnsupportedFormatError: a record of a later format.
            StoreUnreachableError: a failure that may pass: never taken for an absence.
        """
        before, gap = -1, ""
        for _ in range(READ_ATTEMPTS):
            present = listed or self.sequences()
            listed = None
            if not present:
                return []
            newest = present[-1]
            if newest == before and not has_grown(newest, self.read, self.sequences):
                raise self._corrupt(newest, gap)
            try:
                return self._needed(newest, frozenset(present))
            except ObjectNotFoundError as error:
                # Only a gap if there is no newer record, which would allow what was deleted.
                before, gap = newest, error.what
        raise StoreUnreachableError(
            f"The log in {self._store.uri} grew {READ_ATTEMPTS} times while it was read.",
            todo="Try again.",
        )

    def read(self, sequence: int) -> Manifest:
        """One record's manifest, checked to be this job's and of this slot.

        Raises:
            CorruptionError, UnsupportedFormatError, ObjectNotFoundError, StoreUnreachableError
        """
        name = record_name(sequence)
        manifest = _once_more(lambda: read_manifest(self._store, name))
        self._check(sequence, manifest)
        return manifest

    def _check(self, sequence: int, manifest: Manifest) -> None:
        if manifest.sequence != sequence:
            raise self._corrupt(sequence, f"it says that it is number {manifest.sequence}")
        if manifest.job != self._job:
            raise self._corrupt(sequence, f"it belongs to the job {manifest.job!r}")

    def live(self) -> list[Manifest]:
        """The records that are needed, as far as this log knows: after `manifests` and `append`.

        For a driver: nobody else appends to its log. Whoever only looks has a log of his own.
        """
        with self._live_lock:
            return [self._live[sequence] for sequence in sorted(self._live)]

    def known(self, sequence: int) -> Manifest:
        """A record that :meth:`live` has."""
        with self._live_lock:
            return self._live[sequence]

    def _remember(self, found: Sequence[Manifest]) -> None:
        """Take in what was read or written; what the newest of all still needs is never lost."""
        with self._live_lock:
            known = {**self._live, **{manifest.sequence: manifest for manifest in found}}
            oldest_needed = known[max(known)].oldest_needed
            self._live = {s: m for s, m in known.items() if s >= oldest_needed}

    def take_records(self) -> dict[int, Record]:
        """Whole records that `manifests` came by, by sequence; they are kept no longer."""
        return self._cache.take_records()

    def _known(self, sequence: int) -> Manifest:
        listed = self._listed.get(sequence)
        manifest = self._cache.get(sequence, listed)
        if manifest is None:
            name = record_name(sequence)
            manifest, record = _once_more(lambda: read_record(self._store, name, WHOLE_BYTES))
            self._check(sequence, manifest)
            if listed is not None:
                self._cache.add(listed, manifest, record)
        return manifest

    def _needed(self, newest: int, present: frozenset[int]) -> list[Manifest]:
        tip = self._known(newest)
        wanted = range(tip.oldest_needed, newest)
        missing = [sequence for sequence in wanted if sequence not in present]
        if missing:
            raise ObjectNotFoundError(
                f"it needs records from {tip.oldest_needed} on, but {missing[:5]} are not there"
            )
        chain = [*self._read_all(self._known, wanted), tip]
        self._cache.trim(tip.oldest_needed)
        self._remember(chain)
        for older, newer in pairwise(chain):
            if older.job_id != newer.job_id or older.generation > newer.generation:
                raise self._corrupt(
                    newer.sequence,
                    f"it is of job {newer.job_id!r}, generation {newer.generation}, after "
                    f"{older.job_id!r}, generation {older.generation}",
                )
        return chain

    # --- writing -----------------------------------------------------------------------------

    def claim(
        self,
        *,
        query_id: str = "",
        run: str = "",
        stamp_ms: int = -1,
        max_parallelism: int = 0,
        settings: dict[str, Any] | None = None,
        job_id: str = "",
        after: int | None = None,
    ) -> Tenure:
        """Take over the job: from here on every older tenure's next append is fenced.

        Two listings, a create, and a read if the tip was not read before; more when others claim
        at the same time. Durable on return. Safe to repeat after an error: what may have been left
        behind is a claim record of nobody's, which fences older tenures and is harmless otherwise.

        Args:
            job_id: what a new job gets, of another one whose state it begins with; else its own.
            after: the last sequence that the caller knows of (-1: none); the claim comes right
                after it, or not at all.

        Raises:
            FencedError: with ``after``: the log has grown since.
            StoreUnreachableError: the store failed, or the slot was lost 100 times in a row.
            CorruptionError, UnsupportedFormatError: the tip cannot be read, so nothing is known.
        """
        for _ in range(CLAIM_ATTEMPTS):
            present = self.sequences()
            if after is not None and after != (present[-1] if present else -1):
                raise self._grown(after)
            try:
                tip = self._known(present[-1]) if present else None
            except ObjectNotFoundError:  # replaced by a newer tip since the listing
                continue
            manifest = Manifest(
                kind="claim",
                job=self._job,
                job_id=tip.job_id if tip else job_id or self._new_id(),
                generation=tip.generation + 1 if tip else 1,
                sequence=tip.sequence + 1 if tip else 0,
                writer=self._writer,
                write_id=self._new_id(),
                oldest_needed=tip.oldest_needed if tip else 0,
                cleaned_below=tip.cleaned_below if tip else 0,
                query_id=query_id,
                run=run,
                stamp_ms=stamp_ms,
                max_parallelism=max_parallelism,
                settings=settings or {},
            )
            listed = self._claimed(manifest)
            if listed:
                self._remember([manifest])
                return Tenure.of(manifest, listed, self._threads)
        raise StoreUnreachableError(
            f"The log in {self._store.uri} could not be claimed: {CLAIM_ATTEMPTS} times another "
            "writer took the slot first.",
            todo="Stop the other drivers of this job.",
        )

    def _grown(self, after: int) -> FencedError:
        return FencedError(
            f"The log in {self._store.uri} has grown after number {after}: another driver has "
            f"claimed the job, or a write of an earlier one came late.",
            todo="Let one driver start the job, then start this one again.",
        )

    def append(
        self, tenure: Tenure, manifest: Manifest, bodies: Sequence[bytes | None] = ()
    ) -> int:
        """Commit one checkpoint; its sequence. One request, serial, durable on return.

        Args:
            tenure: from `claim` of this log.
            manifest: kind `checkpoint`. Job, job id, generation, sequence, writer and write id are
                filled in here; `oldest_needed` is the caller's, from `tenure.oldest_needed` to
                `tenure.next_sequence`.
            bodies: as for `encode_record`.

        Raises:
            FencedError: another driver has taken over. Final for this tenure.
            CommitUnknownError: it may or may not have happened. Final for this tenure: stop, and
                let a new claim find out.
            SettingError, CorruptionError: the manifest or a body is not right; nothing was sent.
        """
        if manifest.kind != "checkpoint":
            raise SettingError(f"A record of kind {manifest.kind!r} cannot be appended.")
        with tenure._lock:
            if tenure._ended is not None:
                raise _again(tenure._ended)
            if manifest.oldest_needed < tenure.oldest_needed:
                raise SettingError(
                    f"The oldest sequence needed cannot fall from {tenure.oldest_needed} to "
                    f"{manifest.oldest_needed}: what is below may be deleted already."
                )
            filled = msgspec.structs.replace(
                manifest,
                job=self._job,
                job_id=tenure.job_id,
                generation=tenure.generation,
                sequence=tenure._next,
                writer=self._writer,
                write_id=self._new_id(),
                cleaned_below=min(tenure.cleaned_below, manifest.oldest_needed),
            )
            parts = encode_record(filled, bodies)
            filled = place(filled, bodies)
            # In doubt until proven otherwise, whatever is raised between here and the verdict.
            tenure._ended = self._unknown(filled, "it was interrupted.")
            ended = self._commit(filled, parts)
            if ended is not None:
                tenure._ended = _again(ended)
                raise ended
            tenure._ended = None
            tenure._next += 1
            tenure.oldest_needed = filled.oldest_needed
            self._remember([filled])
            return filled.sequence

    def _commit(self, manifest: Manifest, parts: Sequence[bytes]) -> StateBackendError | None:
        """One append, judged: None if committed, else the error that ends the tenure.

        While the store is down the same write is tried again, with the same write id: whichever of
        the tries lands, and however late, it is this record, and no other can take the slot.
        """
        attempt = 0
        while True:
            verdict, found, failure = self._write(manifest, parts)
            if verdict is not Verdict.UNKNOWN or isinstance(failure, FormatError):
                break
            attempt += 1
            error = failure or self._unknown(manifest, "the slot reads as empty.")
            if not self._patience.wait(attempt, error):
                break
        if verdict is Verdict.COMMITTED:
            return None
        if verdict is Verdict.FENCED and found is not None:
            error = self._fenced(manifest, found)
        else:
            error = self._unknown(manifest, str(failure or "the slot reads as empty."))
        error.__cause__ = failure
        return error

    def _claimed(self, manifest: Manifest) -> list[int]:
        """The listing after the claim, if it was made and counts; else nothing."""
        verdict, _, failure = self._write(manifest, encode_record(manifest))
        if verdict is Verdict.UNKNOWN and isinstance(failure, StoreUnreachableError):
            raise failure
        if verdict is not Verdict.COMMITTED:
            return []
        listing = self._live_listing(manifest.sequence)
        if (own := self._listed.get(manifest.sequence)) is not None:
            self._cache.add(own, manifest, None)
        return listing

    def _live_listing(self, sequence: int) -> list[int]:
        """Invariant 4: the log as listed now, if a claim just written shuts older tenures out."""
        for _ in range(READ_ATTEMPTS):
            listed = self.sequences()
            newest = max(listed, default=-1)
            check_listed(newest, sequence)
            if newest == sequence:
                return listed
            try:
                return listed if self.read(newest).oldest_needed <= sequence else []
            except ObjectNotFoundError:  # the tip has moved on, and this one is already deleted
                continue
        return []

    def _write(
        self, manifest: Manifest, parts: Sequence[bytes]
    ) -> tuple[Verdict, Manifest | None, StateBackendError | None]:
        """Create the slot and judge the answer: verdict, what stands there, what went wrong."""
        failure: StateBackendError | None = None
        outcome: CreateOutcome | None = None
        found: Manifest | None = None
        try:
            outcome = self._store.create(record_name(manifest.sequence), parts)
        except StoreUnreachableError as error:
            failure = error
        if outcome is not CreateOutcome.CREATED:
            try:
                found = self.read(manifest.sequence)
            except (ObjectNotFoundError, StoreUnreachableError, FormatError) as error:
                failure = failure or error
        write_id = None if found is None else found.write_id
        return judge(outcome, write_id, manifest.write_id), found, failure

    # --- errors ------------------------------------------------------------------------------

    def _fenced(self, own: Manifest, other: Manifest) -> FencedError:
        return FencedError(
            f"The job {self._job!r} in {self._store.uri} was taken over by the writer "
            f"{other.writer!r} (generation {other.generation}), which holds record "
            f"{own.sequence}; this is {own.writer!r} (generation {own.generation}).",
            todo="Stop this driver; its epoch was not committed.",
        )

    def _unknown(self, own: Manifest, reason: str) -> CommitUnknownError:
        return CommitUnknownError(
            f"Whether record {own.sequence} of the job {self._job!r} in {self._store.uri} was "
            f"committed is not known: {reason}",
            todo="Stop this driver and start again: the next claim settles it.",
        )

    def _corrupt(self, sequence: int, reason: str) -> CorruptionError:
        return CorruptionError(
            f"The record {record_name(sequence)!r} in {self._store.uri} is wrong: {reason}.",
            todo="Restore it from another copy.",
        )


def _once_more(read: Callable[[], T]) -> T:
    """What was read; once more if it is damaged: it may have been on its way here."""
    try:
        return read()
    except CorruptionError:
        return read()


def _again(error: StateBackendError) -> StateBackendError:
    """The same error anew: a kept traceback would keep the frames, and so the bodies, alive."""
    return type(error)(error.what, todo=error.todo)
