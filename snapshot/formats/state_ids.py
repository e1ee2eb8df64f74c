"""State ids: the two bytes in every key that say which state of an operator an entry belongs to.

An id is given once. The entries of a state that is gone may still be there, so its id is *retired*:
it stays in the checkpoint under a name that no state can have (the old one, NUL, the id). A state
that is declared again under the old name gets another id and starts empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from statebackend.errors import StateMismatchError

__all__ = ["RESERVED_IDS_FROM", "StateIds", "assign_ids"]

# Timers by time and by key, the TTL index; the rest is kept for what is to come.
RESERVED_IDS_FROM: Final = 0xFFF0

_RETIRED: Final = "\0"


@dataclass(frozen=True)
class StateIds:
    """The ids of one operator in a run.

    Attributes:
        states: by name, retired ones included: what the checkpoint keeps.
        dropped: those of `states` that were deleted by name, whose entries must go, or are gone.
    """

    states: dict[str, int]
    dropped: dict[str, int]


def assign_ids(
    uid: str,
    known: Mapping[str, int],
    *,
    declared: Collection[str],
    deleted: Collection[str] = (),
) -> StateIds:
    """Give every declared state its id.

    Args:
        uid: of the operator, for messages.
        known: as the newest record of the operator has them; empty for a new one.
        declared: names, in the order in which they were declared.
        deleted: names that ``deleteIfExists`` was called with. One that is declared too is a new
            state.

    Raises:
        StateMismatchError: there is no id left.
    """
    states = dict(known)
    for name in [n for n in known if _RETIRED not in n]:
        if name in deleted or name not in declared:
            retired = states.pop(name)
            states[f"{name}{_RETIRED}{retired}"] = retired
    for name in declared:
        if name in states:
            continue
        given = max(states.values(), default=0) + 1
        if given >= RESERVED_IDS_FROM:
            raise StateMismatchError(
                f"Operator {uid!r} has had {given - 1} states; there is no id for state {name!r}.",
                todo="Give the operator another uid: it starts without state.",
            )
        states[name] = given
    dropped = {n: i for n, i in states.items() if _RETIRED in n and n.split(_RETIRED)[0] in deleted}
    return StateIds(states, dropped)
