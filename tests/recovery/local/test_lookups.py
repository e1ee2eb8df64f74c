"""Lookups in stores that are open: what a worker answers, and who is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from recovery.local.store_directory import RecentDelta, StoreDirectory
from snapshot.formats.delta import encode_delta
from statebackend.errors import ProtocolError, StaleRequestError, StateBackendError
from statebackend.rpc.envelope import encode
from statebackend.runtime.driver.pending_lookups import LookupDesk
from statebackend.runtime.lookup_messages import LOOKUP, Answer, LookupPoll, Question
from statebackend.runtime.lookup_messages import decode_questions as questions_in
from statebackend.runtime.worker.lookup_answers import entries_in
from tests.recovery.local.open_stores import subtask
from tests.recovery.local.small_copies import SMALL, marker

A, B, C = b"\0\0a", b"\0\0b", b"\0\0c"
LATER = encode_delta([A, B, C], [b"5a", None, b"5c"])


@pytest.fixture
def held(tmp_path: Path) -> Iterator[StoreDirectory]:
    """A store after epoch 4, with what epoch 5 changed beside it."""
    made = subtask(tmp_path).acquire(timeout_s=1.0)[0]
    store = made.open_store(SMALL)
    store.apply([A, B], [b"4a", b"4b"], marker(4))
    made.write_delta(5, LATER.digest.hex(), LATER.data)
    yield made
    made.release()


def question(epoch: int, **chains: str) -> Question:
    known = {int(name[1:]): chain for name, chain in chains.items()}
    ranges = [(key, key + b"\0") for key in (A, B, C)]
    return Question(0, "job", "op", (0, 7), epoch, known, {5: LATER.digest.hex()}, ranges)


def test_a_store_at_the_epoch_answers(held: StoreDirectory) -> None:
    found = entries_in(held, question(4, e4=marker(4).chain))
    assert found == ([A, B], [b"4a", b"4b"])


def test_what_the_epoch_changed_is_laid_over_a_store_that_is_behind(held: StoreDirectory) -> None:
    asked = question(5, e4=marker(4).chain, e5="later")
    assert entries_in(held, asked) == ([A, C], [b"5a", b"5c"])
    held.recent = RecentDelta(5, LATER.digest.hex(), [A], [b"in memory"])
    assert entries_in(held, asked) == ([A, B], [b"in memory", b"4b"])


def test_an_answer_has_a_limit(held: StoreDirectory) -> None:
    asked = question(4, e4=marker(4).chain)
    assert entries_in(held, asked, limit_bytes=10) == ([A, B], [b"4a", b"4b"])
    assert entries_in(held, asked, limit_bytes=9) is None


def test_a_store_of_another_lineage_does_not_answer(held: StoreDirectory) -> None:
    assert entries_in(held, question(4, e4="another")) is None
    assert entries_in(held, question(3, e3=marker(3).chain)) is None


def test_a_store_without_what_leads_to_the_epoch_does_not_answer(held: StoreDirectory) -> None:
    held.forget_delta(5, LATER.digest.hex())
    with pytest.raises(StateBackendError):
        entries_in(held, question(5, e4=marker(4).chain))


def test_a_store_that_is_closed_does_not_answer(tmp_path: Path) -> None:
    made = subtask(tmp_path).acquire(timeout_s=1.0)[0]
    made.open_store(SMALL)
    made.release()
    assert entries_in(made, question(4, e4=marker(4).chain)) is None


class Worker:
    """Polls once for questions, and then with its answer to them."""

    def __init__(self, desk: LookupDesk, name: str, *, held: bool) -> None:
        self.desk, self.name, self.held = desk, name, held
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        while name not in desk._queues:
            time.sleep(0.001)

    def poll(self, *answers: Answer) -> list[Question]:
        return questions_in(self.desk.call(LOOKUP, encode(LookupPoll(self.name, list(answers)))))

    def run(self) -> None:
        with suppress(StaleRequestError):
            asked = self.poll()  # none, if the other one has answered already
            self.poll(*(Answer(one.id, self.held, [A], [self.name.encode()]) for one in asked))


def test_the_worker_that_holds_the_store_answers() -> None:
    desk = LookupDesk()
    workers = [Worker(desk, "without", held=False), Worker(desk, "with", held=True)]
    answers = desk.ask([question(4), question(5)], 30.0)
    assert answers is not None
    assert [one.values for one in answers] == [[b"with"]] * 2
    desk.close()
    for worker in workers:
        worker.thread.join(30.0)
        assert not worker.thread.is_alive()


def test_nobody_is_waited_for_where_no_worker_holds_the_store() -> None:
    desk = LookupDesk()
    assert desk.ask([question(4)], 3600.0) is None
    assert desk.wanted
    Worker(desk, "without", held=False)
    assert desk.ask([question(4)], 3600.0) is None
    desk.close()
    assert desk.ask([question(4)], 3600.0) is None


def test_a_worker_that_is_silent_is_waited_for_until_the_time_is_up() -> None:
    desk = LookupDesk()
    desk._queues["other"] = []
    desk._seen_s["other"] = time.monotonic()
    assert desk.ask([question(4), question(4)], 0.01) is None
    desk.close()


def test_a_worker_that_has_not_asked_for_long_is_no_more() -> None:
    desk = LookupDesk()
    desk._queues["gone"] = []
    desk._seen_s["gone"] = time.monotonic() - 3600.0
    assert desk.ask([question(4)], 3600.0) is None
    assert "gone" not in desk._queues
    desk.close()


def test_a_worker_asks_a_run_that_has_ended_no_more() -> None:
    """The driver answers for the run until the job is started again: it would ask without end."""
    desk = LookupDesk()
    waits = Worker(desk, "waits", held=True)
    desk.close()
    waits.thread.join(3.0)  # a poll waits for longer
    assert not waits.thread.is_alive()
    with pytest.raises(StaleRequestError):
        desk.call(LOOKUP, encode(LookupPoll("comes late")))


def test_what_is_no_lookup_is_refused() -> None:
    with pytest.raises(ProtocolError, match="other"):
        LookupDesk().call("other", b"")
    with pytest.raises(ProtocolError, match="malformed"):
        LookupDesk().call(LOOKUP, b"\xc1")
