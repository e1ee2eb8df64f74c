"""A location that lacks what a start needs, and the way out that the user names."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from statebackend.errors import RewindError, SettingError, UnsupportedQueryError
from tests.spark.local.world import checkpoints, durable_state, setting

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from tests.spark.local.world import World

RETAINED = "spark.sql.streaming.minBatchesToRetain"


def _files(location: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(location)): path.read_bytes()
        for path in sorted(location.rglob("*"))
        if path.is_file()
    }


# --- what Spark has purged -----------------------------------------------------------------------


def test_a_start_that_cannot_go_back_since_spark_kept_one_batch_changes_nothing(
    world: World,
) -> None:
    def forgets(frame: DataFrame, batch: int) -> None:
        if batch != 4:
            world.sink(frame, batch)
        else:
            frame.take(0)

    world.input.add_batches(6)
    with setting(world.spark, RETAINED, "1"):
        backend = world.backend()
        assert "SB5001" in world.fail(backend, world.ledger(backend), forgets)
        before, log = _files(world.location), checkpoints(backend)
        assert 3 not in world.committed(), "Spark has purged what a repetition needs"
        for _ in range(2):
            backend = world.backend()
            with pytest.raises(RewindError, match="Nothing was taken back") as caught:
                world.run(backend, world.ledger(backend))
            assert f"{RETAINED} says: set it to 2 or more" in str(caught.value)
            assert "no commits/3" in str(caught.value)
    assert _files(world.location) == before
    assert checkpoints(backend) == log


def test_two_batches_kept_are_enough_to_go_back_by_one(world: World) -> None:
    def forgets(frame: DataFrame, batch: int) -> None:
        if batch != 4:
            world.sink(frame, batch)

    world.input.add_batches(6)
    with setting(world.spark, RETAINED, "2"):
        backend = world.backend()
        assert "SB5001" in world.fail(backend, world.ledger(backend), forgets)
        world.check(world.run_ledger())


def test_a_setting_that_keeps_too_little_is_told_at_the_start(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.input.add_batches(1)
    with caplog.at_level(logging.WARNING, "statebackend.spark"):
        world.run_ledger()
        assert RETAINED not in caplog.text
        with setting(world.spark, RETAINED, "1"):
            world.run_ledger()
    assert f"{RETAINED} is 1" in caplog.text


def test_asynchronous_commits_are_refused_with_a_setting_that_keeps_too_little(
    world: World,
) -> None:
    world.input.add_batches(1)
    backend = world.backend(commit="async")
    frame = world.ledger(backend)
    with (
        setting(world.spark, RETAINED, "1"),
        pytest.raises(UnsupportedQueryError, match=f"{RETAINED} is 1"),
    ):
        world.run(backend, frame)
    world.run(backend, frame)
    world.check(backend)


# --- what the user gives up ----------------------------------------------------------------------


def _lose(world: World, *names: str) -> None:
    for name in names:
        path = world.location / name
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)


def _give_up_output(world: World, *batches: int) -> None:
    """They may be cut otherwise when they come again."""
    for batch in batches:
        (world.sink.folder / str(batch)).unlink()


def _two_batches_behind(world: World) -> None:
    """As a power cut may leave a location of which nothing was synced."""
    world.input.add_batches(6)
    world.check(world.run_ledger())
    _lose(world, "commits/5", "commits/4", "offsets/5", "offsets/4")
    assert (world.committed(), world.planned()) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_a_location_two_batches_behind_goes_on_after_an_epoch_that_the_user_names(
    world: World,
) -> None:
    _two_batches_behind(world)
    before = _files(world.location)
    log = world.objects("log")
    backend = world.backend()
    with pytest.raises(Exception, match=re.escape("go_back_to= can give up")) as caught:
        world.run(backend, world.ledger(backend))
    assert "after epoch 3, 2" in str(caught.value)
    assert _files(world.location) == before
    backend = world.backend()
    frame = world.ledger(backend)
    with pytest.raises(RewindError, match="cannot go back to epoch 4"):
        backend.start(world.writer(frame), go_back_to=4)
    assert _files(world.location) == before
    assert world.objects("log") == log, "nobody is fenced by what is refused"
    _give_up_output(world, 4, 5)
    query = backend.start(world.writer(frame), go_back_to=3)
    assert query.awaitTermination(120)
    world.check(backend)
    world.input.add_batches(2)
    world.forget_local()
    world.check(world.run_ledger())
    # The source remembers the files of both lost batches, and gives them at once.
    assert world.committed() == list(range(7))


def test_an_epoch_is_refused_where_no_location_is_known_or_it_is_none(world: World) -> None:
    world.input.add_batches(1)
    backend = world.backend()
    frame = world.ledger(backend)
    with pytest.raises(SettingError, match="no checkpoint location is known"):
        backend.starting(go_back_to=0).__enter__()
    with pytest.raises(SettingError, match="is no epoch"):
        backend.start(world.writer(frame), go_back_to=True)
    assert not world.location.exists()


def test_an_epoch_further_back_may_be_named_too(world: World) -> None:
    _two_batches_behind(world)
    _give_up_output(world, 2, 3, 4, 5)
    backend = world.backend()
    query = backend.start(world.writer(world.ledger(backend)), go_back_to=1)
    assert query.awaitTermination(120)
    world.check(backend)
    assert world.committed() == list(range(4))
    assert not world.hidden()


def test_an_epoch_to_go_back_to_is_ignored_where_the_query_can_go_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.input.add_batches(3)
    backend = world.run_ledger()
    before = checkpoints(backend)
    state = durable_state(backend, "ledger")
    backend = world.backend()
    query = backend.start(world.writer(world.ledger(backend)), go_back_to=0)
    assert query.awaitTermination(120)
    assert (checkpoints(backend), durable_state(backend, "ledger")) == (before, state)
    assert "go_back_to=0 is ignored" in caplog.text
    world.check(backend)


def test_a_sink_that_skips_batches_that_it_has_does_not_bring_back_what_was_given_up(
    world: World,
) -> None:
    """Its batches are cut otherwise now: they must not count as those of the epochs given up."""

    def skips(frame: DataFrame, batch: int) -> None:
        if not (world.sink.folder / str(batch)).exists():
            world.sink(frame, batch)

    _two_batches_behind(world)
    world.input.add_batches(3)
    backend = world.backend()
    query = backend.start(world.writer(world.ledger(backend), skips), go_back_to=3)
    with pytest.raises(StreamingQueryException, match="SB5001"):
        query.awaitTermination(120)


def test_an_epoch_that_was_refused_once_may_be_gone_back_to_later(world: World) -> None:
    _two_batches_behind(world)
    _give_up_output(world, 4, 5)
    backend = world.backend()
    frame = world.ledger(backend)
    with pytest.raises(RewindError, match="cannot go back to epoch 4"):
        backend.start(world.writer(frame), go_back_to=4)
    assert backend.start(world.writer(frame), go_back_to=3).awaitTermination(120)
    world.input.add_batches(3)
    world.check(world.run_ledger())
    assert world.committed()[-1] == 7
    _lose(world, *(f"{kind}/{n}" for kind in ("commits", "offsets") for n in (7, 6, 5)))
    _give_up_output(world, 5, 6, 7)
    backend = world.backend()
    query = backend.start(world.writer(world.ledger(backend)), go_back_to=4)
    assert query.awaitTermination(120)
    world.check(backend)


def test_an_argument_that_was_left_in_a_script_does_not_go_back_again(world: World) -> None:
    _two_batches_behind(world)
    _give_up_output(world, 4, 5)
    backend = world.backend()
    query = backend.start(world.writer(world.ledger(backend)), go_back_to=3)
    assert query.awaitTermination(120)
    for _ in range(3):
        world.input.add_batches(1)
        world.run_ledger()
    last = world.committed()[-1]
    _lose(world, *(f"{kind}/{n}" for kind in ("commits", "offsets") for n in (last, last - 1)))
    before = _files(world.location)
    backend = world.backend()
    with pytest.raises(RewindError, match="told to go back to epoch 3 before"):
        backend.start(world.writer(world.ledger(backend)), go_back_to=3)
    assert _files(world.location) == before


def test_an_epoch_to_go_back_to_without_a_location_is_refused(world: World) -> None:
    world.input.add_batches(2)
    backend = world.run_ledger()
    before = checkpoints(backend)
    backend = world.backend()
    frame = world.ledger(backend)
    with (
        pytest.raises(SettingError, match="go_back_to=0 is given, but no checkpoint location"),
        backend.starting(go_back_to=0),
    ):
        world.writer(frame).start()
    assert not world.spark.streams.active
    assert checkpoints(backend) == before
