"""A start that goes back is frozen in any call to the file system, and thaws too late."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from statebackend.errors import FencedError, StateBackendError
from statebackend.spark.location import CheckpointLocation
from tests.spark.local.world import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from statebackend import StateBackend
    from tests.spark.local.world import World

CHANGES = ("delete", "rename")


class FrozenCalls:
    """A Hadoop file system; one thread's call number ``number`` that changes it waits.

    Attributes:
        frozen: it waits. thaw: lets it go on. dies: it does not; the thread ends there.
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
            return result

        return watched

    def _freeze(self) -> None:
        self.frozen.set()
        assert self.thaw.wait(240), "nobody let it go on"
        if self.dies:
            raise SystemExit


class Starter:
    """A driver that starts the query in a thread of its own."""

    def __init__(self, world: World, calls: FrozenCalls) -> None:
        self.backend = world.backend()
        self.calls = calls
        self.raised: BaseException | None = None
        self.done = threading.Event()
        frame = world.ledger(self.backend)

        def run() -> None:
            calls.thread = threading.get_ident()
            try:
                world.start(self.backend, frame).awaitTermination(120)
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


@pytest.mark.parametrize("number", range(1, CALLS + 1))
@pytest.mark.parametrize("after", [False, True], ids=["before the call", "after it"])
@pytest.mark.parametrize("dies", [False, True], ids=["thaws", "is killed"])
def test_a_start_that_froze_while_it_went_back_takes_nothing_from_whoever_went_on(
    world: World, freezing: Callable[..., FrozenCalls], number: int, after: bool, dies: bool
) -> None:
    left_behind(world)
    late = Starter(world, freezing(number, after=after, dies=dies))
    if not late.frozen():
        assert late.raised is None
        return  # it makes fewer calls
    world.run_ledger()
    world.input.add_batches(2)
    world.check(world.run_ledger())
    late.thaw()
    if not dies:
        assert isinstance(late.raised, FencedError | StateBackendError | type(None))
    world.input.add_batches(2)
    world.check(world.run_ledger())
    assert world.committed() == list(range(8))
    assert not world.hidden()
