"""Where the event time of a continuous job's operators stood in the checkpoint that is restored.

The coordinator knows one watermark for a whole job, the smallest of all operators: that is right
for a batch, which all of them see. In a stream each operator goes by what its own inputs said. One
that began again with the smallest would take rows for new that were late before, and fire a window
once more.
"""

from __future__ import annotations

from collections.abc import Mapping

from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.operators import OperatorSpec

__all__ = ["restored_watermarks"]


def restored_watermarks(
    specs: Mapping[str, OperatorSpec], lineages: Mapping[str, OperatorLineage], epoch: int
) -> dict[str, int]:
    """The watermark of each operator at the end of an epoch, in milliseconds.

    Args:
        specs, lineages: by operator, as they are in the log.

    Returns:
        by uid; one that goes by no event time, or has not seen any yet, is not there.
    """
    found = {}
    for uid, spec in specs.items():
        entry = lineages[uid].epochs.get(epoch) if uid in lineages else None
        if entry is None:
            continue
        time = spec.time(entry.event_max_ms, entry.next_timer_ms, entry.second_max_ms)
        if time.candidate_ms:
            found[uid] = time.candidate_ms
    return found
