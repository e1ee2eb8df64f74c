"""Object stores that are slow, refuse, are away, lose or damage what they are told or tell.

On S3 by the proxy in front of the server; what a store in a folder can suffer, by the preloaded
library.
"""

from __future__ import annotations

import contextlib
import random as random_numbers
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from recovery.drill.driver.driver_messages import Event
from recovery.drill.faults.drill_fault import DrillFault, Need
from recovery.drill.faults.shim import shim_of
from recovery.drill.faults.stage import CannotStrikeError, Stage
from recovery.drill.faults.waits import until_met, until_or_end
from recovery.drill.proxy.fault_plan import Calm, Chance, Facts, Fault, FaultPlan, Weather
from recovery.drill.proxy.fault_proxy import FaultProxy
from recovery.drill.proxy.s3_requests import WRITES, Verb

__all__ = ["FAULTS", "planned", "proxy_of", "store_down"]

LASTS_S: Final = 5.0
DOWN_S: Final = 10.0
_LATENCY_S: Final = 0.3
_BYTES_PER_S: Final = 256 * 1024
_WAIT_S: Final = 240.0
_HTTP_TIMEOUT_S: Final = 20.0
_FOOTER_BYTES: Final = 40  # less than a record's, so that it is struck in any version
_DAMAGED: Final = "SB3001"
# A task whose object cannot be written in time fails, and is repeated until the store is back.
_PATIENT: Final = {"spark.task.maxFailures": "1000"}


def proxy_of(stage: Stage) -> FaultProxy:
    """The proxy before the store. Raises `CannotStrikeError` on files."""
    if stage.proxy is None:
        raise CannotStrikeError("the job's durable copies are not on S3")
    return stage.proxy


@contextlib.contextmanager
def planned(proxy: FaultProxy, plan: FaultPlan) -> Iterator[None]:
    """Requests that arrive inside meet this plan."""
    proxy.plan = plan
    try:
        yield
    finally:
        proxy.plan = Calm()


class OncePerKey:
    """A fault for the first such request of each key; the next one of that key passes.

    So whoever asks again is helped, however many ask at once.
    """

    def __init__(self, fault: Fault, verbs: frozenset[Verb]) -> None:
        self._fault, self._verbs = fault, verbs
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def decide(self, facts: Facts, *, seed: int) -> Fault | None:
        """The fault, where this key has not had it."""
        with self._lock:
            if facts.verb not in self._verbs or facts.key in self._seen:
                return None
            self._seen.add(facts.key)
            return self._fault


def _slow(stage: Stage, rng: random_numbers.Random) -> str:
    proxy = proxy_of(stage)
    proxy.set_pace(latency_s=_LATENCY_S, bytes_per_s=_BYTES_PER_S)
    before = proxy.count().requests
    try:
        stage.pause(LASTS_S)
        until_met(stage, lambda: proxy.count().requests > before, "a request to the store")
    finally:
        proxy.set_pace()
    return f"{_LATENCY_S:g} s before each request, {_BYTES_PER_S >> 10} KiB/s, for {LASTS_S:g} s"


def _stormy(fault: Fault, share: float, what: str) -> Callable[[Stage, random_numbers.Random], str]:
    """A share of all requests suffers a fault for a while."""

    def strike(stage: Stage, rng: random_numbers.Random) -> str:
        proxy = proxy_of(stage)
        before = proxy.count().faulted
        with planned(proxy, Weather(Chance(fault=fault, share=share))):
            stage.pause(LASTS_S)
            _until_faulted(stage, proxy, before)
        return f"{what}, {proxy.count().faulted - before} in all"

    return strike


def _until_faulted(stage: Stage, proxy: FaultProxy, before: int) -> None:
    until_met(stage, lambda: proxy.count().faulted > before, "a request that suffers it")


def _corrupt(stage: Stage, rng: random_numbers.Random) -> str:
    """Whatever a new driver and its workers read first, they read with a flipped bit."""
    proxy = proxy_of(stage)
    fraction = rng.random()
    before = proxy.count().faulted
    with planned(proxy, OncePerKey(Fault.corrupt_response(fraction), frozenset({Verb.GET}))):
        stage.drivers.kill()
        for host in stage.hosts:  # so that state is read from the store
            _remove_copies(host.local_dir)
        stage.drivers.start()
        last = stage.committed()
        # A job at the end of its input has no further epoch, but its driver has read the log.
        stage.until(
            lambda: stage.committed() > last or stage.has_read_all(),
            f"epoch {last + 1}, or the end of the input",
            _WAIT_S,
        )
    struck = proxy.count().faulted - before
    if not struck:
        raise CannotStrikeError("the new driver and its workers read nothing from the store")
    return f"the first read of each of {struck} objects"


def _remove_copies(local_dir: Path) -> None:
    for path in local_dir.glob("*/*/*/current"):
        path.unlink(missing_ok=True)


def store_down(seconds: float = DOWN_S) -> DrillFault:
    """The fault `store-down`, for as long as is said."""

    def strike(stage: Stage, rng: random_numbers.Random) -> str:
        proxy = proxy_of(stage)
        before = proxy.count().faulted
        proxy.go_down()
        try:
            stage.pause(seconds)
            _until_faulted(stage, proxy, before)
        finally:
            proxy.come_up()
        return f"{proxy.count().faulted - before} requests, for {seconds:g} s or longer"

    return DrillFault(
        name="store-down",
        summary="The object store answers nobody for some seconds.",
        promise="Batches wait for it and are late, and results are exact; beyond commit_timeout_s "
        "the query fails, and its restart is exact.",
        strike=strike,
        needs=frozenset({"s3"}),
        conf=_PATIENT,
    )


def _refuse_folder(stage: Stage, rng: random_numbers.Random) -> str:
    """The disk behind a store in a folder is full, cannot be written, or cannot be synced."""
    if stage.store is None:
        raise CannotStrikeError("the job's durable copies are not in a folder")
    shim = shim_of(stage)
    what = rng.choice(["full", "read-only", "syncs fail"])
    turn_on = {"full": shim.fill_disk, "read-only": shim.forbid_writes}.get(what, shim.fail_syncs)
    with shim.calm_afterwards():
        shim.forget_refusals()
        turn_on(stage.store)
        stage.pause(LASTS_S)
        until_met(stage, shim.refused, "anybody whom it was refused")
    return f"{what}, for {LASTS_S:g} s or longer"


# --- the newest record ------------------------------------------------------------------------


def _damage_newest(stage: Stage, rng: random_numbers.Random) -> str:
    """Damage the newest record while no driver runs; a start must refuse; bring it back."""
    until_or_end(stage, lambda: stage.committed() >= 1, "two epochs", _WAIT_S)
    stage.drivers.kill()
    record = _NewestRecord(stage)
    whole = record.read()
    # In its footer, which every reader of the log reads: of what is packed before it, a flipped
    # bit does no harm as long as a local copy makes it unnecessary.
    at = len(whole) - 1 - rng.randrange(_FOOTER_BYTES)
    flipped = bytearray(whole)
    flipped[at] ^= 1 << rng.randrange(8)
    known = _refusals(stage, record.name)
    record.write(rng.choice([bytes(flipped), whole[:at]]))
    try:
        stage.drivers.start()
        stage.until(
            lambda: len(_refusals(stage, record.name)) > len(known),
            f"the refusal of the damaged record {record.name}",
            _WAIT_S,
        )
    finally:
        record.write(whole)
    stage.drivers.start()
    return f"{record.name}: refused, then brought back"


def _refusals(stage: Stage, record: str) -> list[str]:
    """What drivers ended with that name a damaged record, as their events say."""
    found = []
    for path in (stage.root / "drivers").glob("*.events"):
        for line in path.read_bytes().splitlines():
            event = msgspec.json.decode(line, type=Event)
            if event.kind == "failed" and _DAMAGED in event.error and record in event.error:
                found.append(event.error)
    return found


class _NewestRecord:
    """The last object of the log, wherever it is."""

    def __init__(self, stage: Stage) -> None:
        self._path: Path | None = None
        if stage.store is not None:
            self._path = max((stage.store / "log").glob("*.ckpt"))
            self.name = self._path.name
        else:
            proxy = proxy_of(stage)
            keys = [r.key for r in proxy.requests() if r.group == "log/" and r.verb in WRITES]
            self._url = f"{proxy.url}/{urlsplit(stage.uri).netloc}/{max(keys)}"
            self.name = max(keys).rpartition("/")[2]

    def read(self) -> bytes:
        """Its bytes. Raises `CannotStrikeError` where only the job may read it."""
        if self._path is not None:
            return self._path.read_bytes()
        try:
            with urllib.request.urlopen(self._url, timeout=_HTTP_TIMEOUT_S) as answer:
                data: bytes = answer.read()
        except OSError as error:
            raise CannotStrikeError(f"the store does not let a drill read ({error})") from None
        return data

    def write(self, data: bytes) -> None:
        """Put other bytes in its place, whole at once."""
        if self._path is not None:
            draft = self._path.with_name(f".{self.name}")
            draft.write_bytes(data)
            draft.replace(self._path)
            return
        request = urllib.request.Request(self._url, data=data, method="PUT")
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S):
            pass


_ON_S3: Final = frozenset[Need]({"s3"})

FAULTS: tuple[DrillFault, ...] = (
    DrillFault(
        name="store-slow",
        summary="Every request to the object store takes longer, and its bytes come slowly.",
        promise="It costs time only.",
        strike=_slow,
        needs=_ON_S3,
    ),
    DrillFault(
        name="store-throttled",
        summary="The object store refuses most requests with 503 SlowDown for some seconds.",
        promise="They are tried again with pauses, and results are exact.",
        strike=_stormy(Fault.refuse(503, "SlowDown"), 0.7, "7 of 10 requests"),
        needs=_ON_S3,
        conf=_PATIENT,
    ),
    store_down(),
    DrillFault(
        name="answers-lost",
        summary="The object store does what it is asked, but a third of its answers is lost.",
        promise="A write whose answer was lost is read back and counts once; results are exact.",
        strike=_stormy(Fault.lose_answer(), 0.33, "a third of all answers"),
        needs=_ON_S3,
        conf=_PATIENT,
    ),
    DrillFault(
        name="answers-corrupted",
        summary="A new driver and workers without local copies get every object with a flipped bit "
        "when they first ask for it.",
        promise="Every flipped bit is noticed, the object is read once more, and results are "
        "exact.",
        strike=_corrupt,
        needs=_ON_S3,
    ),
    DrillFault(
        name="credentials-expired",
        summary="The object store takes the credentials for expired for some seconds.",
        promise="They are taken anew from the chain; commits wait, attempts are repeated, and "
        "results are exact.",
        strike=_stormy(Fault.expired_token(), 1.0, "all requests"),
        needs=_ON_S3,
        conf=_PATIENT,
    ),
    DrillFault(
        name="newest-record-damaged",
        summary="The newest record of the commit log is damaged while no driver runs.",
        promise="The start is refused with SB3001, which names the record; no older state is used "
        "in its place, and once it is back the job goes on exactly.",
        strike=_damage_newest,
    ),
    DrillFault(
        name="store-folder-failing",
        summary="The disk behind a store in a folder is full, read-only or cannot be synced for "
        "some seconds.",
        promise="Commits wait for it, or the query fails with SB4002 and is started again; results "
        "are exact.",
        strike=_refuse_folder,
        needs=frozenset({"compiler"}),
        conf=_PATIENT,
        # A record that was named, but whose folder could not be synced, stays in doubt to the end.
        settings={"commit_timeout_s": 60.0},
    ),
)
