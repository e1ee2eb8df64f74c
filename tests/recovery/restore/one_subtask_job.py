"""A job of one operator and one subtask on real stores, with a real session and log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock, StorePool
from recovery.restore.restorer import OpenSubtask, Restorer, Site
from snapshot.formats.object_names import data_name
from snapshot.protocol.messages import (
    AncestorCopy,
    BaseGrant,
    BeginReply,
    LocalCopy,
    RestoreReport,
    SlicePart,
)
from snapshot.storage.counting_store import CountingStore
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import ObjectStore
from statebackend.keygroups import KeyGroupRange
from statebackend.rocks.parted import Opener, open_database
from statebackend.rocks.store import RocksSettings
from statebackend.runtime.worker.background_upload import BaseUpload, Uploaded
from statebackend.state.table import StateTable
from tests.recovery.driver import (
    Changes,
    Started,
    State,
    ack_of,
    base_of,
    begin_of,
    done_of,
    new_id,
    part_of,
    renewal_of,
)

SMALL = RocksSettings(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20)


class Ticks:
    """A clock that moves by itself: a quarter of a second per look."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        self.time_s += 0.25
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class Told:
    """Tells a job's session of an upload."""

    def __init__(self, job: Job, grant: BaseGrant) -> None:
        self.job, self.grant = job, grant

    def renew(self) -> None:
        self.job.started.session.base_renewed(renewal_of(self.grant))

    def give_up(self, why: str, *, harmless: bool) -> None:
        self.job.started.session.base_renewed(
            renewal_of(self.grant, given_up=True, why=why, harmless=harmless)
        )

    def done(self, uploaded: Uploaded) -> None:
        self.job.uploads.append(uploaded)
        self.job.started.session.base_done(done_of(self.grant, uploaded))


class Job:
    """A job of one operator and one subtask on some hosts, its driver started again at will."""

    def __init__(
        self,
        root: Path,
        *,
        budget: int = 1 << 20,
        every: int = 64,
        apart: bool = False,
        store: ObjectStore | None = None,
        store_pool: StorePool | None = None,
        **options: Any,
    ) -> None:
        self.root = root
        self.options = options
        self.apart = apart
        self.uploads: list[Uploaded] = []
        self.store = store or MemoryStore()
        self.store_pool = store_pool
        self.opener: Opener = open_database
        self.durable = CountingStore(self.store)
        self.budget, self.every = budget, every
        self.epoch = 0
        self.attempts = 0
        self.asked: list[LocalCopy] = []
        self.truth: dict[int, State] = {-1: {}}
        self.reports: list[RestoreReport | None] = []
        self.restart()

    def restart(self, epoch: int | None = None) -> None:
        """A new driver; Spark runs this batch next."""
        if epoch is not None:
            self.epoch = epoch
        self.started = Started(
            self.durable,
            {"op": 1},
            first_epoch=self.epoch,
            base_every_epochs=self.every,
            inline_budget_bytes=self.budget,
            **self.options,
        )

    def local(self, host: str) -> LocalSubtask:
        ticks = Ticks()
        return LocalSubtask(
            str(self.root / host),
            job="clicks",
            operator="op",
            key_groups=KeyGroupRange(0, 7),
            new_id=new_id,
            clock=Clock(ticks, ticks.sleep),
            store_pool=self.store_pool,
            opener=self.opener,
        )

    def directory(self, host: str) -> Path:
        path = self.local(host).path
        return path / (path / "current").read_text()

    def ask(
        self, copy: LocalCopy, ancestors: list[AncestorCopy] | None
    ) -> tuple[BeginReply, list[bytes]]:
        assert ancestors is None  # nobody changed the parallelism
        self.asked.append(copy)
        return self.started.session.begin(begin_of(self.epoch, attempt=self.attempts, copy=copy))

    def open(self, host: str = "h") -> OpenSubtask:
        """Begin the running epoch on a host: what `Restorer` is for."""
        self.attempts += 1
        self.asked = []
        opened = Restorer(
            self.local(host),
            Site(operator="op", subtask=0, host=host, executor="e"),
            ask=self.ask,
            store=self.durable,
            now_s=Ticks(),
            lease_timeout_s=1.0,
            settings=SMALL,
        ).open()
        self.opened = opened
        marker = opened.store.marker()
        assert marker is not None
        reply = opened.reply
        assert reply.base_epoch == self.epoch - 1
        assert (marker.epoch, marker.applying) == (reply.durable_epoch, "")
        assert marker.chain == reply.durable_chain
        assert dict(opened.store.scan()) == self.truth[reply.durable_epoch]
        self.table = StateTable(opened.store)
        for epoch, rows in opened.layers:
            self.table.add_layer(epoch, rows)
        assert dict(self.table.snapshot()) == self.truth[reply.base_epoch]
        return opened

    def _part(self, part: SlicePart) -> SlicePart:
        if part.size_bytes <= self.budget:
            return part
        name = data_name(self.started.tenure.generation, self.epoch, new_id())
        self.store.put(name, [part.data])
        return SlicePart(digest=part.digest, size_bytes=part.size_bytes, rows=part.rows, name=name)

    def attempt(self, changes: Changes, host: str = "h") -> OpenSubtask:
        """One attempt up to its ack, as a task makes it."""
        opened = self.open(host)
        self.reports.append(opened.report)
        table = self.table
        for key, value in changes.items():
            table.put(key, value)
        keys, values = table.freeze(self.epoch).sorted()
        delta = part_of(dict(zip(keys, values, strict=True)))
        opened.directory.write_delta(self.epoch, delta.digest, delta.data)
        after = dict(table.snapshot())
        base, large_bytes = None, 0
        if opened.reply.base_due:
            base = base_of(after)
            if self.apart and base.size_bytes > self.budget:
                base, large_bytes = None, base.size_bytes
            else:
                base = self._part(base)
        if opened.reply.grant is not None:
            self.upload(opened, opened.reply.grant)
        self.local(host).give_back(opened.directory)
        ack = ack_of(
            opened.reply.chain,
            self._part(delta),
            self.epoch,
            attempt=self.attempts,
            base=base,
            large_bytes=large_bytes,
        )
        durable = self.started.session.ack(ack).durable
        assert durable is not self.started.coordinator.run.asynchronous
        self.truth[self.epoch] = after
        return opened

    def upload(self, opened: OpenSubtask, grant: BaseGrant) -> None:
        """Done within the epoch, in this thread."""
        BaseUpload(
            opened.directory,
            grant,
            store=self.durable,
            generation=opened.reply.generation,
            reporter=Told(self, grant),
            now_s=Ticks(),
        ).run()

    def run(self, *epochs: Changes, host: str = "h") -> None:
        """Epochs, each of them finished and committed."""
        for changes in epochs:
            self.attempt(changes, host)
            self.epoch += 1

    def reopened(self, host: str = "h") -> RestoreReport:
        """Open the running epoch as the first attempt after a restart; its report."""
        self.restart()
        opened = self.open(host)
        opened.directory.release()
        assert opened.report is not None
        return opened.report


K, L, M = b"\0\0k", b"\0\1l", b"\0\7m"
