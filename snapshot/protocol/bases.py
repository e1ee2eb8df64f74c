"""When a subtask's full state is written, how, and who is doing it: decisions, no I/O.

Small state goes into the record itself, with the epoch's delta, once in so many epochs and
staggered over the subtasks. Larger state is written apart, in the background, by one worker under a
*grant*: a lease that the worker renews while it uploads. A grant that is not renewed has lapsed;
what was uploaded under it is garbage, and another may be given. A finished base waits for the
operator's next record, which names it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from snapshot.protocol.lineage import OperatorLineage, SubtaskLineage
from snapshot.protocol.messages import BaseDone, BeginRequest
from statebackend.errors import StaleRequestError

__all__ = ["BaseBook", "BasePolicy", "Due", "Grant", "due"]


@dataclass(frozen=True)
class BasePolicy:
    """When a base is due.

    Attributes:
        every_epochs: small state is written at least this often.
        apart_every_epochs: the same for large state: it bounds how many records a restart reads.
        apart_min_bytes, apart_ratio: large state is written when the deltas since the last base
            are over both so many bytes and so many times that base's size: it bounds how many
            bytes a restart reads, and how many are uploaded for each byte that changed.
        open_limit: bases of one operator that are uploaded at the same time.
        lease_s: a grant lapses when it was not renewed for so long.
    """

    every_epochs: int = 64
    apart_every_epochs: int = 256
    apart_min_bytes: int = 16 << 20
    apart_ratio: float = 0.5
    open_limit: int = 2
    lease_s: float = 60.0


class Due(enum.Enum):
    """What a subtask has to write besides its delta."""

    NOTHING = "nothing"
    INLINE = "inline"  # with the ack, into the record
    APART = "apart"  # in the background, under a grant


def due(
    policy: BasePolicy,
    lineage: SubtaskLineage,
    *,
    subtask: int,
    parallelism: int,
    epoch: int,
    large_bytes: int,
) -> Due:
    """Whether a base is due in ``epoch``.

    Args:
        lineage: of the subtask, up to the epoch before.
        large_bytes: how large its state is, if it is known not to fit into a record; else 0.
    """
    if _owes_first(policy, lineage, subtask, parallelism, epoch):
        return Due.APART if large_bytes else Due.INLINE
    if not large_bytes:
        since_first = epoch - lineage.start_epoch - 1
        spread = subtask * policy.every_epochs // parallelism
        staggered = since_first > 0 and (since_first + spread) % policy.every_epochs == 0
        return Due.INLINE if staggered else Due.NOTHING
    epochs, size_bytes = lineage.since_base(epoch - 1)
    base = lineage.base_before(epoch - 1)
    state_bytes = max(base.entry.state_bytes, base.entry.size_bytes) if base else large_bytes
    # Spread over the upper half of the interval, so that the subtasks do not come due together.
    limit_epochs = policy.apart_every_epochs * (2 * parallelism - subtask) // (2 * parallelism)
    enough = max(policy.apart_min_bytes, policy.apart_ratio * state_bytes)
    return Due.APART if size_bytes >= enough or epochs >= limit_epochs else Due.NOTHING


def _owes_first(
    policy: BasePolicy, lineage: SubtaskLineage, subtask: int, parallelism: int, epoch: int
) -> bool:
    """Whether a subtask that begins with parts of others should have a base of its own by now.

    Until it has one, what those need is kept, over every further change of parallelism too. So it
    comes soon, but not at once: what was cut off a store is freed first, and not all come together.
    """
    if not lineage.rescaled or lineage.base_before(epoch - 1) is not None:
        return False
    soon = max(1, policy.every_epochs // 4)
    since = epoch - 1 - lineage.start_epoch
    return since > soon + subtask * soon // parallelism


@dataclass
class Grant:
    """One subtask's right to upload a base of its state after ``epoch``.

    ``given``: the objects of the previous base that its worker was told of, and may name again.
    ``asked``: the request that it answers; the same request again gets the same grant.
    """

    id: str
    subtask: int
    epoch: int
    chain: str
    renewed_s: float
    given: frozenset[str] = frozenset()
    asked: BeginRequest | None = None


@dataclass
class BaseBook:
    """One operator's bases that are being made, or wait for a record.

    A base is given to one record only. With two records under way the second would name it too,
    although it is nobody's any more once the first is written, and may be deleted by then.

    Args:
        now_s: the driver's clock. new_id: names grants.

    Attributes:
        waiting: by subtask, for a record. in_record: by grant, in a record that is being written.
    """

    policy: BasePolicy
    now_s: Callable[[], float]
    new_id: Callable[[], str]
    grants: dict[int, Grant] = field(default_factory=dict)
    waiting: dict[int, BaseDone] = field(default_factory=dict)
    in_record: dict[str, BaseDone] = field(default_factory=dict)
    large_bytes: dict[int, int] = field(default_factory=dict)

    def remember(self, lineage: OperatorLineage, epoch: int, budget_bytes: int) -> None:
        """Take from the bases in the log which subtasks' state is large."""
        for index, subtask in enumerate(lineage.subtasks):
            base = subtask.base_before(epoch)
            if base is not None and base.entry.state_bytes > budget_bytes:
                self.large_bytes[index] = base.entry.state_bytes

    def grant(self, subtask: int, epoch: int, chain: str, asked: BeginRequest) -> Grant | None:
        """The right to upload a base; None where enough are being uploaded.

        Args:
            asked: the request that is answered; the same one again gets the same grant.
        """
        self._lapse()
        in_record = {done.subtask for done in self.in_record.values()}
        held = self.grants.get(subtask)
        if held is not None:
            # The same request comes again where its answer was lost.
            return held if held.asked == asked else None
        if subtask in self.waiting or subtask in in_record:
            return None
        if len(self.grants) >= self.policy.open_limit:
            return None
        given = Grant(self.new_id(), subtask, epoch, chain, self.now_s(), asked=asked)
        self.grants[subtask] = given
        return given

    def renew(self, subtask: int, grant_id: str) -> None:
        """The upload goes on.

        Raises:
            StaleRequestError: the grant has lapsed: what was uploaded may be deleted already.
        """
        self._held(subtask, grant_id).renewed_s = self.now_s()

    def give_up(self, subtask: int, grant_id: str) -> None:
        """The upload has ended without a base. Raises as :meth:`renew`."""
        self._held(subtask, grant_id)
        del self.grants[subtask]

    def given(self, subtask: int, grant_id: str) -> frozenset[str]:
        """The objects that came with a grant. Raises as :meth:`renew`."""
        return self._held(subtask, grant_id).given

    def finish(self, done: BaseDone) -> None:
        """The upload is durable; the next record will name it.

        Raises:
            StaleRequestError: the grant has lapsed, or the base is of another state.
        """
        held = self._held(done.subtask, done.grant)
        del self.grants[done.subtask]
        if (done.epoch, done.chain) != (held.epoch, held.chain):
            raise StaleRequestError(
                f"The base of subtask {done.subtask} is not of the state that it was granted for.",
                todo="Nothing to do: it is not used, and cleaned up.",
            )
        self.waiting[done.subtask] = done

    def take(self) -> dict[int, BaseDone]:
        """The bases that wait, by subtask: for a record that is about to be written."""
        taken, self.waiting = self.waiting, {}
        self.in_record.update((done.grant, done) for done in taken.values())
        return taken

    def written(self, named: dict[int, BaseDone]) -> None:
        """The record that took these is durable."""
        for done in named.values():
            self.in_record.pop(done.grant, None)

    def unnamed(self) -> list[BaseDone]:
        """Bases whose objects no durable record names yet."""
        return [*self.waiting.values(), *self.in_record.values()]

    def open_grants(self) -> set[str]:
        """Grants whose objects must not be deleted although no record names them yet."""
        self._lapse()
        return {g.id for g in self.grants.values()} | {done.grant for done in self.unnamed()}

    def _held(self, subtask: int, grant_id: str) -> Grant:
        self._lapse()
        held = self.grants.get(subtask)
        if held is None or held.id != grant_id:
            raise StaleRequestError(
                f"The right to upload a base of subtask {subtask} has lapsed.",
                todo="Nothing to do: another upload will be made.",
            )
        return held

    def _lapse(self) -> None:
        oldest_s = self.now_s() - self.policy.lease_s
        for subtask in [s for s, g in self.grants.items() if g.renewed_s < oldest_s]:
            del self.grants[subtask]
