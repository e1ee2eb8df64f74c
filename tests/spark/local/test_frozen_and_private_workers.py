"""Workers that freeze, and what workers leave on a host that others use, too."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.local.processors import CarelessLedger, FreezingLedger
from tests.spark.local.world import World, finish
from tests.support.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """Names the process that froze, which is killed if nothing else did it."""
    file = tmp_path / "frozen"
    yield file
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_frozen_worker_is_killed_after_a_bound_and_its_task_tried_again_exactly(
    world: World, frozen: Path
) -> None:
    """Where tasks have one try only, too: what Spark is told to kill is no failure."""
    world.input.add_batches(3)
    world.input.add_keys("stop", *(f"k{i}" for i in range(7)))
    world.input.add_batches(2)
    backend = world.backend(settings={"attempt_timeout_s": 5.0})
    frame = world.ledger(backend, processor=FreezingLedger("stop", str(frozen)))
    query = world.start(backend, frame)
    finish(query)
    assert query.exception() is None
    world.check(backend)
    assert not _runs(int(frozen.read_text())), "it does not thaw later on"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_query_leaves_on_its_host_is_for_its_user_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With state and input that go by way of the disk, and a umask that closes nothing."""
    # Another environment gets workers of its own: no other test's have this umask.
    monkeypatch.setitem(world.spark.sparkContext.environment, "STATEBACKEND_TEST", __name__)
    local, kinds = world.root / "local again", set[str]()

    def looks(frame: Any, batch: int) -> None:
        world.sink(frame, batch)
        assert exposed(local) == []
        kinds.update(path.name for path in local.rglob("*"))

    settings = {"input_budget_bytes": 1 << 16, "overlay_budget_bytes": 1 << 16}
    for given, sink in (({}, None), ({"local_dir": str(local)}, looks)):
        world.input.add_batches(3, keys=2000, rows=20_000)
        backend = world.backend(settings=settings, **given)
        # The first time its workers get their umask, after they have made most of what they make.
        world.run(backend, world.ledger(backend, processor=CarelessLedger()), sink)
    world.check(backend)
    assert exposed(local) == []
    assert local.stat().st_mode & 0o777 == 0o700
    assert {"current", "lease", "holder", "deltas"} <= kinds, "it was looked at"
    assert exposed(world.local) == []
    assert list(world.local.glob(".work/*/*/door")), "of the workers, which are still there"
