"""The object store: one bucket, and what each process sees of it over a bad network.

A request travels, is carried out at one instant, and its answer travels. On the way it may be lost,
its answer may be, it may be carried out twice, or long after its client has given up. A process
that dies takes nothing back: what it sent arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from greenlet import GreenletExit

from snapshot.formats.object_names import parse_base_name
from snapshot.storage.object_store import (
    Buffer,
    Capabilities,
    CreateOutcome,
    Listing,
    ObjectInfo,
    ObjectStore,
)
from statebackend.errors import ObjectNotFoundError, StoreUnreachableError
from tests.sim.clocks import WallClock
from tests.sim.config import Config
from tests.sim.freezes import at_call
from tests.sim.kernel import Process, Scheduler, TimedOutError, current
from tests.sim.listings import Listings
from tests.support.faults import Fault

__all__ = ["Bucket", "SimStore", "Watcher"]


class Watcher(Protocol):
    """A checker that sees every change of the bucket at the instant it happens."""

    def created(self, name: str, data: bytes) -> None:
        """An object that was not there is."""

    def replaced(self, name: str, before: bytes, data: bytes) -> None:
        """An object has other bytes, or was written again."""

    def deleted(self, name: str, data: bytes) -> None:
        """An object is gone."""


class Bucket:
    """Objects, and who watches them."""

    def __init__(self, sched: Scheduler) -> None:
        self.sched = sched
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.watchers: list[Watcher] = []
        self.clock = WallClock()
        self.listings = Listings(sched)
        self.down_until_s = 0.0

    def put(self, name: str, data: bytes) -> None:
        before = self.objects.get(name)
        self.listings.changing(name, self._info(name))
        self.objects[name] = (data, self.clock.wall_ms(self.sched.now_s))
        for watcher in self.watchers:
            if before is None:
                watcher.created(name, data)
            else:
                watcher.replaced(name, before[0], data)

    def create(self, name: str, data: bytes) -> CreateOutcome:
        if name in self.objects:
            return CreateOutcome.EXISTS
        self.put(name, data)
        return CreateOutcome.CREATED

    def get(self, name: str) -> bytes:
        found = self.objects.get(name)
        if found is None:
            raise ObjectNotFoundError(f"There is no object {name!r}.")
        return found[0]

    def list(self, prefix: str) -> Listing:
        return [
            ObjectInfo(name, len(self.objects[name][0]), self.objects[name][1])
            for name in sorted(self.objects)
            if name.startswith(prefix)
        ]

    def _info(self, name: str) -> ObjectInfo | None:
        found = self.objects.get(name)
        return None if found is None else ObjectInfo(name, len(found[0]), found[1])

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.listings.changing(name, self._info(name))
            found = self.objects.pop(name, None)
            if found is not None:
                for watcher in self.watchers:
                    watcher.deleted(name, found[0])


class SimStore(ObjectStore):
    """The bucket, as one process sees it."""

    def __init__(self, bucket: Bucket, process: Process, config: Config) -> None:
        self._bucket, self._process, self._config = bucket, process, config
        self._sched = bucket.sched

    @property
    def uri(self) -> str:
        return f"sim://bucket/{self._process.name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=True, ranged_read=True, streamed=False)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(parts)
        self._request("put", name, lambda: self._bucket.put(name, data))

    def put_file(self, name: str, path: Any) -> None:
        self.put(name, [path.read_bytes()])

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        data = b"".join(parts)
        outcome: CreateOutcome = self._request(
            "create", name, lambda: self._bucket.create(name, data)
        )
        self._sched.note(f"create: {outcome.value}")
        return outcome

    def get(self, name: str) -> bytes:
        data: bytes = self._request("get", name, lambda: self._bucket.get(name))
        return self._read(name, data)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        return self.get(name)[start : start + length]

    def get_tail(self, name: str, length: int) -> tuple[bytes, int]:
        data = self.get(name)
        return data[-length:], len(data)

    def list(self, prefix: str) -> Listing:
        listing: Listing = self._request("list", prefix, lambda: self._listed(prefix))
        return listing

    def _listed(self, prefix: str) -> Listing:
        bucket, lag_s, listed = self._bucket, self._config.listing_lag_s, self._bucket.list(prefix)
        if not lag_s or not isinstance(bucket, Bucket):  # savepoints have places of their own
            return listed
        late = bucket.listings.late(listed, prefix, lag_s)
        if late != listed:
            self._sched.note(Fault.LISTING_LATE, prefix)
        return late

    def delete(self, names: Iterable[str]) -> None:
        wanted = list(names)
        if self._sched.chance(self._config.torn_delete) and len(wanted) > 1:
            # A bulk deletion of which a part was done when the connection went.
            self._sched.note(Fault.TORN_DELETE)
            half = wanted[: self._sched.random.randrange(1, len(wanted))]
            self._request("delete", wanted[0], lambda: self._bucket.delete(half))
            raise self._lost("delete", wanted[0])
        self._request("delete", wanted[0], lambda: self._bucket.delete(wanted))

    def _read(self, name: str, data: bytes) -> bytes:
        """Now and then an answer is damaged on its way; the object is not."""
        config, is_base = self._config, parse_base_name(name) is not None
        if data and self._sched.chance(config.flipped_base if is_base else config.flipped_read):
            self._sched.note(Fault.READ_DAMAGED, name)
            at = self._sched.random.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        return data

    def _lost(self, verb: str, name: str) -> StoreUnreachableError:
        return StoreUnreachableError(f"No answer to {verb} {name!r} came.")

    def _request(self, verb: str, name: str, do: Callable[[], Any]) -> Any:
        sched, config = self._sched, self._config
        if self._process.dead:
            raise GreenletExit
        at_call()
        random = sched.random.random
        go_s, back_s = config.store_s * (0.5 + random()), config.store_s * (0.5 + random())
        fate = None if random() >= config.store_faults else self._fate(verb)
        if fate in (Fault.REQUEST_LOST, Fault.LATE_WRITE):
            if fate is Fault.LATE_WRITE:
                late_s = config.store_timeout_s * (0.2 + 3 * random())
                sched.call(lambda: self._arrive_late(verb, name, do), late_s)
            sched.note(fate, f"{verb} {name}")
            sched.pause(config.store_timeout_s)
            raise self._lost(verb, name)
        actor = current()
        waiting = actor.wait

        def arrive() -> None:
            if self._bucket.down_until_s > sched.now_s:
                return  # nobody answers
            try:
                value, error = do(), None
            except ObjectNotFoundError as found:
                value, error = None, found
            if fate is not Fault.ANSWER_LOST:
                sched.wake(actor, waiting, (value, error), back_s)

        sched.call(arrive, go_s)
        if fate is Fault.WRITTEN_TWICE:
            sched.note(fate, f"{verb} {name}")
            sched.call(
                lambda: self._arrive_late(verb, name, do), go_s + 5 * config.store_s * random()
            )
        try:
            value, error = sched.park(config.store_timeout_s)
        except TimedOutError:
            # What was to come twice was said to be so when it was sent.
            lost = fate is Fault.ANSWER_LOST
            sched.note(Fault.ANSWER_LOST if lost else "store: down", f"{verb} {name}")
            raise self._lost(verb, name) from None
        if error is not None:
            raise error
        return value

    def _fate(self, verb: str) -> Fault:
        kinds = [Fault.REQUEST_LOST, Fault.ANSWER_LOST]
        if verb in ("create", "put"):
            kinds += [Fault.LATE_WRITE, Fault.WRITTEN_TWICE]
        return self._sched.random.choice(kinds)

    def _arrive_late(self, verb: str, name: str, do: Callable[[], Any]) -> None:
        if self._bucket.down_until_s > self._sched.now_s:
            return
        outcome = do()
        if verb == "create":
            self._sched.note(f"late create: {outcome.value}", name)
