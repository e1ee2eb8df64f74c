"""A store whose listings lag behind its writes: no driver decides anything by such a listing."""

from __future__ import annotations

import itertools

import pytest

from snapshot.formats.record import record_name
from snapshot.log.commit_log import CommitLog
from snapshot.storage import Listing, MemoryStore
from statebackend.errors import CorruptionError, StoreCapabilityError
from statebackend.runtime.driver.job import held_before
from tests.snapshot.logs import checkpoint


class LateStore(MemoryStore):
    """Its listings are those of the moment at which `late` was set."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Listing | None = None

    def list(self, prefix: str) -> Listing:
        listed = super().list(prefix) if self.late is None else self.late
        return [info for info in listed if info.name.startswith(prefix)]


def _log(store: MemoryStore) -> CommitLog:
    ids = itertools.count()
    return CommitLog(store, job="job", writer="w", new_id=lambda: f"{id(ids)}-{next(ids)}")


def test_a_claim_that_its_own_listing_does_not_show_is_refused_at_once() -> None:
    store = LateStore()
    store.late = []
    with pytest.raises(StoreCapabilityError, match=r"ends with record -1, and record 0 had been"):
        _log(store).claim()
    assert len(MemoryStore.list(store, "log/")) == 1


def test_the_job_is_claimed_as_soon_as_the_listing_shows_what_was_written() -> None:
    store = LateStore()
    _log(store).claim()
    store.late = store.list("")
    with pytest.raises(StoreCapabilityError, match=r"ends with record 0, and record 1 had been"):
        _log(store).claim()
    store.late = None
    tenure = _log(store).claim()
    assert (tenure.sequence, tenure.generation) == (2, 3)


def test_a_look_at_the_log_that_is_older_than_the_own_claim_decides_nothing() -> None:
    store = LateStore()
    log = _log(store)
    log.claim()
    before = store.list("")
    tenure = log.claim()
    assert [one.sequence for one in held_before(log, tenure, anew=True)] == [0]
    store.late = before
    with pytest.raises(StoreCapabilityError, match="what else was committed is not known"):
        held_before(log, tenure, anew=True)
    # What was listed right after the claim is as good as it was.
    assert [one.sequence for one in held_before(log, tenure)] == [0]


def test_a_gap_that_is_in_an_old_listing_only_is_no_damage() -> None:
    store = LateStore()
    log = _log(store)
    tenure = log.claim()
    for _ in range(3):
        log.append(tenure, checkpoint())
    store.late = store.list("")
    log.append(tenure, checkpoint(oldest_needed=3))
    store.delete([record_name(1)])
    with pytest.raises(StoreCapabilityError, match=r"ends with record 3, and record 4 had been"):
        _log(store).manifests()
    store.late = None
    assert [one.sequence for one in _log(store).manifests()] == [3, 4]
    store.delete([record_name(3)])
    with pytest.raises(CorruptionError):
        _log(store).manifests()


def test_a_gap_of_a_record_that_was_just_appended_is_looked_at_anew() -> None:
    class Growing(LateStore):
        """Another driver appends once a gap has been seen twice, and lists it at once."""

        looks = 0

        def list(self, prefix: str) -> Listing:
            listed = super().list(prefix)
            self.looks += prefix == "log/"
            if self.looks == 2 and self.late is not None:
                self.late = None
            return listed

    store = Growing()
    log = _log(store)
    tenure = log.claim()
    for _ in range(3):
        log.append(tenure, checkpoint())
    store.late = store.list("")
    log.append(tenure, checkpoint(oldest_needed=3))
    store.delete([record_name(1)])
    store.looks = 0
    assert [one.sequence for one in _log(store).manifests()] == [3, 4]
