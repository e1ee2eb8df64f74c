"""A savepoint that takes too long: it ends near its time, says why, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from recovery.savepoints.create_savepoint import create_savepoint
from recovery.savepoints.location_files import StoreLocation
from snapshot.storage.deadline import Deadline, DeadlineStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.passing_store import PassingStore
from statebackend.errors import CorruptionError, StoreUnreachableError
from statebackend.threads import Pool, _RealThreads
from tests.cli.folder import new_id
from tests.recovery.savepoints.saved_jobs import Location, Stand, log_of
from tests.support.slow_store import SlowStore

TIMEOUT_S, GRACE_S = 30.0, 10.0


class Now:
    """Time that passes while somebody waits."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.time_s

    def sleep_s(self, seconds: float) -> None:
        with self._lock:
            self.time_s += seconds


class OneAtATime(_RealThreads):
    """Calls one after another, so that no call's time is counted as another's."""

    def pool(self, workers: int, name: str) -> Pool:
        return super().pool(1, name)


class Hanging(PassingStore):
    """Some calls get no answer; like S3's, they give up when they were told to."""

    own_timeout_s = 60.0

    def __init__(self, inner: Any, now: Now, hangs: Callable[[str, str], bool]) -> None:
        super().__init__(inner)
        self.now, self.hangs = now, hangs
        self._thread = threading.local()

    @contextmanager
    def limited(self, deadline_s: float) -> Iterator[None]:
        self._thread.limit_s = min(deadline_s, self.own_timeout_s)
        yield
        del self._thread.limit_s

    def _around(self, verb: str, name: str, sent: int, call: Any, received: Any) -> Any:
        self._hang(verb, name)
        return call()

    def _stream(self, name: str, start: Any) -> Any:
        self._hang("get_chunks", name)
        yield from start()

    def _hang(self, verb: str, name: str) -> None:
        if self.hangs(verb, name):
            self.now.sleep_s(getattr(self._thread, "limit_s", self.own_timeout_s))
            raise StoreUnreachableError(f"No answer to {verb} {name!r}.")


class Timed:
    """A job, and a savepoint of it that has `TIMEOUT_S`."""

    def __init__(self) -> None:
        self.now = Now()
        self.stand = Stand().run(2, base="files").run(12, own=True)
        self.target = MemoryStore(new_id())

    def save(self, job: Any = None, target: Any = None) -> None:
        deadline = Deadline("The savepoint of job 'clicks'", TIMEOUT_S, now_s=self.now)
        store = DeadlineStore(job or self.stand.folder.store, deadline)
        place = DeadlineStore(target or self.target, deadline)
        making = self.stand.making(
            store=store,
            manifests=lambda: log_of(store).manifests(),
            open_target=lambda _: place,
            cleaning=lambda: deadline.cleaning(GRACE_S),
            threads=OneAtATime(),
        )
        with deadline.telling():
            create_savepoint(making)

    def slow(self, store: Any, latency_s: float) -> SlowStore:
        return SlowStore(store, sleep_s=self.now.sleep_s, latency_s=latency_s)


@pytest.mark.parametrize("latency_s", [0.7, 2.0, 5.0])
@pytest.mark.parametrize("where", ["job", "target"])
def test_a_store_that_is_too_slow_ends_it_near_its_time(where: str, latency_s: float) -> None:
    timed = Timed()
    inner = timed.stand.folder.store if where == "job" else timed.target
    with pytest.raises(StoreUnreachableError) as raised:
        timed.save(**{where: timed.slow(inner, latency_s)})
    said = str(raised.value)
    assert "of job 'clicks' was not finished after 30 s: it was waiting for the" in said
    assert inner.uri in said
    assert TIMEOUT_S <= timed.now() <= TIMEOUT_S + GRACE_S + 2 * latency_s
    if latency_s < 2.0 or where == "job":
        assert not timed.target.list("")  # what was copied is gone, if the store lets it


def test_a_store_that_is_quick_enough_is_given_all_its_time() -> None:
    timed = Timed()
    timed.save(target=timed.slow(timed.target, 0.1))
    assert 1.0 < timed.now() < TIMEOUT_S
    assert timed.target.list("")


@pytest.mark.parametrize(
    ("where", "verb", "folder"),
    [
        ("job", "get_chunks", "data/"),
        ("job", "get_chunks", "base/"),
        ("job", "get_tail", "log/"),
        ("job", "get", "log/"),
        ("job", "list", "log/"),
        ("target", "put", "data/"),
        ("target", "create", "log/"),
        ("target", "put", "savepoint.json"),
    ],
)
def test_a_call_that_hangs_ends_it_at_its_time(where: str, verb: str, folder: str) -> None:
    timed = Timed()
    inner = timed.stand.folder.store if where == "job" else timed.target
    met: list[str] = []

    def hangs(call: str, name: str) -> bool:
        here = call == verb and name.startswith(folder)
        met.extend([name] if here else [])
        return here

    with pytest.raises(StoreUnreachableError) as raised:
        timed.save(**{where: Hanging(inner, timed.now, hangs)})
    if not met:
        pytest.fail("this call is never made")
    assert f"waiting for the {verb} of '{folder}" in str(raised.value)
    assert "after 30 s" in str(raised.value)
    assert TIMEOUT_S <= timed.now() <= TIMEOUT_S + GRACE_S
    assert not timed.target.list("")


def test_what_fails_for_another_reason_says_that() -> None:
    timed = Timed()
    for info in timed.stand.folder.store.list("base/"):
        timed.stand.folder.store.put(info.name, [b"damaged"])
    with pytest.raises(CorruptionError):
        timed.save()
    timed = Timed()

    def refused(call: str, name: str) -> bool:
        if call == "get_chunks":
            raise StoreUnreachableError("no way to it")
        return False

    with pytest.raises(StoreUnreachableError, match="no way to it"):
        timed.save(Hanging(timed.stand.folder.store, timed.now, refused))


def test_a_checkpoint_location_that_is_too_slow_ends_it_too() -> None:
    timed = Timed()
    deadline = Deadline("It", TIMEOUT_S, now_s=timed.now)
    timed.now.sleep_s(TIMEOUT_S)
    location = StoreLocation(DeadlineStore(Location().store, deadline))
    with pytest.raises(StoreUnreachableError, match="It was not finished after 30 s"):
        location.list("offsets")
