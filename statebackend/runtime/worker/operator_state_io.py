"""A worker's part in states that belong to no key: from what ``begin`` hands it to its ack.

They come from the coordinator and not from local copies: they are small, and in the records. A
worker keeps the blobs that it has seen last, by digest, and says so: what it has is not sent again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

from snapshot.protocol.messages import BeginReply, SlicePart, StatePart
from snapshot.storage.object_store import ObjectStore
from statebackend.errors import CorruptionError, ObjectNotFoundError
from statebackend.operators.operator_snapshot import OperatorSnapshot, StoredOperatorState
from statebackend.state.operator_state import (
    StoredList,
    StoredMap,
    decode_lists,
    decode_maps,
    redistribute,
)
from statebackend.threads import THREADS, Threads

__all__ = ["OperatorStateIO", "StateParts"]

_KEPT_BYTES: Final = 64 << 20  # by one process
_KEPT_EACH: Final = 2  # a twin may have ended the epoch before in another way
_EVERYBODY: Final = -1

Owner = tuple[str, str, int]


@dataclass(frozen=True)
class _Kept:
    blob: bytes
    content: Mapping[str, Any]


class KeptBlobs:
    """What a process has: blobs by whose they are and by digest; the oldest go first."""

    def __init__(self, threads: Threads = THREADS) -> None:
        self._lock = threads.lock()
        self._kept: OrderedDict[tuple[Owner, str], _Kept] = OrderedDict()

    def digests(self, owner: Owner) -> list[str]:
        """Of what is here of one owner."""
        with self._lock:
            return [digest for one, digest in self._kept if one == owner]

    def get(self, owners: Iterable[Owner], digest: str) -> _Kept | None:
        """One that any of these has."""
        with self._lock:
            found = (self._kept.get((owner, digest)) for owner in owners)
            return next((one for one in found if one is not None), None)

    def keep(self, owner: Owner, digest: str, kept: _Kept) -> None:
        """Have it at hand for the next epoch."""
        with self._lock:
            self._kept[owner, digest] = kept
            self._kept.move_to_end((owner, digest))
            mine = [key for key in self._kept if key[0] == owner]
            for key in mine[:-_KEPT_EACH]:
                del self._kept[key]
            while len(self._kept) > 1 and self._bytes() > _KEPT_BYTES:
                self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(len(one.blob) for one in self._kept.values())


_of_process = KeptBlobs()


@dataclass(frozen=True)
class StateParts:
    """What an ack carries: see :class:`AckRequest`."""

    lists: SlicePart | None = None
    maps: SlicePart | None = None
    maps_digest: str = ""

    @property
    def inline_bytes(self) -> int:
        """What goes with the ack itself."""
        return sum(len(part.data) for part in (self.lists, self.maps) if part is not None)


@dataclass
class OperatorStateIO:
    """One attempt's reading and writing of blobs.

    Args:
        job, operator, subtask: whose they are. parallelism: now.
        store: the durable one. cache: what the process that it is in has.
    """

    job: str
    operator: str
    subtask: int
    parallelism: int
    store: ObjectStore
    cache: KeptBlobs = field(default_factory=lambda: _of_process, repr=False)
    _bodies: list[bytes] = field(default_factory=list)
    _held: dict[str, _Kept] = field(default_factory=dict)

    def held(self) -> list[str]:
        """Digests of what this process has: for the ``begin``."""
        return [*self.cache.digests(self._own), *self.cache.digests(self._shared)]

    @property
    def _own(self) -> Owner:
        return self.job, self.operator, self.subtask

    @property
    def _shared(self) -> Owner:
        return self.job, self.operator, _EVERYBODY

    def split_off(self, reply: BeginReply, bodies: list[bytes]) -> list[bytes]:
        """Take the bodies of these states, which come last, out of a reply's: the others."""
        count = sum(part.source == "record" for part in _parts(reply))
        self._bodies = bodies[len(bodies) - count :]
        return bodies[: len(bodies) - count]

    def read(self, reply: BeginReply) -> StoredOperatorState:
        """The states that an attempt begins with.

        Raises:
            CorruptionError: a blob is not what its record names.
        """
        bodies = iter(self._bodies)
        # Before anything is kept: that may push out what the driver was told is here.
        for part in _parts(reply):
            if part.source == "held":
                owners = ((*self._own[:2], part.subtask), self._own, self._shared)
                found = self.cache.get(owners, part.digest)
                if found is not None:
                    self._held[part.digest] = found
        rescaled = reply.operator_parallelism not in (0, self.parallelism)
        old: list[Mapping[str, StoredList]] = [{}] * reply.operator_parallelism
        for part in reply.operator_parts:
            owner = (*self._own[:2], part.subtask)
            old[part.subtask] = self._content(part, owner, bodies, keep=not rescaled)
        lists: Mapping[str, StoredList] = {}
        if rescaled:
            lists = redistribute(old, self.parallelism, self.subtask)
        elif old:
            lists = old[self.subtask]
        maps: Mapping[str, StoredMap] = {}
        if reply.broadcast is not None:
            maps = self._content(reply.broadcast, self._shared, bodies, keep=True, shared=True)
        self._bodies, self._held = [], {}
        return StoredOperatorState(lists, maps)

    def _content(
        self, part: StatePart, owner: Owner, bodies: Any, *, keep: bool, shared: bool = False
    ) -> Mapping[str, Any]:
        # What another subtask had may be what this one has: lists that are empty are alike.
        kept = self._held.get(part.digest) if part.source == "held" else None
        if kept is None:
            blob = next(bodies) if part.source == "record" else self._fetched(part)
            what = part.name or f"operator state of {self.operator!r}"
            if blake3(blob).hexdigest() != part.digest:
                raise _damaged(part, self.operator, "has another digest")
            kept = _Kept(blob, decode_maps(blob, what) if shared else decode_lists(blob, what))
        if keep:
            self.cache.keep(owner, part.digest, kept)
        return kept.content

    def _fetched(self, part: StatePart) -> bytes:
        if not part.name:
            raise _damaged(part, self.operator, "is not here any more")
        try:
            data = self.store.get(part.name)
            if blake3(data).hexdigest() != part.digest:  # a bit that flipped on its way
                data = self.store.get(part.name)
        except ObjectNotFoundError as error:
            raise _damaged(part, self.operator, "is gone") from error
        return data

    def pass_over(self) -> None:
        """Skip the states that came with a begin: they are at hand."""
        self._bodies = []

    def write(
        self,
        snapshot: OperatorSnapshot,
        reply: BeginReply,
        new_names: Sequence[str],
        budget_bytes: int,
    ) -> StateParts:
        """Make a snapshot durable, as far as it is over the budget; the rest goes with the ack.

        A state that has not changed keeps its object. Only the reply that the epoch began with says
        which one that is: an object that was named earlier may be deleted by now.

        Args:
            new_names: of two objects, should they be needed.
        """
        names = {part.digest: part.name for part in _parts(reply) if part.name}
        lists = maps = None
        maps_digest = ""
        if snapshot.lists is not None:
            kept = _Kept(snapshot.lists, snapshot.stored.lists)
            digest = self._keep(self._own, kept)
            rows = sum(len(one.rows) for one in snapshot.stored.lists.values())
            lists = self._part(kept.blob, digest, rows, names, new_names[0], budget_bytes)
            budget_bytes -= len(lists.data)
        if snapshot.maps is not None:
            kept = _Kept(snapshot.maps, snapshot.stored.maps)
            maps_digest = self._keep(self._shared, kept)
            rows = sum(len(one.entries) for one in snapshot.stored.maps.values())
            if self.subtask == 0:
                name = new_names[1]
                maps = self._part(kept.blob, maps_digest, rows, names, name, budget_bytes)
        return StateParts(lists, maps, maps_digest)

    def _keep(self, owner: Owner, kept: _Kept) -> str:
        digest = blake3(kept.blob).hexdigest()
        self.cache.keep(owner, digest, kept)
        return digest

    def _part(
        self,
        blob: bytes,
        digest: str,
        rows: int,
        names: Mapping[str, str],
        new_name: str,
        budget_bytes: int,
    ) -> SlicePart:
        size_bytes = len(blob)
        if size_bytes <= budget_bytes:
            return SlicePart(digest=digest, size_bytes=size_bytes, rows=rows, data=blob)
        name = names.get(digest)
        if name is None:
            name = new_name
            self.store.put(name, [blob])
        return SlicePart(digest=digest, size_bytes=size_bytes, rows=rows, name=name)


def _parts(reply: BeginReply) -> list[StatePart]:
    return [*reply.operator_parts, *([reply.broadcast] if reply.broadcast else [])]


def _damaged(part: StatePart, operator: str, reason: str) -> CorruptionError:
    where = f" in {part.name!r}" if part.name else ""
    return CorruptionError(
        f"State of operator {operator!r} that belongs to no key{where} {reason} "
        f"({part.size_bytes} bytes, digest {part.digest}).",
        todo="Restore it from another copy of the store; an older one is never used instead.",
    )
