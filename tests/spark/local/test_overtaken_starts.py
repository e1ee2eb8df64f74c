"""A start that goes back is frozen in any call to the file system, and thaws too late."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from recovery.decide.taken_back_files import TakenBack
from statebackend.errors import StateBackendError
from statebackend.spark.start.checkpoint_location import CheckpointLocation
from tests.spark.local.world import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame

    from statebackend import StateBackend
    from tests.spark.local.world import World

CHANGES = ("delete", "rename")


class FrozenCalls:
    """A Hadoop file system; one thread's call number ``number`` that changes it waits.

    Attributes:
        frozen: it waits. thaw: lets it go on. dies: the thread ends right after that call.
    """

    def __init__(self, number: int, *, dies: bool = False, after: bool = False) -> None:
        self.number, self.dies, self.after = number, dies, after
        self.frozen, self.thaw = threading.Event(), threading.Event()
        self.calls: list[str] = []
        self.thread: int | None = None

    def around(self, real: Any) -> Any:
        outer = self

        class FileSystem:
            def __getattr__(self, name: str) -> Any:
                call = getattr(real, name)
                return outer._watched(name, call) if name in CHANGES else call

        return FileSystem()

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            if threading.get_ident() != self.thread:
                return call(*args)
            self.calls.append(f"{name} {args[0].getName()}")
            mine = len(self.calls) == self.number
            if mine and not self.after:
                self._freeze()
            result = call(*args)
            if mine and self.after:
                self._freeze()
            if mine and self.dies:
                raise SystemExit
            return result

        return watched

    def _freeze(self) -> None:
        self.frozen.set()
        assert self.thaw.wait(240), "nobody let it go on"


class Starter:
    """A driver that starts the query in a thread of its own."""

    def __init__(self, start: Callable[[], Any], calls: FrozenCalls) -> None:
        self.calls = calls
        self.raised: BaseException | None = None
        self.done = threading.Event()

        def run() -> None:
            calls.thread = threading.get_ident()
            try:
                start()
            except BaseException as error:
                self.raised = error
            finally:
                self.done.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def frozen(self) -> bool:
        """Whether it froze; else it has come to its end."""
        until(lambda: self.calls.frozen.is_set() or self.done.is_set(), "the starter froze")
        return self.calls.frozen.is_set()

    def thaw(self) -> None:
        self.calls.thaw.set()
        self.thread.join(240)
        assert self.done.is_set()


@pytest.fixture
def freezing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FrozenCalls]:
    """Has checkpoint locations made from now on reach their file system through it."""
    real = CheckpointLocation.__init__

    def made(number: int, **how: bool) -> FrozenCalls:
        calls = FrozenCalls(number, **how)

        def init(self: CheckpointLocation, *args: Any) -> None:
            real(self, *args)
            self._fs = calls.around(self._fs)

        monkeypatch.setattr(CheckpointLocation, "__init__", init)
        return calls

    return made


def left_behind(world: World) -> StateBackend:
    """Spark has committed batch 2, which the operator did not finish, and planned batch 3."""

    def forgets(frame: DataFrame, batch: int) -> None:
        if batch != 2:
            world.sink(frame, batch)

    world.input.add_batches(4)
    backend = world.backend()
    assert "SB5001" in world.fail(backend, world.ledger(backend), forgets)
    assert (world.committed(), world.planned()) == ([0, 1, 2], [0, 1, 2, 3])
    return backend


CALLS = 4  # as many as a start makes that goes back, or more


# Half a minute: four starts of the query, one of them frozen.
@pytest.mark.parametrize("number", range(1, CALLS + 1))
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after it"])
@pytest.mark.parametrize("dies", [False, True], ids=["thaws", "is killed"])
def test_a_start_that_froze_while_it_went_back_takes_nothing_from_whoever_went_on(
    world: World, freezing: Callable[..., FrozenCalls], number: int, after: bool, dies: bool
) -> None:
    left_behind(world)
    late = Starter(world.run_ledger, freezing(number, after=after, dies=dies))
    if not late.frozen():
        assert late.raised is None
        return  # it makes fewer calls
    world.run_ledger()
    world.input.add_batches(2)
    world.check(world.run_ledger())
    late.thaw()
    assert late.raised is None or isinstance(late.raised, SystemExit if dies else StateBackendError)
    world.input.add_batches(2)
    world.check(world.run_ledger())
    assert world.committed() == list(range(8))
    assert not world.hidden()


@pytest.mark.parametrize("number", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("dies", [False, True], ids=["thaws", "is killed"])
def test_a_start_with_a_savepoint_that_froze_takes_nothing_from_whoever_went_on(
    make_world: Callable[..., World],
    freezing: Callable[..., FrozenCalls],
    number: int,
    dies: bool,
) -> None:
    world = make_world()
    world.input.add_batches(3)
    savepoint = world.run_ledger().savepoint()
    world.input.add_batches(2)
    clone = make_world("clone")

    def start() -> None:
        backend = clone.backend(job="clone", savepoint=savepoint)
        clone.run(backend, clone.ledger(backend, world.input.stream(clone.spark)))

    late = Starter(start, freezing(number, dies=dies))
    assert late.frozen()
    start()
    world.input.add_batches(1)
    start()
    before = (clone.committed(), clone.planned())
    assert before == ([2, 3, 4, 5], [1, 2, 3, 4, 5])
    late.thaw()
    assert late.raised is None or isinstance(late.raised, SystemExit if dies else StateBackendError)
    assert (clone.committed(), clone.planned()) == before
    assert (clone.location / "metadata").exists()
    world.input.add_batches(1)
    start()
    assert clone.committed() == [2, 3, 4, 5, 6]


@contextlib.contextmanager
def _no_abstract_file_system(world: World) -> Iterator[None]:
    """Hadoop's ``FileContext`` does not know the file system, as it may not know gs."""
    key = "fs.AbstractFileSystem.file.impl"
    hadoop = world.spark._jsc.sc().hadoopConfiguration()  # type: ignore[attr-defined]
    before = hadoop.get(key)
    hadoop.unset(key)
    try:
        yield
    finally:
        hadoop.set(key, before)


def test_a_plan_is_replaced_where_no_file_can_be_replaced_by_a_renaming(world: World) -> None:
    """A start went back and was cut off, and another driver planned the batch anew."""
    world.input.add_batches(2)
    world.run_ledger()
    path = world.location / "offsets" / "1"
    text = path.read_bytes()
    location = CheckpointLocation(world.spark, str(world.location))
    for folder in ("commits", "offsets"):
        assert location.take_back(TakenBack(folder, 1, 1, "id"))
    location.drop(TakenBack("commits", 1, 1, "id"))
    other = text.replace(b'"batchTimestampMs":1', b'"batchTimestampMs":2')
    location.write("offsets/1", iter([other]))
    world.input.add_batches(1)
    with _no_abstract_file_system(world):
        world.check(world.run_ledger())
    assert path.read_bytes() == text
    assert world.committed() == [0, 1, 2]
    assert world.hidden() == []


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_hidden_file_takes_the_place_of_what_came_after_it(
    world: World, in_one_step: bool
) -> None:
    world.input.add_batches(2)
    world.run_ledger()
    location = CheckpointLocation(world.spark, str(world.location))
    path = world.location / "offsets" / "1"
    text = path.read_bytes()
    one = TakenBack("offsets", 1, 7, "id")
    assert location.take_back(one)
    assert not location.take_back(one)
    assert (location.taken_back(), world.planned()) == ([one], [0])
    location.write("offsets/1", iter([b"v1\n{}\nother"]))
    assert not location.put_back(one, replace=False)
    assert location.stamp_ms("offsets/1") is None
    with contextlib.nullcontext() if in_one_step else _no_abstract_file_system(world):
        assert location.put_back(one)
        assert not location.put_back(one)
    assert path.read_bytes() == text
    assert b"".join(location.chunks("offsets/1")) == text  # and its checksum is right
    assert location.stamp_ms("offsets/1") is not None
    assert location.taken_back() == []
    location.drop(one)
