"""Which operators need their initial state, and whether what they are given is theirs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from snapshot.formats.object_names import parse_data_name
from snapshot.formats.record import Manifest
from snapshot.protocol.lineage import OperatorLineage
from snapshot.protocol.operators import OperatorSpec
from statebackend.errors import FencedError, ProtocolError

__all__ = ["check_initial", "lacks_initial", "takes_initial"]


def lacks_initial(
    manifests: Iterable[Manifest], given: Mapping[str, bool], first_epoch: int
) -> list[str]:
    """Operators that would repeat their first epoch without the initial state they had then.

    A later run without the initial state does not change that: a start may still go back over it.

    Args:
        given: whether a start has an initial state, for each of its operators.
        first_epoch: the epoch that the start begins with.
    """
    # By operator: its first epoch, and whether some run gave it.
    had: dict[str, tuple[int, bool]] = {}
    for manifest in manifests:
        initial = manifest.settings.get("initial", ())
        for uid, first in manifest.settings.get("operators", {}).items():
            before = had.get(uid) == (first, True)
            had[uid] = first, before or uid in initial
    return sorted(
        uid
        for uid, has in given.items()
        if not has and uid in had and had[uid][1] and had[uid][0] >= first_epoch
    )


def takes_initial(lineage: OperatorLineage | None, first_epoch: int) -> bool:
    """Whether an operator needs its initial state in a run that begins with ``first_epoch``.

    Its first epoch may have been finished before and is repeated all the same.
    """
    return lineage is None or first_epoch <= lineage.first_epoch


def check_initial(specs: Iterable[OperatorSpec], generation: int) -> None:
    """Refuse initial state that cleaning would take for garbage.

    Raises:
        FencedError: its objects are named with an older generation than this driver's.
        ProtocolError: they have no name of ours.
    """
    for spec in specs:
        for part in spec.initial.values():
            found = parse_data_name(part.name)
            if found is None:
                raise ProtocolError(
                    f"The initial state of operator {spec.uid!r} is in {part.name!r}, which is no "
                    f"name of an object of a job.",
                    todo="Start the query again.",
                )
            if found.generation != generation:
                raise FencedError(
                    f"The initial state of operator {spec.uid!r} was written for generation "
                    f"{found.generation} of the job, and this is generation {generation}: another "
                    f"driver has claimed the job meanwhile.",
                    todo="Let one driver run the job. If no other one does, start the query again.",
                )
