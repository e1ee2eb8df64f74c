"""A change of parallelism carried out: real stores on several hosts, a real session and log.

Whatever is run, killed, lost, damaged and rescaled, each subtask begins with the plain model's
state of its key groups, and nobody has a key twice.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recovery.local.ancestors import Ancestors
from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock, StorePool, StorePoolSettings
from recovery.restore import restorer as restore
from recovery.restore.restorer import OpenSubtask, Restorer, Site
from recovery.restore.upload import BaseUpload, Uploaded
from snapshot.formats.names import data_name
from snapshot.protocol.bases import BasePolicy
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import (
    AncestorCopy,
    BaseGrant,
    BeginReply,
    LocalCopy,
    RestoreReport,
    SlicePart,
)
from snapshot.storage.counting import CountingStore
from snapshot.storage.memory_store import MemoryStore
from statebackend.errors import LocalCopyError
from statebackend.keygroups import KeyGroupRange, key_group_range
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
    manifests_of,
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
        self.durable = CountingStore(MemoryStore())
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
            store=self.durable,
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
            store=self.durable,
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


EPOCHS = st.lists(
    st.dictionaries(
        st.builds(key, st.integers(0, MAX_PARALLELISM - 1), st.integers(0, 2)),
        st.one_of(st.none(), st.integers(0, 9).map(lambda n: b"%d" % n)),
        max_size=6,
    ),
    min_size=1,
    max_size=3,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), EPOCHS),
        st.tuples(st.just("start"), st.integers(1, MAX_PARALLELISM)),
        st.tuples(st.just("die"), st.integers(0, 3)),
        st.tuples(st.just("repeat"), st.integers(1, MAX_PARALLELISM)),
        st.tuples(st.just("lose"), st.sampled_from(HOSTS)),
        st.tuples(st.just("damage"), st.integers(0, 1 << 16)),
    ),
    max_size=7,
)


def damage(world: World, rng: random.Random) -> None:
    """A file of a local copy is cut short, gone, or has a wrong bit."""
    files = [p for p in world.root.rglob("*") if p.is_file() and p.name not in ("lease", "holder")]
    if not files:
        return
    path = rng.choice(sorted(files))
    data, kind = path.read_bytes(), rng.randrange(3)
    path.unlink()  # a hard link of it is another copy's
    if kind == 1:
        path.write_bytes(data[: len(data) // 2])
    elif kind == 2 and data:
        at = rng.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])


@pytest.mark.parametrize("large", [False, True], ids=["small", "files"])
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parallelism=st.integers(1, MAX_PARALLELISM), steps=STEPS, seed=st.integers(0, 1 << 30))
def test_whatever_happens_each_subtask_begins_with_the_models_state(
    tmp_path_factory: pytest.TempPathFactory,
    large: bool,
    parallelism: int,
    steps: list[tuple[str, Any]],
    seed: int,
) -> None:
    rng = random.Random(seed)
    world = World(tmp_path_factory.mktemp("w"), parallelism, large=large)
    repeatable = False
    changes: Changes = {}
    try:
        for what, value in [*steps, ("run", [{}])]:
            if what == "run":
                for changes in value:
                    world.run(changes, rng)
                repeatable = True
            elif what == "start":
                world.settle()
                world.start(value)
            elif what == "die":
                world.run({key(rng.randrange(8)): b"lost"}, rng, only=value)
                world.settle()
                world.start(world.parallelism)
            elif what == "repeat" and repeatable:  # Spark had not committed the newest batch
                world.settle()
                world.epoch -= 1
                world.start(value)
                world.run(changes, rng)
            elif what == "lose":
                shutil.rmtree(world.root / value, ignore_errors=True)
            elif what == "damage":
                damage(world, rng)
        world.settle()
    finally:
        shutil.rmtree(world.root, ignore_errors=True)


def filled(world: World, epochs: int = 4) -> random.Random:
    rng = random.Random(3)
    for number in range(epochs):
        world.run({key(g, number % 2): b"%d" % number for g in range(MAX_PARALLELISM)}, rng)
    return rng


def on_one_host(world: World, changes: Changes) -> list[RestoreReport]:
    world.reports.clear()
    for subtask in range(world.parallelism):
        world.attempt(subtask, "a", changes)
    world.truth[world.epoch] = changed(world.truth[world.epoch - 1], changes)
    world.epoch += 1
    return list(world.reports)


@pytest.fixture(params=[False, True], ids=["small", "files"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """Two subtasks, all on host a."""
    made = World(tmp_path, 2, large=request.param)
    for number in range(4):
        on_one_host(made, {key(g): b"%d" % number for g in range(MAX_PARALLELISM)})
    return made


def reads(world: World) -> int:
    counts = world.durable.counts
    return sum(counts[verb].requests for verb in ("get", "get_range", "get_tail") if verb in counts)


@pytest.mark.parametrize("parallelism", [1, 3, 4, 8])
def test_with_the_parents_on_the_host_no_state_is_read_from_the_store(
    world: World, parallelism: int
) -> None:
    world.settle()
    world.start(parallelism)
    before = reads(world)
    reports = on_one_host(world, {key(1): b"next"})
    assert {one.source for one in reports} == {"local"}
    assert sum(one.durable_reads for one in reports) == 0
    assert reads(world) == before


def test_a_subtask_whose_key_groups_stay_goes_on_with_its_own_store(tmp_path: Path) -> None:
    world = World(tmp_path, 3, large=False)  # 0-2, 3-5, 6-7
    on_one_host(world, {key(g): b"1" for g in range(8)})
    names = {path.name for path in (tmp_path / "a").glob("*/op/*")} or {
        path.name for path in (tmp_path / "a" / "clicks" / "op").iterdir()
    }
    assert names == {"0-2", "3-5", "6-7"}
    directory = (tmp_path / "a/clicks/op/6-7/current").read_text()
    world.start(4)  # 0-1, 2-3, 4-5, 6-7
    on_one_host(world, {})
    assert (tmp_path / "a/clicks/op/6-7/current").read_text() == directory


def test_what_the_others_left_is_removed_once_all_have_their_state(world: World) -> None:
    world.start(4)
    folder = world.root / "a" / "clicks" / "op"
    on_one_host(world, {})
    assert {path.name for path in folder.iterdir()} >= {"0-3", "4-7"}
    on_one_host(world, {})
    assert {path.name for path in folder.iterdir()} == {"0-1", "2-3", "4-5", "6-7"}


def test_on_a_host_without_copies_the_parents_come_from_the_store(world: World) -> None:
    world.settle()
    world.start(1)
    world.reports.clear()
    world.attempt(0, "b", {})
    (report,) = world.reports
    assert report.source == "durable"
    assert report.durable_reads > 0


def test_one_parent_here_and_one_not(world: World) -> None:
    world.settle()
    shutil.rmtree(world.root / "a/clicks/op/4-7")
    world.start(1)
    (report,) = on_one_host(world, {})
    assert report.source == "mixed"


def test_a_child_that_was_half_made_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:

    world.settle()
    world.start(1)
    real = restore.as_lists

    def killed(rows: Any) -> Any:
        raise KeyboardInterrupt  # the process ends here: nothing is cleaned up behind it

    monkeypatch.setattr(restore, "as_lists", killed)
    with pytest.raises(KeyboardInterrupt):
        world.attempt(0, "a", {})
    monkeypatch.setattr(restore, "as_lists", real)
    (report,) = on_one_host(world, {})
    assert report.source == "local"


def test_a_damaged_parent_is_marked_and_the_store_asked(world: World) -> None:
    world.settle()
    (current,) = (world.root / "a/clicks/op/0-3").glob("*/db/CURRENT")
    current.write_text("nothing\n")
    world.start(1)
    (report,) = on_one_host(world, {})
    assert report.source == "mixed"


def test_a_store_that_another_process_keeps_open_is_asked_for(tmp_path: Path) -> None:
    world = World(tmp_path, 2, large=False)
    ticks = Ticks()
    world.keepers["a"] = StorePool(
        Clock(ticks, ticks.sleep), StorePoolSettings(open_limit=4, idle_close_s=1e9), tmp_path / "k"
    )
    on_one_host(world, {key(g): b"1" for g in range(8)})
    world.start(1)
    reports = on_one_host(world, {key(0): b"2"})
    assert [one.source for one in reports] == ["local"]
    world.keepers["a"].close()


def test_an_attempt_that_is_repeated_in_the_first_epoch_removes_nothing(tmp_path: Path) -> None:
    """Others of its host have not begun: their parents' copies are still wanted."""
    world = World(tmp_path, 1, large=False)
    for _ in range(3):
        on_one_host(world, {key(g): b"1" for g in range(8)})
    world.settle()
    world.start(2)
    world.reports.clear()
    world.attempt(0, "b", {})
    world.attempt(0, "a", {})  # again, elsewhere
    world.attempt(1, "a", {})
    assert {(one.subtask, one.host): one.source for one in world.reports}[1, "a"] == "local"


def test_a_store_that_is_in_use_keeps_its_place_whoever_sweeps(tmp_path: Path) -> None:
    """A driver that does not know yet that it was fenced sweeps at its own parallelism."""
    world = World(tmp_path, 4, large=False)
    on_one_host(world, {key(g): b"1" for g in range(8)})
    held, _ = world.local("a", 0).acquire(1.0)
    world.parallelism = 2
    world.local("a", 0).sweep_others(2, MAX_PARALLELISM, run="old")
    world.parallelism = 4
    assert not (tmp_path / "a/clicks/op/2-3").exists()
    held.release()
    again, reason = world.local("a", 0).acquire(1.0)
    assert (again.path, reason) == (held.path, "")
    again.release()


def test_processes_that_remove_the_same_parents_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, 4, large=False)
    on_one_host(world, {key(g): b"1" for g in range(8)})

    def another_was_quicker(self: LocalSubtask, path: Path) -> bool:
        shutil.rmtree(path.parent)
        return True

    monkeypatch.setattr(LocalSubtask, "_remove_free", another_was_quicker)
    world.parallelism = 2
    world.local("a", 0).sweep_others(2, MAX_PARALLELISM, run="new")
    assert {one.name for one in (tmp_path / "a/clicks/op").iterdir()} <= {"0-3", "4-7"}
    assert not caplog.records


def test_a_parent_that_another_has_begun_to_write_to_is_not_taken(tmp_path: Path) -> None:
    world = World(tmp_path, 1, large=False)
    on_one_host(world, {key(g): b"1" for g in range(8)})
    on_one_host(world, {key(g): b"2" for g in range(8)})
    ancestors = Ancestors(world.local("a", 0), SMALL, lease_timeout_s=1.0)
    (found,) = ancestors.look([(0, 7)])
    held, _ = world.local("a", 0).acquire(1.0)
    store = held.open_store(SMALL)
    marker = store.marker()
    assert marker is not None
    half = msgspec.structs.replace(marker, applying="ab" * 32)
    store.apply((), (), half)
    held.release()
    with pytest.raises(LocalCopyError, match="changed"):
        ancestors.take([(0, 7)])
    ancestors.release()
    assert found.copy.applying == ""


def one_parent(root: Path, *, large: bool) -> World:
    """One subtask on host a, to be cut in two; its store has what is durable."""
    world = World(root, 1, large=large)
    for number in range(3):
        on_one_host(world, {key(g): b"%d" % number for g in range(8)})
    world.settle()
    world.start(2)
    world.reports.clear()
    return world


@pytest.mark.parametrize("large", [False, True], ids=["small", "files"])
def test_while_the_driver_answers_one_child_the_others_have_their_parent(
    tmp_path: Path, large: bool
) -> None:
    """However long that takes: nobody comes back from afar for want of the parent's lease."""
    world = one_parent(tmp_path, large=large)
    before = reads(world)
    within: list[int] = []

    def another(ancestors: list[AncestorCopy] | None) -> None:
        if not within:
            within.append(1)
            world.attempt(1, "a", {})

    world.while_asking = another
    world.attempt(0, "a", {})
    assert [(one.subtask, one.source) for one in world.reports] == [(1, "local"), (0, "local")]
    assert reads(world) == before


def taken(world: World) -> StoreDirectory:
    """The one parent's store, in somebody else's hands."""
    other = World.local(world, "a", 0)
    held, _ = other.acquire_other(KeyGroupRange(0, 7), 0.0)
    assert held is not None
    return held


def test_a_parent_that_changes_while_the_driver_answers_is_not_taken(tmp_path: Path) -> None:
    world = one_parent(tmp_path, large=False)

    def changed(ancestors: list[AncestorCopy] | None) -> None:
        if ancestors:
            held = taken(world)
            store = held.open_store(SMALL)
            marker = store.marker()
            assert marker is not None
            other = msgspec.structs.replace(marker, epoch=marker.epoch + 1, chain="ab" * 32)
            store.apply([key(3)], [b"of another epoch"], other)
            held.release()

    world.while_asking = changed
    world.attempt(0, "a", {})  # which looks at what it holds
    world.attempt(1, "b", {})
    assert [one.source for one in world.reports] == ["durable", "durable"]


def test_a_parent_that_is_never_free_when_it_is_wanted_is_given_up(tmp_path: Path) -> None:
    world = one_parent(tmp_path, large=False)
    held: list[StoreDirectory] = []

    def gone(ancestors: list[AncestorCopy] | None) -> None:
        if ancestors:
            held.append(taken(world))
        elif held:
            held.pop().release()

    world.while_asking = gone
    world.attempt(0, "a", {})
    assert [one.source for one in world.reports] == ["durable"]


def test_changes_of_parallelism_without_an_epoch_worth_a_base_do_not_add_up(tmp_path: Path) -> None:
    """Each subtask of the past is looked at once, however many ways lead to it."""
    world = World(tmp_path, 1, large=False)
    for number in range(12):
        on_one_host(world, {key(number % 8): b"x"})
        world.settle()
        world.start(8 if world.parallelism == 1 else 1)
    lineage = resolve(manifests_of(world.durable))["op"].at(world.parallelism, world.epoch - 1)
    looked_at = {id(one) for sub in lineage.subtasks for one, _ in sub.origins(world.epoch - 1)}
    per_subtask = [len(list(sub.origins(world.epoch - 1))) for sub in lineage.subtasks]
    assert max(per_subtask) <= len(looked_at) <= 9 * 13


def test_a_subtask_that_others_made_has_a_base_of_its_own_soon(tmp_path: Path) -> None:
    world = World(tmp_path, 2, large=False)
    on_one_host(world, {key(g): b"1" for g in range(8)})
    world.settle()
    world.start(3)
    for _ in range(4):
        on_one_host(world, {key(1): b"2"})
    assert not any(one.parents for one in resolve(manifests_of(world.durable))["op"].subtasks[:2])
