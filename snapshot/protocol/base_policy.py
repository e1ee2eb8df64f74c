"""When a subtask's full state is written, and how: decisions, no I/O.

Small state goes into the record itself, with the epoch's delta, once in so many epochs and
staggered over the subtasks. Larger state is written apart, in the background: see
`snapshot.protocol.base_leases`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from snapshot.protocol.lineage import SubtaskLineage

__all__ = ["BasePolicy", "Due", "due"]


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
