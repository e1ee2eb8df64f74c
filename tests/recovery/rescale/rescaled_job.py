"""A job on some hosts at any parallelism: real stores, a real session and log, and a model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from recovery.local.local_copies import LocalSubtask
from recovery.local.store_pool import Clock, StorePool
from recovery.restore.restorer import OpenSubtask, Restorer, Site
from snapshot.formats.object_names import data_name
from snapshot.protocol.base_policy import BasePolicy
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
from statebackend.keygroups import KeyGroupRange, key_group_range
from statebackend.runtime.worker.background_upload import BaseUpload, Uploaded
from statebackend.state.table import StateTable
from tests.recovery.driver import (
    MAX_PARALLELISM,
    Changes,
    Started,
    State,
    ack_of,
    base_of,
    begin_of,
    changed,
    done_of,
    new_id,
    part_of,
    renewal_of,
)
from tests.recovery.restore.one_subtask_job import SMALL, Ticks

HOSTS = ("a", "b")


def key(group: int, name: int = 0) -> bytes:
    return bytes([0, group, name])


class Told:
    """Tells the session of an upload."""

    def __init__(self, world: World, grant: BaseGrant, subtask: int) -> None:
        self.session = world.started.session
        self.grant, self.subtask = grant, subtask

    def renew(self) -> None:
        self.session.base_renewed(renewal_of(self.grant, self.subtask))

    def give_up(self, why: str, *, harmless: bool) -> None:
        self.session.base_renewed(
            renewal_of(self.grant, self.subtask, given_up=True, why=why, harmless=harmless)
        )

    def done(self, uploaded: Uploaded) -> None:
        self.session.base_done(done_of(self.grant, uploaded, self.subtask))


class World:
    """A job on some hosts, at any parallelism."""

    def __init__(self, root: Path, parallelism: int, *, large: bool, **options: Any) -> None:
        self.root, self.large, self.options = root, large, options
        self.durable = MemoryStore()
        self.workers = CountingStore(self.durable)  # the driver cleans meanwhile, and reads as well
        self.keepers: dict[str, StorePool] = {}
        self.epoch = self.attempts = 0
        self.truth: dict[int, State] = {-1: {}}
        self.reports: list[RestoreReport] = []
        self.begins = 0
        self.while_asking: Callable[[list[AncestorCopy] | None], None] = lambda ancestors: None
        self.start(parallelism)

    def start(self, parallelism: int) -> None:
        """A driver, at a parallelism; Spark runs the batch of the epoch next."""
        self.parallelism = parallelism
        self.started = Started(
            self.durable,
            {"op": parallelism},
            first_epoch=self.epoch,
            inline_budget_bytes=0 if self.large else 1 << 20,
            policy=BasePolicy(
                every_epochs=3, apart_every_epochs=3, apart_min_bytes=1, open_limit=8
            ),
            whole_limit_bytes=0 if self.large else 1 << 20,
            clean_every_epochs=1,
            **self.options,
        )

    def groups(self, subtask: int) -> KeyGroupRange:
        return key_group_range(subtask, self.parallelism, MAX_PARALLELISM)

    def local(self, host: str, subtask: int) -> LocalSubtask:
        ticks = Ticks()
        return LocalSubtask(
            str(self.root / host),
            job="clicks",
            operator="op",
            key_groups=self.groups(subtask),
            new_id=new_id,
            clock=Clock(ticks, ticks.sleep),
            store_pool=self.keepers.get(host),
        )

    def open(self, subtask: int, host: str) -> OpenSubtask:
        self.attempts += 1

        def ask(
            copy: LocalCopy, ancestors: list[AncestorCopy] | None
        ) -> tuple[BeginReply, list[bytes]]:
            request = begin_of(self.epoch, subtask, attempt=self.attempts, copy=copy)
            self.begins += 1
            self.while_asking(ancestors)
            request = msgspec.structs.replace(request, ancestors=ancestors)
            return self.started.session.begin(request)

        opened = Restorer(
            self.local(host, subtask),
            Site(operator="op", subtask=subtask, host=host, executor="e"),
            ask=ask,
            store=self.workers,
            now_s=Ticks(),
            lease_timeout_s=1.0,
            settings=SMALL,
        ).open()
        if opened.report is not None:
            self.reports.append(opened.report)
        return opened

    def attempt(self, subtask: int, host: str, changes: Changes) -> None:
        opened = self.open(subtask, host)
        groups, reply = self.groups(subtask), opened.reply
        marker = opened.store.marker()
        assert marker is not None
        assert (marker.key_group_start, marker.key_group_end) == (groups.start, groups.end)
        assert (marker.epoch, marker.chain) == (reply.durable_epoch, reply.durable_chain)
        table = StateTable(opened.store)
        for epoch, rows in opened.layers:
            table.add_layer(epoch, rows)
        before = {k: v for k, v in self.truth[self.epoch - 1].items() if k[1] in groups}
        assert dict(table.snapshot()) == before
        local = self.local(host, subtask)
        if reply.settled:
            local.sweep_others(self.parallelism, MAX_PARALLELISM, run=str(id(self.started)))
        own = {k: v for k, v in changes.items() if k[1] in groups}
        for k, v in own.items():
            table.put(k, v)
        keys, values = table.freeze(self.epoch).sorted()
        delta = part_of(dict(zip(keys, values, strict=True)))
        if reply.grant is not None:
            self.upload(opened, reply.grant, subtask)
        opened.directory.write_delta(self.epoch, delta.digest, delta.data)
        base, after = None, dict(table.snapshot())
        if reply.base_due and not self.large and after:
            base = base_of(after)
        local.give_back(opened.directory)
        ack = ack_of(
            reply.chain,
            self.part(delta),
            self.epoch,
            subtask,
            attempt=self.attempts,
            base=base,
            large_bytes=1 << 30 if self.large else 0,
        )
        self.started.session.ack(ack)

    def part(self, part: SlicePart) -> SlicePart:
        if not self.large or not part.size_bytes:
            return part
        name = data_name(self.started.tenure.generation, self.epoch, new_id())
        self.durable.put(name, [part.data])
        return SlicePart(digest=part.digest, size_bytes=part.size_bytes, rows=part.rows, name=name)

    def upload(self, opened: OpenSubtask, grant: BaseGrant, subtask: int) -> None:
        BaseUpload(
            opened.directory,
            grant,
            store=self.workers,
            generation=opened.reply.generation,
            reporter=Told(self, grant, subtask),
            now_s=Ticks(),
        ).run()

    def run(self, changes: Changes, rng: random.Random, *, only: int | None = None) -> None:
        """An epoch on hosts that are drawn; ``only`` so many subtasks before the driver dies."""
        subtasks = list(range(self.parallelism))
        rng.shuffle(subtasks)
        if only is not None:
            subtasks = subtasks[: min(only, self.parallelism - 1)]
        for subtask in subtasks:
            self.attempt(subtask, rng.choice(HOSTS), changes)
        if only is None:
            self.truth[self.epoch] = changed(self.truth[self.epoch - 1], changes)
            self.epoch += 1

    def settle(self) -> None:
        self.started.session.drain(30)
        self.started.session.cleaner.drain(30)


def on_one_host(world: World, changes: Changes) -> list[RestoreReport]:
    world.reports.clear()
    for subtask in range(world.parallelism):
        world.attempt(subtask, "a", changes)
    world.truth[world.epoch] = changed(world.truth[world.epoch - 1], changes)
    world.epoch += 1
    return list(world.reports)


def reads(world: World) -> int:
    """How many requests to read the workers have made."""
    counts = world.workers.counts
    return sum(counts[verb].requests for verb in ("get", "get_range", "get_tail") if verb in counts)
