"""The states of a processor under test, from one restart with other code to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from statebackend.errors import StateMismatchError
from statebackend.operators.declared_states import Declarations, StateDeclaration
from statebackend.operators.redeclared_states import redeclared

__all__ = ["StatesUnderTest"]


@dataclass(frozen=True)
class StatesUnderTest:
    """What a driver and its checkpoint know of an operator's states.

    Attributes:
        declared: by name. ids: their numbers in the keys.
        dropped: numbers of states whose entries go in the first epoch after a start.
        withdrawn: names that ``init`` asks for, and then deletes.
    """

    declared: Mapping[str, StateDeclaration]
    ids: dict[str, int]
    dropped: list[int]
    withdrawn: frozenset[str] = frozenset()

    @classmethod
    def first(cls, found: Declarations) -> StatesUnderTest:
        """Of an operator without state."""
        ids = {name: number for number, name in enumerate(found.declared, start=1)}
        dropped = [ids[name] for name in found.dropped if name in ids]
        return cls(found.declared, ids, dropped, frozenset(found.withdrawn))

    def followed_by(self, found: Declarations, uid: str) -> StatesUnderTest:
        """As they go on under a processor of other code.

        Raises:
            StateMismatchError: a state is gone, or cannot become what it is to be.
        """
        declared, ids = dict(found.declared), dict(self.ids)
        gone = [one for one in self.dropped if one not in ids.values()]
        for name, before in self.declared.items():
            if name in found.dropped:
                gone.append(ids.pop(name))  # if it is declared again, it is another state
            elif name in declared:
                declared[name] = redeclared(uid, before, declared[name])
            else:
                raise StateMismatchError(
                    f"State {name!r} is not declared any more.",
                    todo="Declare it as it was, or call deleteIfExists() in init().",
                )
        last = max((*self.ids.values(), *gone), default=0)
        new = [name for name in declared if name not in ids]
        ids |= {name: number for number, name in enumerate(new, start=last + 1)}
        dropped = [*gone, *(ids[name] for name in found.dropped if name in ids)]
        return StatesUnderTest(declared, ids, dropped, frozenset(found.withdrawn))
