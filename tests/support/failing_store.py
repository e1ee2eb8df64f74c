"""A store that fails by plan: requests that get lost, and answers that get lost."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias, TypeVar

from snapshot.storage.object_store import ObjectStore
from snapshot.storage.passing_store import PassingStore
from statebackend.errors import StoreUnreachableError

__all__ = ["FailingStore", "Failure", "Plan"]

Result = TypeVar("Result")

Failure: TypeAlias = Literal["before", "after"] | BaseException | None
Plan: TypeAlias = Callable[[str, str, int], Failure]


class FailingStore(PassingStore):
    """Passes every call on to `inner`, unless the plan says otherwise. Thread-safe."""

    def __init__(self, inner: ObjectStore, plan: Plan) -> None:
        """Decorate a store.

        Args:
            inner: the store.
            plan: asked before every call with the verb (the method's name), the name (the prefix of
                a listing, the first name of a deletion) and how often this verb has been called,
                1 for the first. It answers None: nothing happens; 'before': the request is lost;
                'after': the inner store does it and the answer is lost (of `get_chunks`: after
                the first piece); or an exception: raised, and the request lost.
        """
        super().__init__(inner)
        self._plan = plan
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    def _around(
        self,
        verb: str,
        name: str,
        sent_bytes: int,
        call: Callable[[], Result],
        received_bytes: Callable[[Result], int],
    ) -> Result:
        failure = self._before(verb, name)
        found = call()
        if failure == "after":
            raise self._lost("answer", verb, name)
        return found

    def _stream(self, name: str, start: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        failure = self._before("get_chunks", name)
        for chunk in start():
            yield chunk
            if failure == "after":
                break
        if failure == "after":
            raise self._lost("answer", "get_chunks", name)

    def _before(self, verb: str, name: str) -> Failure:
        with self._lock:
            self._calls[verb] += 1
            number = self._calls[verb]
        failure = self._plan(verb, name, number)
        if isinstance(failure, BaseException):
            raise failure
        if failure == "before":
            raise self._lost("request", verb, name)
        return failure

    def _lost(self, what: str, verb: str, name: str) -> StoreUnreachableError:
        return StoreUnreachableError(
            f"The {what} of {verb} {name!r} to {self.uri} was lost on purpose.",
            todo="This store fails by plan.",
        )
