"""Changes of parallelism where the copies of before are on the host: taken, left or removed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.local.ancestor_copies import Ancestors
from recovery.local.local_copies import LocalSubtask, StoreDirectory
from recovery.local.store_pool import Clock, StorePool, StorePoolSettings
from recovery.restore import restorer as restore
from snapshot.protocol.lineage import resolve
from snapshot.protocol.messages import AncestorCopy
from statebackend.errors import LocalCopyError
from statebackend.keygroups import KeyGroupRange
from tests.recovery.driver import MAX_PARALLELISM, manifests_of
from tests.recovery.rescale.rescaled_job import World, key, on_one_host, reads
from tests.recovery.restore.one_subtask_job import SMALL, Ticks


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
        Clock(ticks, ticks.sleep),
        StorePoolSettings(open_limit=4, idle_close_s=1e9),
        lambda: tmp_path / "k",
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


@pytest.mark.full  # scores of changes of parallelism
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
