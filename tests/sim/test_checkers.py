"""Each checker finds what it is there for, in a log and a location made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from snapshot.formats.history_object import HISTORY_PREFIX
from snapshot.formats.lineage_digest import chain_start
from snapshot.formats.record import Manifest, SliceEntry, encode_record, record_name
from snapshot.retention.history_keeping import OBJECTS_KEPT
from statebackend.errors import CorruptionError, NotRestorableError
from statebackend.keygroups import key_group_range
from statebackend.rocks.store import Marker
from tests.recovery.driver import ack_of, base_of, follow, part_of
from tests.sim.bucket import Bucket
from tests.sim.checkers.exactly_once import ExactlyOnce
from tests.sim.checkers.garbage import Garbage
from tests.sim.checkers.kept_history import KeptHistory
from tests.sim.checkers.ledger import Ledger
from tests.sim.checkers.output import Output
from tests.sim.checkers.references import References
from tests.sim.checkers.single_writer import SingleWriter
from tests.sim.config import Config
from tests.sim.disk import Opened
from tests.sim.kernel import Scheduler
from tests.sim.location import Committed, Plan, Shared, State
from tests.sim.world import Stopped

GROUPS = key_group_range(0, 1, 128)
K, L = b"\x00\x00k", b"\x00\x7fl"  # of the first and the last key group
START = chain_start("id", "op", (GROUPS.start, GROUPS.end)).hex()


class World:
    """As much of a world as checkers ask for; a log is written by hand."""

    def __init__(self, *, asynchronous: bool = False, zombies: bool = False) -> None:
        self.sched = Scheduler(0)
        self.bucket = Bucket(self.sched)
        self.config = Config(arrow=True, asynchronous=asynchronous, zombies=zombies)
        self.shared = Shared()
        self.opened = SimpleNamespace(collisions=[])
        self.newest: Any = SimpleNamespace(sessions={"s": None}, stage=None)
        self.apps = [self.newest]
        self.cleans_each_epoch = True
        self.violations: list[tuple[str, str]] = []
        self.once, self.output = ExactlyOnce(self), Output(self)
        self.single, self.references = SingleWriter(self), References(self)
        self.garbage = Garbage(self)
        checkers = [self.single, self.references, self.once, self.garbage]
        self.ledger = Ledger(self.bucket, checkers)
        self.bucket.watchers.append(self.ledger)
        self.chains = {-1: START}

    def violated(self, checker: str, what: str) -> None:
        self.violations.append((checker, what))
        raise Stopped(what)

    def write(self, sequence: int, **fields: Any) -> None:
        """A record, a claim unless it is said to be a checkpoint."""
        bodies: list[bytes | None] = fields.pop("bodies", [])
        manifest = Manifest(
            **{
                "kind": "claim",
                "job": "job",
                "job_id": "id",
                "generation": 1,
                "sequence": sequence,
                "writer": "w",
                "write_id": f"write{sequence}",
                "oldest_needed": 0,
                **fields,
            }
        )
        self.bucket.put(record_name(sequence), b"".join(encode_record(manifest, bodies)))

    def epoch(self, sequence: int, epoch: int, changes: State, **fields: Any) -> None:
        """A checkpoint of one subtask, its delta inline or (``named``) in an object."""
        named, base = fields.pop("named", None), fields.pop("base", None)
        groups = fields.pop("groups", GROUPS)
        part = part_of(changes)
        ack = ack_of(self.chains[epoch - 1], part, epoch)
        self.chains[epoch] = follow(self.chains[epoch - 1], part.digest)
        entry = SliceEntry(
            operator="op",
            subtask=0,
            kind="delta",
            epoch=epoch,
            key_group_start=groups.start,
            key_group_end=groups.end,
            attempt=0,
            rows=part.rows,
            size_bytes=part.size_bytes,
            digest=part.digest,
            chain=ack.chain,
            object=named,
        )
        slices, bodies = [entry], [None if named else part.data]
        if named and fields.pop("there", True):
            self.bucket.put(named, part.data)
        if base is not None:
            full = base_of(base)
            more = {"kind": "base", "digest": full.digest, "size_bytes": full.size_bytes}
            slices.append(msgspec.structs.replace(entry, **more))
            bodies.append(full.data)
        fields.setdefault("oldest_needed", 0)
        self.write(
            sequence,
            kind="checkpoint",
            operator="op",
            epoch=epoch,
            max_parallelism=128,
            slices=slices,
            bodies=bodies,
            **{"parallelism": 1, **fields},
        )

    def batch(self, batch: int, state: State, output: State | None = None) -> Committed:
        """A batch that Spark has committed."""
        committed = Committed(Plan(batch, batch, batch, 0), 0, state, output)
        self.shared.commits[batch] = committed
        return committed


@pytest.fixture
def world() -> World:
    return World()


def found(world: World, checker: str, what: str) -> None:
    assert world.violations
    assert world.violations[0][0] == checker
    assert what in world.violations[0][1]


# --- exactly once ---------------------------------------------------------------------------------


def test_a_log_that_holds_what_the_batches_made_is_right(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {K: b"1"})
    world.epoch(2, 1, {K: b"2", L: b"1"}, base={K: b"2", L: b"1"})
    world.once.committed(world.newest, world.batch(1, {K: b"2", L: b"1"}, {}))
    assert not world.violations


def test_a_batch_that_is_not_in_the_log_is_found(world: World) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.once.committed(world.newest, world.batch(0, {}, {}))
    found(world, "exactly once", "the log does not hold it")


def test_a_row_that_counts_twice_is_found(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {K: b"2"})
    with pytest.raises(Stopped):
        world.once.committed(world.newest, world.batch(0, {K: b"1"}, {}))
    found(world, "exactly once", "another state")


def test_with_asynchronous_commits_the_batch_before_must_be_durable() -> None:
    world = World(asynchronous=True)
    world.write(0)
    world.once.committed(world.newest, world.batch(0, {K: b"1"}, {}))
    with pytest.raises(Stopped):
        world.once.committed(world.newest, world.batch(1, {K: b"1"}, {}))
    found(world, "exactly once", "batch 0")


def test_a_base_of_another_state_is_found(world: World) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.epoch(1, 0, {K: b"1"}, base={K: b"9"})
    found(world, "exactly once", "is another state")


def test_a_record_that_follows_nothing_is_found(world: World) -> None:
    world.write(0)
    world.chains[2] = START
    with pytest.raises(Stopped):
        world.epoch(1, 3, {K: b"1"})
    found(world, "exactly once", "follows nothing")


def test_key_groups_that_are_not_the_subtasks_own_are_found(world: World) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.epoch(1, 0, {K: b"1"}, parallelism=2)
    found(world, "exactly once", "has other key groups")


def test_a_key_in_a_slice_of_another_subtask_is_found(world: World) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.epoch(1, 0, {L: b"1"}, parallelism=2, groups=key_group_range(0, 2, 128))
    found(world, "exactly once", "is in a slice of subtask 0")


def test_an_attempt_that_begins_with_another_state_is_found(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {K: b"1"})
    attempt: Any = SimpleNamespace(
        expected={K: b"2"}, subtask=0, key_groups=range(128), app=world.newest
    )
    table: Any = SimpleNamespace(
        snapshot=lambda: [(K, b"1")], base=SimpleNamespace(scan=lambda: [(K, b"1")])
    )
    reply: Any = SimpleNamespace(durable_epoch=0)
    with pytest.raises(Stopped):
        world.once.restored(attempt, table, reply)
    found(world, "exactly once", "begins with another state")
    attempt.expected = {K: b"1"}
    world.once.restored(attempt, table, reply)
    table.base.scan = lambda: [(K, b"not durable")]
    with pytest.raises(Stopped):
        world.once.restored(attempt, table, reply)
    assert "is not what the log holds" in world.violations[1][1]


# --- output ---------------------------------------------------------------------------------------


def test_output_that_the_input_does_not_make_is_found(world: World) -> None:
    world.output.committed(world.batch(0, {}, {K: b"1"}), {K: b"1"})
    with pytest.raises(Stopped):
        world.output.committed(world.batch(1, {}, {K: b"1"}), {K: b"2"})
    found(world, "output", "the input makes")


def test_a_batch_that_was_skipped_is_found(world: World) -> None:
    world.output.committed(world.batch(0, {}, {}), {})
    with pytest.raises(Stopped):
        world.output.committed(world.batch(2, {}, {}), {})
    found(world, "output", "batch 1 is not")


# --- single writer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "fields", "what"),
    [
        (2, {}, "leaves a gap"),
        (1, {"generation": 1}, "follows generation 1"),
        (1, {"generation": 3}, "follows generation 1"),
        (1, {"kind": "checkpoint", "generation": 2}, "follows generation 1"),
    ],
)
def test_a_record_that_does_not_follow_is_found(
    world: World, sequence: int, fields: dict[str, Any], what: str
) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.write(sequence, **fields)
    found(world, "single writer", what)


def test_a_second_writer_of_a_generation_is_found(world: World) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.epoch(1, 0, {}, writer="somebody else")
    found(world, "single writer", "two writers")


def test_a_slot_that_is_written_over_is_found(world: World) -> None:
    world.write(0)
    with pytest.raises(Stopped):
        world.write(0)
    found(world, "single writer", "written over")


def test_a_falling_oldest_needed_is_found(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {}, oldest_needed=1)
    with pytest.raises(Stopped):
        world.epoch(2, 1, {}, oldest_needed=0)
    found(world, "single writer", "falls")


def test_a_late_write_of_the_present_writer_into_a_slot_that_was_never_its_own_is_found(
    world: World,
) -> None:
    world.write(0)
    world.epoch(1, 0, {}, oldest_needed=1)
    del world.bucket.objects[record_name(0)]
    with pytest.raises(Stopped):
        world.write(0, write_id="another")
    found(world, "single writer", "long gone")


def test_a_store_that_two_processes_have_open_is_found(world: World) -> None:
    world.single.opened()
    world.opened.collisions.append("w2 opened db, which w1 has open")
    with pytest.raises(Stopped):
        world.single.opened()
    found(world, "single writer", "w1 has open")


def test_two_subtasks_in_one_folder_are_found() -> None:
    opened = Opened()
    marker = Marker(
        job_id="id", operator="op", key_group_start=0, key_group_end=63, epoch=1, chain="c"
    )
    opened.met("h0/job/op/0-63", marker)
    opened.met("h0/job/op/0-63", marker)
    assert not opened.collisions
    opened.met("h0/job/op/0-63", msgspec.structs.replace(marker, key_group_end=41))
    assert "two subtasks" in opened.collisions[0]


# --- references -----------------------------------------------------------------------------------

DATA = "data/0000000001/00000000000000000000/a"


def test_a_claim_that_is_deleted_is_found(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {}, oldest_needed=1)
    with pytest.raises(Stopped):
        world.bucket.delete([record_name(0)])
    found(world, "references", "claim 0")


def test_a_record_that_is_needed_and_deleted_is_found(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {}, oldest_needed=1)
    world.epoch(2, 1, {}, oldest_needed=2)
    world.bucket.delete([record_name(1)])
    assert not world.violations
    with pytest.raises(Stopped):
        world.bucket.delete([record_name(2)])
    found(world, "references", "is needed")


def test_an_object_that_a_record_names_must_be_there_and_stay(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {K: b"1"}, named=DATA, oldest_needed=1)
    with pytest.raises(Stopped):
        world.bucket.delete([DATA])
    found(world, "references", "names it")
    with pytest.raises(Stopped):
        world.epoch(2, 1, {K: b"1"}, named=DATA + "b", there=False, oldest_needed=1)
    assert "which is not there" in world.violations[1][1]


@pytest.mark.parametrize("error", [CorruptionError("gone"), NotRestorableError("gone")])
def test_a_query_that_fails_for_want_of_what_is_needed_is_found(
    world: World, error: Exception
) -> None:
    with pytest.raises(Stopped):
        world.references.query_failed(world.newest, error)
    found(world, "references", "not there")


# --- garbage --------------------------------------------------------------------------------------


def test_what_nobody_names_and_nobody_deletes_is_found(world: World) -> None:
    world.bucket.put(DATA, b"x")
    world.write(0)
    world.write(1, generation=2, oldest_needed=0)
    world.garbage.begin_calm()
    with pytest.raises(Stopped):
        world.garbage._drivers_own()
    found(world, "garbage", "earlier generation")
    with pytest.raises(Stopped):
        world.garbage._nothing_left()
    assert "needed by nobody" in world.violations[1][1]


def test_a_checkpoint_below_what_is_needed_that_stays_is_found(world: World) -> None:
    world.write(0)
    world.epoch(1, 0, {}, oldest_needed=1)
    world.epoch(2, 1, {}, oldest_needed=2)
    with pytest.raises(Stopped):
        world.garbage._nothing_left()
    found(world, "garbage", "record 1")


def test_an_object_of_the_history_that_is_deleted_early_is_found(world: World) -> None:
    kept = KeptHistory(world)
    names = [f"{HISTORY_PREFIX}{newest:020d}" for newest in range(OBJECTS_KEPT + 1)]
    world.bucket.objects.update(dict.fromkeys(names, (b"", 0.0)))
    kept.deleted(names[0])  # as many as are kept are newer
    with pytest.raises(Stopped):
        kept.deleted(names[1])
    assert world.violations[0][0] == "history"
