"""What is true of a modelled job, and its stand-ins: an unsure store, late writes, local copies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from snapshot.formats.file_index import decode_index
from snapshot.formats.object_names import data_name
from snapshot.protocol.messages import AckRequest, BaseGrant, BeginReply, LocalCopy, SlicePart
from snapshot.storage.memory_store import MemoryStore
from snapshot.storage.object_store import Buffer, CreateOutcome
from statebackend.errors import ObjectNotFoundError, StateBackendError, StoreUnreachableError
from tests.recovery.driver import Started, State, new_id, replayed

Where = tuple[str, int]
QUERY = "query"
BUDGETS = [0, 150, 1 << 20]
DELAYS_MS = {"a": 10, "b": 25}
INITIAL = {b"k0": b"initial"}
FATES = ["acks", "dies", "holds", "dies restoring"]


class Damaged(Exception):
    """What a worker finds damaged: the digest of the slice."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest


class UnsureStore(MemoryStore):
    """Does to the next create what it is told; a `late` write lands when it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.next_create = ""
        self.late: tuple[str, list[bytes]] | None = None

    def create(self, name: str, parts: Sequence[Buffer]) -> CreateOutcome:
        how, self.next_create = self.next_create, ""
        if how == "lost":
            raise StoreUnreachableError("The request was lost.")
        if how == "late":
            self.late = name, [bytes(part) for part in parts]
            raise StoreUnreachableError("No answer came.")
        outcome = super().create(name, parts)
        if how == "answer lost":
            raise StoreUnreachableError("The answer was lost.")
        return outcome

    def land(self) -> None:
        """The write that nobody waits for any more arrives."""
        assert self.late is not None
        (name, parts), self.late = self.late, None
        super().create(name, parts)


class OnItsWay(Future[None]):
    """A record that is written when somebody waits for it, or the model says so."""

    def __init__(self, behind: Behind) -> None:
        super().__init__()
        self.behind = behind

    def result(self, timeout: float | None = None) -> None:
        while not self.done():
            self.behind.write_one()
        return super().result(timeout)


class Behind:
    """In the place of the session's writing thread: writes in order, when it is told to."""

    def __init__(self) -> None:
        self.queue: list[tuple[OnItsWay, Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, call: Callable[..., None], *args: Any) -> OnItsWay:
        future = OnItsWay(self)
        self.queue.append((future, call, args))
        return future

    def write_one(self) -> None:
        future, call, args = self.queue.pop(0)
        try:
            future.set_result(call(*args))
        except StateBackendError as error:
            future.set_exception(error)

    def write_all(self) -> None:
        while self.queue:
            self.write_one()


@dataclass(frozen=True)
class Upload:
    """A base under a grant, not reported yet."""

    started: Started
    grant: BaseGrant
    where: Where
    state: State
    generation: int


@dataclass
class Copy:
    """A local copy as `recovery.local.local_copies` keeps one, the state a dict."""

    job_id: str = ""
    epoch: int | None = None
    chain: str = ""
    applying: str = ""
    state: State = field(default_factory=dict)
    deltas: dict[tuple[int, str], bytes] = field(default_factory=dict)

    def described(self, damaged: Collection[str]) -> LocalCopy:
        if self.epoch is None:
            return LocalCopy(deltas=sorted(self.deltas), damaged=sorted(damaged))
        return LocalCopy(
            damaged=sorted(damaged),
            job_id=self.job_id,
            epoch=self.epoch,
            chain=self.chain,
            applying=self.applying,
            deltas=sorted(self.deltas),
        )

    def stand_at(self, job_id: str, epoch: int, chain: str) -> None:
        self.job_id, self.epoch, self.chain, self.applying = job_id, epoch, chain, ""
        self.deltas = {key: data for key, data in self.deltas.items() if key[0] > epoch}


@dataclass(frozen=True)
class Prepared:
    """An attempt that has its snapshot ready and has not acked yet."""

    started: Started
    ack: AckRequest
    where: Where
    after: State


class ModelledJob(RuleBasedStateMachine):
    """What Spark knows of a job, what is true of it, and its objects as a worker reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.store = UnsureStore()
        self.parallelism = {"a": 2}
        self.current: Started | None = None
        self.older: list[Started] = []
        # What Spark knows: the batch that runs, the last committed one, and batches' stamps.
        self.batch, self.last_commit, self.claimed = 0, -1, False
        self.were_behind = False  # the last start's commits were asynchronous
        self.stamps: dict[int, int] = {}
        self.read_in_part = False
        # What is true: by epoch and subtask; and what the running epoch's newest attempts acked.
        self.truth: dict[int, dict[Where, State]] = {-1: {}}
        self.acked: dict[Where, tuple[int, State]] = {}
        # The same for time: the largest event times by epoch and operator; and, by epoch, the
        # watermark. `logged`: the running epoch was finished by some operator before.
        self.seen: dict[int, dict[str, int | None]] = {-1: {}}
        self.events: dict[Where, int | None] = {}
        self.watermarks: dict[int, int] = {-1: 0}
        self.logged = False
        self.first_epochs: dict[str, int] = {}
        self.durable: set[str] = set()
        self.attempts = 0
        self.copies: dict[tuple[str, Where], Copy] = {}
        self.prepared: list[Prepared] = []
        self.uploads: list[Upload] = []
        self.behind: dict[int, Behind] = {}  # by the id of the start
        self.hurt: dict[str, bytes] = {}  # objects that are damaged or gone, as they were
        self.now_s = 0.0

    @property
    def wheres(self) -> list[Where]:
        return [(uid, n) for uid, p in self.parallelism.items() for n in range(p)]

    @precondition(lambda self: self.current is not None)
    @rule()
    def crash(self) -> None:
        assert self.current is not None
        self.older.append(self.current)
        self.current = None

    def _stamp(self) -> int:
        # Written with the batch's offsets: the same when the batch is repeated.
        return self.stamps.setdefault(self.batch, 1_000 + len(self.stamps))

    def _initial(self, reply: BeginReply, where: Where) -> State:
        """What the operator begins with: its object is there as long as somebody may ask for it."""
        first = self.first_epochs[where[0]]
        assert len(reply.initial) == (self.batch == first)
        return (
            replayed({}, self._whole(reply.initial[0].name), reply.initial[0].digest)
            if reply.initial
            else {}
        )

    def _next_watermark(self, epoch: int) -> int:
        """The watermark after ``epoch``: the smallest of all operators', and never back."""
        seen = [(uid, self.seen[epoch].get(uid)) for uid in self.parallelism]
        candidates = [0 if ms is None else ms - DELAYS_MS[uid] for uid, ms in seen]
        return max(self.watermarks[epoch], min(candidates))

    def _check_times(self, reply: BeginReply) -> None:
        last = self.batch - 1
        if not self.logged or self.batch not in self.watermarks:
            self.watermarks[self.batch] = self._next_watermark(last)
        assert reply.watermark_ms == self.watermarks[self.batch]
        assert reply.late_watermark_ms == self.watermarks[last]

    def _sent(self, part: SlicePart, reply: BeginReply) -> SlicePart:
        """What is over the inline budget becomes an object before the ack."""
        if part.size_bytes <= reply.inline_budget_bytes:
            return part
        name = data_name(reply.generation, self.batch, new_id())
        self.store.put(name, [part.data])
        return SlicePart(digest=part.digest, size_bytes=part.size_bytes, rows=part.rows, name=name)

    def _object(self, name: str, digest: str) -> bytes:
        """An object as a worker reads it: checked."""
        try:
            data = self.store.get(name)
        except ObjectNotFoundError:
            data = b""
            assert name in self.hurt  # nothing else deletes what is needed
        if blake3(data).hexdigest() != digest:
            assert name in self.hurt
            raise Damaged(digest)
        return data

    def _files_state(self, data: bytes, digest: str) -> State:
        state: State = {}
        for file in decode_index(data).files:
            try:
                state = replayed(state, self._object(file.object, file.digest), file.digest)
            except Damaged as found:
                raise Damaged(digest) from found
        return state

    @rule()
    def _heal(self) -> None:
        for name, data in self.hurt.items():
            self.store.put(name, [data])
        self.hurt.clear()

    def _whole(self, name: str) -> bytes:
        return self.hurt[name] if name in self.hurt else self.store.get(name)
